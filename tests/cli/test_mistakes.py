"""Typing mistakes, and the whole text that each gets: the tables of mistakes.md, which says how they are read."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbatch.cli import app
from tests.stub_engine import stub_modules

PAGE = Path(__file__).with_name("mistakes.md")
WIDE = {"COLUMNS": "2000", "TERM": "dumb"}


def table(title: str) -> list[tuple[str, str]]:
    """Return the rows of a section: what is typed, and the text."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.*?)` \| (.*) \|$", section, re.M)
    return [(typed, text.replace("\\|", "|")) for typed, text in rows]


def typed(folder: Path, arguments: list[str]) -> str:
    """Return the text that a command prints, as it is in the tables."""
    result = CliRunner().invoke(app, arguments, env=WIDE)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = [re.sub(r"^[│╭╰─ ]+|[│╮╯─ ]+$", "", line) for line in result.stderr.splitlines()]
    lines = [line for line in lines if line and not re.match(r"Usage: |Try |Error$", line)]
    return " / ".join(lines)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, module in stub_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.jsonl").write_text('{"prompt": "x"}\n')
    return tmp_path


def test_there_are_twenty_of_each() -> None:
    assert len(table("Options")) >= 20
    assert len(table("YAML")) >= 20


@pytest.mark.parametrize(("arguments", "text"), table("Options"))
def test_an_option(folder: Path, arguments: str, text: str) -> None:
    assert typed(folder, ["generate", "r.jsonl", *arguments.split()]) == text
    assert [path.name for path in folder.iterdir()] == ["r.jsonl"]


@pytest.mark.parametrize(("content", "text"), table("YAML"))
def test_yaml(folder: Path, content: str, text: str) -> None:
    (folder / "x.yaml").write_text(content.replace("\\n", "\n").replace("\\t", "\t"))
    assert typed(folder, ["config", "-c", "x.yaml"]) == text
