"""`specbatch config` finds what `generate` would refuse, without weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config_load import load_config
from specbatch.errors import ConfigError, InputError
from specbatch.job.check import ConfigCheck
from specbatch.models.formats.tokenizer import byte_tokenizer


def check(*sets: str) -> ConfigCheck:
    return ConfigCheck(load_config(None, list(sets)), byte_tokenizer(300, (0,)), 64)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("sampling.response_format={type: json_schema, json_schema: {schema: {type: foo}}}", "Invalid type: foo"),
        ("sampling.regex=(", "regex"),
        ("sampling.grammar=start", "grammar"),
        ("data.chat_template={% for m in messages %}", "chat_template is not valid"),
        ("data.prompt_template={{ x", "prompt_template is not a valid template"),
        ("data.prompt_template=missing.txt", "cannot read"),
        ("sampling.logit_bias={999: 1.0}", "logit_bias"),
    ],
)
def test_options_that_cannot_work(option: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(option)


def test_the_first_rows(tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"q": "hi"}\n{"q": "' + "x" * 90 + '"}\nno json\n{"a": 1}\n{"q": "ho"}\n')
    found = check("data.prompt_template=Q: {q}", "data.prompts_as_chat=false").rows(str(rows))
    assert (found.num_rows, found.prompt, found.num_tokens) == (5, "Q: hi", 5)
    assert list(found.errors.values()) == [1, 1, 1]
    lines = "\n".join(found.lines("a.jsonl"))
    assert "a.jsonl: 2 of the first 5 rows can run" in lines
    assert "1 rows: the row has no 'q'" in lines
    assert "it has 5 tokens" in lines or "has 5 tokens:\nQ: hi" in lines
    with pytest.raises(InputError, match="none of the first 4 rows"):
        check("data.prompt_template={z}").rows(str(rows))


def test_on_the_command_line(tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"prompt": "hi"}\n')
    tiny = ["--model", "random:tiny", "--set", "engine.device=cpu", "--method", "none"]
    done = CliRunner().invoke(app, ["config", *tiny, "--check", str(rows)])
    assert done.exit_code == 0, done.output
    assert "1 of the first 1 rows can run" in done.stderr
    assert "max_tokens" in done.stdout
    done = CliRunner().invoke(app, ["config", *tiny, "--set", "sampling.regex=("])
    assert done.exit_code == 2
    assert "regex" in done.stderr
