"""What README.md says is so, and it stays short."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import specbatch

ROOT = Path(specbatch.__file__).resolve().parent.parent
HERE = "https://github.com/specbatch/specbatch/"
MAX_LINES = 175


@pytest.fixture
def readme() -> str:
    path = ROOT / "README.md"
    if not path.is_file():
        pytest.skip("no checkout")
    return path.read_text(encoding="utf-8")


def test_it_is_read_once(readme: str) -> None:
    assert readme.count("\n") <= MAX_LINES


def test_lines_are_short(readme: str) -> None:
    assert [line for line in readme.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_commands_and_files_exist(readme: str) -> None:
    assert "pip install . && specbatch generate examples/questions.jsonl" in readme
    assert "pip install -e '.[dev]' && pytest -q" in readme
    assert (ROOT / ".ci" / "run").is_file()
    assert "`.ci/run`" in readme
    for name in re.findall(r"examples/\w+\.(?:jsonl|csv)\b", readme):
        assert (ROOT / name).is_file(), name
    linked = relative_links(readme)
    assert len(linked) > 10
    for link in linked:
        assert (ROOT / link.partition("#")[0]).exists(), link


def relative_links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\((.*?)\)", text) if not link.startswith(("https://", "#"))]


def test_links_work_outside_of_the_repository(readme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Package indexes show the text that setup.py makes of it, without the other files."""
    setuptools = pytest.importorskip("setuptools")
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    shown = given["long_description"]
    assert relative_links(shown) == []
    addresses = [link for link in re.findall(r"\]\((.*?)\)", shown) if link.startswith(HERE)]
    assert len(addresses) == len(relative_links(readme))
    for link in addresses:
        kind, branch, name = link.removeprefix(HERE).split("#")[0].split("/", 2)
        assert branch == "main", link
        path = ROOT / name
        assert path.is_dir() if kind == "tree" else path.is_file(), link
        assert (kind == "raw") == name.endswith((".png", ".svg")), link


def test_it_links_every_page(readme: str) -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert f"docs/{page.name}" in readme, page.name


def test_a_table_comes_before_the_figures(readme: str) -> None:
    assert readme.index("specbatch init --for") < readme.index("## Speed")
