"""speculation.method: auto: the drafter that comes with specbatch, for its target only; else n-grams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config_load import load_config
from specbatch.draft.shape import DraftShape
from specbatch.errors import ConfigError, ModelError
from specbatch.models.catalog import cached_path
from specbatch.models.formats.block_files import BlockCheckpoint
from specbatch.models.formats.eagle_files import EagleCheckpoint
from specbatch.setup.resolve import resolve
from specbatch.setup.speculation import decide_method

TARGET = "builtin:smollm2-135m-instruct"
HEAD, DRAFTER = f"{TARGET}-eagle3", f"{TARGET}-block"


@pytest.mark.parametrize(
    ("attention", "method", "draft"),
    [("auto", "block", DRAFTER), ("triton", "block", DRAFTER), ("flashinfer", "eagle3", HEAD)],
)
def test_the_default_drafts_with_a_head_of_the_default_target(attention: str, method: str, draft: str) -> None:
    """FlashInfer runs no block drafters."""
    config, notes = load_config(None, []), list[str]()
    decided = decide_method(config.speculation, config.model.target, notes, attention=attention)
    assert (config.model.target, decided.method, decided.draft) == (TARGET, method, draft)
    assert f"{method} with {draft}" in notes[0]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ([], (5, 1, 6)),
        (["num_steps=8"], (8, 1, 9)),
        (["num_draft_tokens=4"], (3, 1, 4)),
        (["topk=4"], (5, 4, 8)),
        (["topk=4", "num_steps=7", "num_draft_tokens=16"], (7, 4, 16)),
        (["schedule=[{max_batch: 8}]"], (5, 1, 6)),
    ],
)
@pytest.mark.parametrize("method", ["auto", "block"])
def test_the_built_in_drafter_drafts_5_tokens_by_default(
    method: str, options: list[str], shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks have 8. The target is of the built-in one's geometry, whose file need not be there."""
    target = "random:smollm2-135m"
    monkeypatch.setattr("specbatch.setup.speculation.builtin_head", lambda target, method: DRAFTER)
    sets = [f"model.target={target}", *(f"speculation.{option}" for option in options)]
    sets += [f"speculation.method={method}", *([f"speculation.draft={DRAFTER}"] if method == "block" else [])]
    run = resolve(load_config(None, sets))
    section = run.config.speculation
    assert (section.method, section.draft, run.speculation.shapes) == ("block", DRAFTER, [DraftShape(*shape)])


def test_a_block_has_at_most_its_drafts() -> None:
    sets = ["model.target=random:smollm2-135m", "speculation.method=block", f"speculation.draft={DRAFTER}"]
    with pytest.raises(ConfigError, match="num_steps is 9, and a block of this drafter has 8 drafts"):
        resolve(load_config(None, [*sets, "speculation.num_steps=9"]))


def test_other_targets_draft_with_ngrams() -> None:
    run = resolve(load_config(None, ["model.target=random:tiny"]))
    assert (run.config.speculation.method, run.config.speculation.draft) == ("ngram", None)
    assert run.config.speculation.num_draft_tokens == 6
    assert any(note.startswith("speculation.method: ngram") for note in run.notes)


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_what_is_named_is_left_alone(method: str) -> None:
    section, notes = load_config(None, [f"speculation.method={method}"]).speculation, list[str]()
    assert decide_method(section, TARGET, notes) is section
    assert not notes


def test_a_draft_wants_its_method_named() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.draft is set") as caught:
        resolve(load_config(None, ["model.target=random:tiny", "speculation.draft=somewhere"]))
    assert "eagle3 or block" in str(caught.value.hint)


def test_the_head_fits_the_geometry_of_its_target() -> None:
    sets = ["model.target=random:smollm2-135m", "speculation.method=eagle3", f"speculation.draft={HEAD}"]
    draft = resolve(load_config(None, sets)).draft
    assert isinstance(draft, EagleCheckpoint)
    assert draft.config.draft_vocab_size == 4864


def test_the_block_drafter_fits_the_geometry_of_its_target() -> None:
    sets = ["model.target=random:smollm2-135m", "speculation.method=block", f"speculation.draft={DRAFTER}"]
    draft = resolve(load_config(None, sets)).draft
    assert isinstance(draft, BlockCheckpoint)
    assert (draft.config.draft_vocab_size, draft.config.max_drafts, draft.notes[1:]) == (8192, 8, ())


@pytest.mark.parametrize(("method", "draft"), [("eagle3", HEAD), ("block", DRAFTER), ("eagle", "builtin:NAME")])
def test_a_method_without_a_draft_names_the_one_that_comes_with_specbatch(method: str, draft: str) -> None:
    with pytest.raises(ConfigError, match="needs speculation") as caught:
        resolve(load_config(None, [f"speculation.method={method}"]))
    assert draft in (caught.value.hint or "")


def test_a_head_is_no_target() -> None:
    with pytest.raises(ModelError, match="not supported") as caught:
        resolve(load_config(None, [f"model.target={HEAD}"]))
    assert "draft head" in str(caught.value.hint)


@pytest.mark.slow
def test_the_default_writes_what_plain_decoding_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real models, where the target has been fetched: the same greedy text on a CPU, in fewer rounds."""
    if cached_path(TARGET.removeprefix("builtin:")) is None:
        pytest.skip("specbatch models pull smollm2-135m-instruct")
    monkeypatch.chdir(tmp_path)  # ./specbatch.yaml of a developer must not matter
    questions = ["What is 17 + 25?", "Name three fruits.", "Tom has 4 bags of 6 apples and eats 3. How many are left?"]
    Path("q.jsonl").write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    texts = []
    for name, method in (("auto", []), ("none", ["--set", "speculation.method=none"])):
        command = ["generate", "q.jsonl", "-o", f"{name}.jsonl", "--set", "engine.device=cpu", *method]
        done = CliRunner().invoke(app, [*command, "--set", "sampling.max_tokens=48"])
        assert done.exit_code == 0, done.output
        texts.append([json.loads(line)["text"] for line in Path(f"{name}.jsonl").read_text().splitlines()])
    assert texts[0] == texts[1]
    assert json.loads(Path("auto.stats.json").read_text())["speculation"]["acceptance_length"] > 1.5
