"""Help, short cuts of --set, shell completion, and the template of a configuration."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.cli.options import ConfigOptions
from specbatch.config_load import default_config_text, load_config, option_paths
from specbatch.errors import ConfigError
from specbatch.strict.other_names import _OTHER_NAMES
from tests.cli.test_cli import ROOT, environment
from tests.stub_engine import stub_modules

ROOT_COMMAND: Any = typer.main.get_command(app)
WIDE = {"TERM": "dumb", "COLUMNS": "250"}


def commands(command: Any = ROOT_COMMAND, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


PATHS = list(commands())


@pytest.mark.parametrize("path", PATHS, ids=[" ".join(path) or "specbatch" for path in PATHS])
def test_every_help_ends_with_examples_that_parse(path: tuple[str, ...]) -> None:
    short = CliRunner().invoke(app, [*path, "-h"], env=WIDE)
    assert short.exit_code == 0
    assert CliRunner().invoke(app, [*path, "--help"], env=WIDE).stdout == short.stdout
    _, title, examples = short.stdout.rpartition("Example")
    assert title, short.stdout
    flags = [line for line in short.stdout.splitlines() if "<bool>" in line]  # these three are typer's own
    assert all(re.search("--(help|install-completion|show-completion) ", line) for line in flags), flags
    lines = [line.strip() for line in examples.splitlines()[1:] if line.strip()]
    assert lines[0].startswith(" ".join(("specbatch", *path))), lines
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "specbatch"
        command = ROOT_COMMAND
        while arguments and arguments[0] in getattr(command, "commands", {}):
            command = command.commands[arguments.pop(0)]
        command.make_context("specbatch", arguments)  # raises UsageError for what the command does not have


def test_the_commands_are_those_of_the_readme() -> None:
    names = {path[0] for path in PATHS if len(path) == 1}
    others = {"merge", "tune", "train-draft", "eval", "estimate", "report", "serve-batches", "config", "init", "models"}
    assert names == {"generate", *others}
    readme = ROOT / "README.md"
    if not readme.is_file():
        pytest.skip("no checkout")
    listed = readme.read_text(encoding="utf-8").split("## Commands")[1].split("```")[1]
    assert {line.split()[1] for line in listed.strip().splitlines()} == names


def test_generate_alone_shows_what_to_type(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["generate"], env=WIDE)
    assert done.exit_code == 2
    assert done.stdout == ""
    hint = done.stderr.split("hint: for example: ")[1].replace("\n", " ").strip()
    first, second = hint.split(" && ")
    assert second == "specbatch generate data.jsonl"
    subprocess.run(first, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "data.jsonl").read_text() == '{"prompt": "What is the capital of France?"}\n'


SHORT_CUTS = ["--model", "m", "--draft", "d", "--method", "eagle", "--max-tokens", "7", "--temperature", "0.25"]
SHORT_CUTS += ["--certificate"]


def test_short_cuts_set_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ConfigOptions(
        None, "m", "d", "eagle", 7, 1e-7, certificate=True, workers=8, cluster="auto", set=["engine.seed=3"]
    )
    config = given.load()
    assert (config.model.target, config.speculation.draft, config.speculation.method) == ("m", "d", "eagle")
    assert (config.sampling.max_tokens, config.sampling.temperature, config.engine.seed) == (7, 1e-7, 3)
    assert config.output.certificate
    assert (config.cluster.workers, config.cluster.address) == (8, "auto")
    assert ConfigOptions().sets == []
    with pytest.raises(ConfigError, match=r"--max-tokens and --set sampling.max_tokens are both given"):
        ConfigOptions(max_tokens=7, set=["sampling.max_tokens=7"]).load()


def test_config_takes_all_short_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, module in stub_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    done = CliRunner().invoke(app, ["config", *SHORT_CUTS])
    assert done.exit_code == 0, done.stderr
    for line in ("target: m", "draft: d", "method: eagle", "max_tokens: 7", "temperature: 0.25", "certificate: true"):
        assert f"  {line}\n" in done.stdout
    for command in ("generate", "tune", "eval"):
        assert set(SHORT_CUTS[::2]) <= {
            flag for parameter in ROOT_COMMAND.commands[command].params for flag in parameter.opts
        }
    mistaken = CliRunner().invoke(app, ["config", "--method", "ngrm"])
    assert mistaken.exit_code == 2
    assert "did you mean ngram?" in mistaken.stderr


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("generate --method ng", ["ngram"]),
        ("generate --set sampling.temp", ["sampling.temperature="]),
        ("eval gsm8k_", ["gsm8k_chat"]),
        ("models pull smollm2-135m-instruct-", ["smollm2-135m-instruct-eagle3", "smollm2-135m-instruct-block"]),
        ("generate --model buil", ["builtin:smollm2-135m-instruct"]),
        ("config --draft b", ["builtin:smollm2-135m-instruct-eagle3", "builtin:smollm2-135m-instruct-block"]),
        ("generate -c builtin-c", ["builtin-cpu"]),
        ("generate -c my", ["my.yaml", "mydir/"]),
        ("eval -c mydir/", ["mydir/other.yml"]),
        ("generate --model mydir/", ["mydir/m.gguf"]),
    ],
)
def test_shell_completion(typed: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mydir").mkdir()
    for name in ("my.yaml", "my.txt", "mydir/other.yml", "mydir/m.gguf", "mydir/.hidden.yaml"):
        Path(name).touch()
    words = f"specbatch {typed}"
    shell = {"_SPECBATCH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = CliRunner().invoke(app, [], prog_name="specbatch", env=shell)
    assert done.stdout.split() == expected, done.stderr


def test_shell_completion_of_the_program(tmp_path: Path) -> None:
    shell = {"_SPECBATCH_COMPLETE": "complete_bash", "COMP_WORDS": "specbatch gen", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "specbatch"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(**shell), text=True, capture_output=True, timeout=60)
    assert done.stdout.split() == ["generate"], done.stderr


def test_init_writes_the_template_and_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init"])
    assert (done.exit_code, done.stdout) == (0, ""), done.stderr
    written = (tmp_path / "specbatch.yaml").read_text(encoding="utf-8")
    assert written == default_config_text()
    assert "# 0 = greedy." in written
    os.remove("specbatch.yaml")
    default = load_config()
    Path("specbatch.yaml").write_text(written)
    assert load_config() == default
    Path("specbatch.yaml").write_text("engine: {seed: 5}")
    again = CliRunner().invoke(app, ["init"])
    assert again.exit_code == 2
    assert "specbatch.yaml exists already" in again.stderr
    assert Path("specbatch.yaml").read_text() == "engine: {seed: 5}"
    assert CliRunner().invoke(app, ["init", "no/such.yaml"]).exit_code == 2
    assert CliRunner().invoke(app, ["init", "other.yaml"]).exit_code == 0
    assert Path("other.yaml").read_text(encoding="utf-8") == written


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--device", "Did you mean --set engine.device=VALUE?"),
        ("--batch-size", "Did you mean --set engine.max_batch_size=VALUE?"),
        ("--max-num-seqs", "Did you mean --set engine.max_batch_size=VALUE?"),
        ("--gpu-memory-utilization", "Did you mean --set engine.memory_fraction=VALUE?"),
        ("--quantization", "Did you mean --set model.quantization=VALUE?"),
        ("--frequency-penality", "Did you mean --set sampling.frequency_penalty=VALUE?"),
        ("--temprature", "(Possible options: --temperature)"),
        ("--retry_errors", "(Possible options: --retry-errors)"),
        ("--output-file", "(Possible options: --output)"),
        ("--max_tokens", "(Possible options: --max-tokens)"),
        ("--out", "(Possible options: --output)"),
        ("--resume", "The same command resumes"),
        ("--force", "Did you mean --overwrite?"),
        ("--num_workers", "Did you mean --workers?"),
        ("--format", "The name of the output says it"),
        ("-m", "Did you mean --model?"),
    ],
)
def test_an_unknown_option_names_the_one_that_is_meant(option: str, text: str) -> None:
    result = CliRunner().invoke(app, ["generate", "data.jsonl", option, "3"], env=WIDE)
    assert result.exit_code == 2
    assert f"No such option: {option}" in result.output
    assert text in result.output


def test_a_command_without_configuration_has_no_such_hint() -> None:
    result = CliRunner().invoke(app, ["models", "list", "--device", "cpu"], env=WIDE)
    assert "No such option: --device" in result.output
    assert "--set" not in result.output


def test_short_cuts_of_sampling_and_system_message() -> None:
    config = ConfigOptions(top_p=0.5, seed=7, system="Answer: yes, or no # please").load()
    assert (config.sampling.top_p, config.sampling.seed) == (0.5, 7)
    assert config.data.system_prompt == "Answer: yes, or no # please"


def test_names_of_other_tools_are_options_here() -> None:
    paths = option_paths()
    for name, meant in _OTHER_NAMES.items():
        assert meant in paths
        with pytest.raises(ConfigError, match="unknown option") as caught:
            load_config(None, [f"engine.{name}=1"])
        assert meant.rpartition(".")[2] in str(caught.value.hint)
