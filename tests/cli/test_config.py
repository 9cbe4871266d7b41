"""The strict configuration: every mistake is named with its path and the legal values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config import OF_GENERATION_CONFIG, Config, DataSection
from specbatch.config_load import (
    config_to_dict,
    default_config_text,
    dump_config,
    load_config,
    option_paths,
)
from specbatch.errors import ConfigError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # ./specbatch.yaml of a developer must not matter


def test_packaged_default_names_every_option() -> None:
    def paths(tree: dict, prefix: str = "") -> list[str]:
        found = []
        for key, value in tree.items():
            found += paths(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
        return found

    # Options that a model can decide are left out.
    text = re.sub(r"^( +)# ([a-z_]+: \S+)$", r"\1\2", default_config_text(), flags=re.MULTILINE)
    assert paths(yaml.safe_load(text)) == option_paths()
    assert load_config().given_sampling.isdisjoint(OF_GENERATION_CONFIG.values())
    config = load_config()
    assert config.model.target == "builtin:smollm2-135m-instruct"
    assert config.speculation.method == "auto"
    # A configuration of two lines means what the packaged one does: the model's chat template decides.
    (Path.cwd() / "two.yaml").write_text("sampling:\n  max_tokens: 7\n")
    assert config.data == load_config("two.yaml").data == DataSection(prompts_as_chat=None)


def test_local_file_wins_over_default_and_path_over_local(tmp_path: Path) -> None:
    Path("specbatch.yaml").write_text("sampling: {max_tokens: 7}")
    (tmp_path / "other.yaml").write_text("sampling: {max_tokens: 8}\nspeculation:\n")
    assert load_config().sampling.max_tokens == 7
    assert load_config("other.yaml").sampling.max_tokens == 8
    assert load_config("other.yaml", ["sampling.max_tokens=9"]).sampling.max_tokens == 9


def test_round_trip() -> None:
    sets = ["sampling.stop=['a', \"\\n\"]", "data.prompt_template=Q: {q}", "speculation.num_steps=4", "engine.seed=3"]
    config = load_config(None, sets)
    Path("x.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config("x.yaml") == config
    assert config_to_dict(config)["sampling"]["stop"] == ["a", "\n"]
    assert load_config("x.yaml") != Config()


@pytest.mark.parametrize(
    ("item", "path", "value"),
    [
        ("sampling.temperature=1", "temperature", 1.0),
        ("sampling.temperature=1e-1", "temperature", 0.1),
        ('sampling.stop=["a","b"]', "stop", ("a", "b")),
        ("sampling.stop=a", "stop", ("a",)),
        ("sampling.stop_token_ids=[1, 2]", "stop_token_ids", (1, 2)),
        ("sampling.logprobs=null", "logprobs", None),
        ("sampling.logprobs=0", "logprobs", 0),
        ("sampling.ignore_eos=true", "ignore_eos", True),
    ],
)
def test_set_values(item: str, path: str, value: object) -> None:
    found = getattr(load_config(None, [item]).sampling, path)
    assert found == value
    assert type(found) is type(value)


def test_resources_are_names_with_amounts() -> None:
    cluster = load_config(None, ["cluster.resources={a100: 1, rack: 0.5}"]).cluster
    assert cluster.resources == {"a100": 1.0, "rack": 0.5}
    with pytest.raises(ConfigError, match=r"cluster\.resources\.a100 must be a number > 0, not 0"):
        load_config(None, ["cluster.resources={a100: 0}"])
    with pytest.raises(ConfigError, match=r"cluster\.resources must be a mapping of names to amounts, not 'a100'"):
        load_config(None, ["cluster.resources=a100"])


def test_set_of_text_options_is_taken_unchanged() -> None:
    assert load_config(None, ["data.prompt_template=Q: {question}"]).data.prompt_template == "Q: {question}"
    assert load_config(None, ["data.prompt_template={q}"]).data.prompt_template == "{q}"
    assert load_config(None, ["model.target=123"]).model.target == "123"
    assert load_config(None, ["speculation.draft=null"]).speculation.draft is None
    assert load_config(None, ["engine.device=cuda:0"]).engine.device == "cuda:0"


def test_set_of_a_section_merges() -> None:
    Path("specbatch.yaml").write_text("speculation: {ngram: {min_match: 3}}")
    ngram = load_config(None, ["speculation.ngram={max_match: 9}"]).speculation.ngram
    assert (ngram.min_match, ngram.max_match) == (3, 9)


@pytest.mark.parametrize(
    ("item", "option"),
    [
        ("speculation.num_speculative_tokens=4", "speculation.num_steps"),
        ("num_speculative_tokens=4", "speculation.num_steps"),
        ("speculation.schedule=[{max_batch: 4, num_speculative_tokens: 4}]", "speculation.schedule[0].num_steps"),
    ],
)
def test_what_vllm_calls_its_drafts_is_translated(item: str, option: str) -> None:
    """Its 4 are four drafts; num_draft_tokens counts the root as well."""
    with pytest.raises(ConfigError, match="unknown option") as caught:
        load_config(None, [item])
    hint = str(caught.value.hint)
    assert f"is {option}: 4;" in hint
    assert "num_draft_tokens is 5" in hint
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["speculation.num_speculative_tokens=four"])
    assert "is speculation.num_steps; num_draft_tokens is one more" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("item", "message", "hint"),
    [
        ("sampling.temprature=1", "unknown option sampling.temprature", "sampling.temperature"),
        ("samplin.temperature=1", "unknown option samplin", "sampling"),
        ("engine.temperature=1", "unknown option engine.temperature", "sampling.temperature"),
        ("speculation.ngram.min=1", "unknown option speculation.ngram.min", "min_match"),
        ("speculation.method=ngrm", "auto, none, ngram, ", "ngram"),
        (
            "sampling.temperature=-0.1",
            "sampling.temperature must be a number >= 0|sampling.temperature must be >= 0",
            "",
        ),
        ("sampling.temperature=.nan", "sampling.temperature must be", ""),
        ("sampling.top_p=0", "> 0 and <= 1", ""),
        ("sampling.top_p=1.01", "> 0 and <= 1", ""),
        ("sampling.top_k=-2", ">= -1", ""),
        ("sampling.min_p=2", ">= 0 and <= 1", ""),
        ("sampling.max_tokens=0", ">= 1", ""),
        ("sampling.max_tokens=true", "an integer", ""),
        ("sampling.max_tokens=1.5", "an integer", ""),
        ("sampling.max_tokens=null", "an integer", ""),
        ("sampling.n=0", ">= 1", ""),
        ("sampling.logprobs=21", "<= 20", ""),
        ("sampling.seed=-1", ">= 0", ""),
        ("sampling.stop=['']", "empty", ""),
        ("sampling.stop=3", "text or a list of texts", ""),
        ("speculation.num_steps=0", "speculation.num_steps must be >= 1", ""),
        ("speculation.topk=0", "speculation.topk must be >= 1", ""),
        ("speculation.topk=two", "speculation.topk must be an integer", ""),
        ("speculation.num_draft_tokens=0", ">= 1", ""),
        ("speculation.simulate_acceptance=0.9", "speculation.simulate_acceptance must be >= 1", ""),
        ("speculation.simulate_acceptance=.nan", "finite", ""),
        ("speculation.simulate_acceptance=two", "must be a number >= 1 or null", ""),
        ("engine.page_size=0", "engine.page_size must be >= 1", ""),
        ("engine.memory_fraction=0", "> 0 and <= 1", ""),
        ("engine.memory_fraction=.inf", "finite", ""),
        ("engine.prefix_cache=1", "engine.prefix_cache must be true or false", ""),
        ("engine.seed=true", "engine.seed must be an integer", ""),
        ("speculation.ngram.min_match=9", "max_match", ""),
        ("model=3", "model must be a mapping", ""),
        ("model.target.x=3", "model.target has no options", ""),
        ("sampling.n", "expected a.b=value", ""),
        ("sampling.n=[", "not valid YAML", ""),
    ],
)
def test_mistakes_on_the_command_line(item: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [item])
    assert any(part in caught.value.message for part in message.split("|")), caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampling: {n: 1, n: 2}", "given twice"),
        ("sampling: [1]", "sampling must be a mapping"),
        ("- 1", "must hold a mapping"),
        ("a: [", "not valid YAML"),
        ("model: {dtype: fp8}", "model.dtype must be one of"),
        ("model: {backend: hf}", "model.backend must be one of"),
        ("model: {target: 3}", "model.target must be text"),
        ("x: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("data: {prompt_template: '{a}', prompt_column: b}", "both set"),
    ],
)
def test_mistakes_in_the_file(text: str, message: str) -> None:
    Path("c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config("c.yaml")
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("data:\n  prompt_template: Hello: {a}", "write text with a colon in quotes"),
        ("data:\n  prompt_template: {{ a }}", "write text that begins with {{ in quotes"),
        ("data:\n  prompt_template: {a}", "write text with { or [ in quotes"),
        ("data:\n\tprompt_template: a", "indent with spaces"),
        ("model: base", "known here: target, dtype"),
        ("model: {path: base}", "did you mean model.target?"),
        ("data: {id: ticket}", "did you mean data.id_column?"),
    ],
)
def test_hints_for_mistakes_in_the_file(text: str, hint: str) -> None:
    Path("c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config("c.yaml")
    assert hint in (caught.value.hint or "")


def test_values_that_do_not_go_together_have_the_path_of_their_section() -> None:
    with pytest.raises(ConfigError, match=r"^sampling\.choice must be a list of two or more different texts"):
        load_config(None, ["sampling.choice=yes, no"])


def test_config_refuses_templates_that_no_row_can_fill() -> None:
    for template, words in (
        ("{a", "not a valid template"),
        ("hello", "names no field"),
        ("no.txt", "cannot read no.txt"),
    ):
        done = CliRunner().invoke(app, ["config", "--set", f"data.prompt_template={template}"])
        assert (done.exit_code, words in done.stderr) == (2, True), done.stderr


def test_variables_of_chat_templates_are_no_texts_for_true_and_false() -> None:
    """Each text is true in a template, `no` as well."""
    with pytest.raises(ConfigError, match=r"chat_template_kwargs\.enable_thinking is the text 'no'") as caught:
        load_config(None, ["data.chat_template_kwargs={enable_thinking: no}"])
    assert "write false" in (caught.value.hint or "")
    config = load_config(None, ["data.chat_template_kwargs={enable_thinking: false, effort: low}"])
    assert config.data.chat_template_kwargs == {"enable_thinking": False, "effort": "low"}


def test_missing_file_suggests_its_neighbour() -> None:
    Path("fast.yaml").write_text("")
    assert load_config("fast.yaml") == Config()
    with pytest.raises(ConfigError) as caught:
        load_config("fats.yaml")
    assert "fast.yaml" in (caught.value.hint or "")


def test_yes_and_no_are_texts_where_texts_are_wanted(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("sampling: {choice: [yes, no], ignore_eos: yes}\nengine: {deterministic: Off, compile: off}\n")
    config = load_config(file)
    assert config.sampling.choice == ("yes", "no")
    assert (config.sampling.ignore_eos, config.engine.deterministic, config.engine.compile) == (True, False, "off")
    assert load_config(None, ["sampling.choice=[on, off]"]).sampling.choice == ("on", "off")
    with pytest.raises(ConfigError, match="ignore_eos must be true or false, not 'maybe'"):
        load_config(None, ["sampling.ignore_eos=maybe"])
