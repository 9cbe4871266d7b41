"""What README.md says is so, and it stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import specbatch

ROOT = Path(specbatch.__file__).resolve().parent.parent
HERE = "https://github.com/specbatch/specbatch/"
MAX_LINES = 150


@pytest.fixture
def readme() -> str:
    path = ROOT / "README.md"
    if not path.is_file():
        pytest.skip("no checkout")
    return path.read_text(encoding="utf-8")


def test_it_is_read_once(readme: str) -> None:
    assert readme.count("\n") <= MAX_LINES


def test_commands_and_files_exist(readme: str) -> None:
    assert "pip install . && specbatch generate examples/questions.jsonl" in readme
    assert "pip install -e '.[dev]' && pytest -q" in readme
    assert (ROOT / ".ci" / "run").is_file()
    assert "`.ci/run`" in readme
    linked = [link for link in re.findall(r"\]\((.*?)\)", readme) if link.startswith(HERE)]
    assert len(linked) > 10
    for link in linked:
        kind, branch, name = link.removeprefix(HERE).split("#")[0].split("/", 2)
        assert branch == "main", link
        path = ROOT / name
        assert path.is_dir() if kind == "tree" else path.is_file(), link


def test_links_work_outside_of_the_repository(readme: str) -> None:
    """Package indexes show the same text without the other files."""
    for link in re.findall(r"\]\((.*?)\)", readme):
        assert link.startswith(("https://", "#")), link


def test_it_links_every_page(readme: str) -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert f"docs/{page.name}" in readme, page.name
