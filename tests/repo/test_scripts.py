"""Every script of scripts/ explains itself from a bare checkout."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import specbatch

ROOT = Path(specbatch.__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_names_itself_where_it_lies(script: Path) -> None:
    """A command in a docstring works from the root of the checkout."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    assert text, "no docstring"
    for word in text.split():
        if word.startswith("scripts/") and word.endswith(".py"):
            assert (ROOT / word).is_file(), f"{word} does not exist"


def test_is_checked_on_something() -> None:
    assert len(SCRIPTS) > 25
