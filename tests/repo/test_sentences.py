"""Docstrings begin with a verb or a noun, and comments with a subject: a ratchet counts those that do not."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path

import specbatch

PACKAGE = Path(specbatch.__file__).resolve().parent
ROOT = PACKAGE.parent
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
# These words begin an elliptic fragment: "Of a batch.", "# that it holds".
DOCSTRING = re.compile(r"(?:Of|What|Whether|With|As)\b|None:")
COMMENT = re.compile(r"#\s*(?:of|that|in|for|by)\s")
# The docstrings and the comments that may begin so, for each folder of specbatch (a module at the top: its name) and
# for scripts. Nobody raises the numbers. Folders that are not listed have none.
MAX_DOCSTRINGS: dict[str, int] = {}
MAX_COMMENTS: dict[str, int] = {}


def docstrings(text: str) -> list[tuple[int, str]]:
    """List the docstrings of a module, its classes and its functions that begin with a refused word."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found: list[tuple[int, str]] = []
    if not re.search(rf"""["']\s*(?:{DOCSTRING.pattern})""", text):  # most modules need not be parsed
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and DOCSTRING.match(words := ast.get_docstring(node) or ""):
            found.append((node.body[0].lineno, words.splitlines()[0]))
    return found


def comments(text: str) -> list[tuple[int, str]]:
    """List the comments that begin with a refused word. The later lines of a comment of several lines do not count."""
    found: list[tuple[int, str]] = []
    if not COMMENT.search(text):  # no token is one: most modules need not be tokenised
        return found
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or not COMMENT.match(token.string):
            continue
        line, column = token.start
        goes_on = not lines[line - 1][:column].strip() and line > 1 and lines[line - 2].lstrip().startswith("#")
        if not goes_on:
            found.append((line, token.string))
    return found


def over_maximum(find: Callable[[str], list[tuple[int, str]]], maximum: dict[str, int]) -> dict[str, list[str]]:
    """Return the finds of each folder that has more than its maximum."""
    found: dict[str, list[str]] = {}
    for path, base in [*((path, PACKAGE) for path in PACKAGE.rglob("*.py")), *((path, ROOT) for path in SCRIPTS)]:
        name = path.relative_to(base)
        for line, words in find(path.read_text(encoding="utf-8")):
            found.setdefault(name.parts[0], []).append(f"{name}:{line}: {words}")
    return {folder: lines for folder, lines in found.items() if len(lines) > maximum.get(folder, 0)}


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert not over_maximum(docstrings, MAX_DOCSTRINGS)


def test_comments_begin_with_a_subject() -> None:
    assert not over_maximum(comments, MAX_COMMENTS)


def test_fragments_are_seen() -> None:
    code = '"""Of a batch."""\ndef f():\n'
    code += '    """What runs."""\n    # A line\n    # that goes on\n    x = 1  # of it\n    # for y\n'
    assert docstrings(code) == [(1, "Of a batch."), (3, "What runs.")]
    assert comments(code) == [(6, "# of it"), (7, "# for y")]
    assert not docstrings('"""Offer a batch."""')
