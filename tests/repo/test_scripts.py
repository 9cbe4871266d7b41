"""Every script of scripts/ explains itself from a bare checkout."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import specbatch

ROOT = Path(specbatch.__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))


def test_each_names_itself_and_others_where_they_lie() -> None:
    """A command in a docstring works from the root of the checkout."""
    assert len(SCRIPTS) > 25
    texts = {script.name: ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) for script in SCRIPTS}
    assert not [name for name, text in texts.items() if not text], "no docstring"
    words = {word for text in texts.values() for word in str(text).split() if re.fullmatch(r"scripts/\S+\.py", word)}
    assert len(words) > 10
    assert not [word for word in words if not (ROOT / word).is_file()], "these do not exist"
