"""The commands and the configuration of docs/recipes.md, run as they are written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbatch import LLM
from specbatch.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
TINY = ["--model", "random:tiny", "--method", "none", "--set", "engine.device=cpu"]


def blocks(language: str, title: str) -> list[str]:
    """Return the code blocks of a section."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def test_labels_for_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pandas = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    tickets = pandas.read_csv(ROOT / "examples" / "tickets.csv", dtype=str)
    pandas.concat([tickets.head(11), tickets[tickets["body"].isna()]]).to_csv("tickets.csv", index=False)
    init, run = blocks("", "Labels for a table")
    assert CliRunner().invoke(app, shlex.split(init)[1:]).exit_code == 0
    written = Path("specbatch.yaml").read_text()
    (shown,) = blocks("yaml", "Labels for a table")
    assert written.split('"schema": {')[0] == shown.split('"schema": {')[0]
    for line in run.splitlines():
        words = shlex.split(line.partition(" >")[0])[1:]
        words = [word for word in words if word not in ("--model", "org/name")]
        done = CliRunner().invoke(app, [*words, *TINY])
        assert done.exit_code == 0, done.output
    (code,) = blocks("python", "Labels for a table")
    exec(code)
    assert "label" in capsys.readouterr().out
    table = pandas.read_parquet("tickets.results.parquet")
    assert list(table.columns[:7]) == ["ticket_id", "subject", "body", "plan", "created", "label", "urgent"]
    assert set(table["label"]) <= {"billing", "bug", "account", "other"}
    assert table["urgent"].dtype == bool


def test_coming_from_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python", "Coming from vLLM")
    monkeypatch.setattr("specbatch.LLM", lambda model: LLM(model="random:tiny", method="none", device="cpu"))
    exec(code)
    assert len(capsys.readouterr().out) > 1
