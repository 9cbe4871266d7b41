"""The warning where drafts are hardly ever right: when it comes, what it proposes, and a file job with such a head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from specbatch.cli import app
from specbatch.config import SpeculationSection
from specbatch.config_load import load_config
from specbatch.counts import SpeculationCounts
from specbatch.errors import ConfigError
from specbatch.job.warnings import low_acceptance_warning
from specbatch.models.formats.eagle_files import LAYER_IDS
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.setup.resolve import resolve
from specbatch.setup.speculation import low_acceptance, resolve_speculation
from tests.eagle_reference import head_tensors, random_target, write_head


def counted(rounds: int, accepted: int, plain_rounds: int = 0) -> SpeculationCounts:
    """`accepted` rounds kept one of three drafts, `plain_rounds` had none."""
    counts = SpeculationCounts()
    for i in range(rounds):
        kept = int(i < accepted)
        counts.record(drafted=3, depth=3, accepted=kept, committed=kept + 1)
    for _ in range(plain_rounds):
        counts.record(drafted=0, depth=0, accepted=0, committed=1)
    return counts


def test_it_does_not_warn_too_early() -> None:
    for counts in (SpeculationCounts(), counted(199, 0), counted(0, 0, 500), counted(200, 40)):
        assert low_acceptance_warning(counts, "the moon") is None
    text = str(low_acceptance_warning(counted(250, 25), "the moon"))
    assert text.startswith("warning: the acceptance length is 1.10 after 250 rounds")
    assert text.endswith("Likely causes: the moon")


def test_rounds_that_draft_nothing_are_not_counted() -> None:
    """A schedule decodes large batches without drafts."""
    assert low_acceptance_warning(counted(200, 100, plain_rounds=5000), "x") is None
    assert low_acceptance_warning(counted(200, 10, plain_rounds=5000), "x") is not None
    assert low_acceptance_warning(counted(200, 10), None) is None


def test_causes_by_method() -> None:
    eagle = SpeculationSection("eagle", draft="a", num_steps=3)
    assert "trained for another target" in str(low_acceptance(eagle, None))
    assert "family" in str(low_acceptance(SpeculationSection("draft_model", draft="a"), None))
    for nobody in (
        SpeculationSection("none"),
        SpeculationSection("ngram"),
        SpeculationSection("eagle3", draft="random:eagle3"),
        SpeculationSection("eagle", draft="a", simulate_acceptance=2.0),
    ):
        assert low_acceptance(nobody, None) is None


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_only_eagle3_has_layers_to_choose(method: str) -> None:
    sets = [f"speculation.method={method}", "speculation.draft=x", "speculation.aux_layers=[1, 2, 3]"]
    section = load_config(None, sets).speculation
    with pytest.raises(ConfigError, match=rf"speculation\.method is {method}"):
        resolve_speculation(section, "random:tiny", [])
    none = load_config(None, ["speculation.method=none", "speculation.aux_layers=[1, 2, 3]"]).speculation
    assert resolve_speculation(none, "random:tiny", []).section.aux_layers is None


def test_shape_heads_read_the_layers_that_are_configured() -> None:
    sets = ["model.target=random:tiny", "speculation.method=eagle3", "speculation.draft=random:eagle3"]
    usual = resolve(load_config(None, sets)).config.speculation.aux_layers
    assert usual is not None
    assert len(usual) == 3
    chosen = resolve(load_config(None, [*sets, "speculation.aux_layers=[0, 1, 2]"])).config.speculation
    assert chosen.aux_layers == (0, 1, 2) != usual


@pytest.mark.wide
def test_a_file_job_with_a_head_that_is_never_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random_target(Path("target"), vocab_size=260, eos_token_id=None)
    byte_tokenizer(260, [256]).save_pretrained("target")
    write_head(Path("head"), head_tensors("eagle3", vocab=260), vocab_size=260, **{LAYER_IDS: [1, 3, 6]})
    Path("q.jsonl").write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(16)))
    sets = ["model.target=target", "engine.device=cpu", "sampling.max_tokens=20", "engine.kv_cache_tokens=4096"]
    sets += ["speculation.draft=head", "data.prompts_as_chat=false", "sampling.ignore_eos=true"]

    def command(*arguments: str) -> Result:
        options = [part for one in (*sets, "speculation.method=eagle3") for part in ("--set", one)]
        return CliRunner().invoke(app, [arguments[0], *options, *arguments[1:]])

    done = command("generate", "q.jsonl")
    assert done.exit_code == 0, done.output
    assert f"speculation.aux_layers: inputs of layers 1, 3, 6 (vLLM's reading of {LAYER_IDS}" in done.output
    assert done.output.count("warning: the acceptance length is 1.0") == 1
    assert "try --set 'speculation.aux_layers=[2, 4, 7]'" in done.output
    notes = json.loads(Path("q.results.stats.json").read_text())["notes"]
    assert sum("Likely causes" in note for note in notes) == 1
    assert "aux_layers:\n  - 1\n  - 3\n  - 6\n" in command("config").output

    # What is drafted decides over sampled texts: with other layers it is another job, and greedy texts stay.
    other = ["--set", "speculation.aux_layers=[2, 4, 7]"]
    refused = command("generate", "q.jsonl", *other)
    assert refused.exit_code == 2
    assert "speculation.aux_layers: [1, 3, 6] -> [2, 4, 7]" in refused.output
    done = command("generate", "q.jsonl", "-o", "other.jsonl", *other)
    assert done.exit_code == 0, done.output
    assert "inputs of layers 2, 4, 7 (as configured)" in done.output
    assert "set speculation.aux_layers; or it was trained with norm_before_residual" in done.output
    plain = command("generate", "q.jsonl", "-o", "plain.jsonl", "--set", "speculation.method=none")
    assert plain.exit_code == 0, plain.output
    names = ("q.results.jsonl", "other.jsonl", "plain.jsonl")
    texts = [[json.loads(line)["text"] for line in Path(name).read_text().splitlines()] for name in names]
    assert len(texts[0]) == 16
    assert texts[0] == texts[1] == texts[2]
