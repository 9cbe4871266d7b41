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
# These words begin an elliptic fragment: "Of a batch.", "# that it holds".
DOCSTRING = re.compile(r"(?:Of|What|Whether|With|As)\b|None:")
COMMENT = re.compile(r"#\s*(?:of|that|in|for|by)\s")
# For each folder of specbatch (a module of its own: its name): the docstrings and the comments that may begin so. Lower
# the numbers when you rewrite some; nobody raises them. Folders that are not listed have none.
MAX_DOCSTRINGS: dict[str, int] = {
    "api.py": 1,
    "attention": 1,
    "batch.py": 6,
    "cache": 8,
    "cli": 1,
    "config.py": 2,
    "counts.py": 2,
    "draft": 11,
    "evals": 27,
    "files": 26,
    "grammar": 8,
    "graphs": 6,
    "job": 32,
    "kernels": 36,
    "logprobs.py": 1,
    "matcher.py": 5,
    "options": 2,
    "parallel": 17,
    "report": 5,
    "results": 18,
    "rows": 15,
    "scaleout": 14,
    "schemas": 3,
    "signals.py": 1,
    "startup.py": 2,
    "text": 12,
    "tune": 30,
    "types.py": 2,
}
MAX_COMMENTS: dict[str, int] = {
    "api.py": 1,
    "batch.py": 5,
    "cache": 7,
    "counts.py": 5,
    "draft": 6,
    "evals": 12,
    "files": 23,
    "grammar": 11,
    "graphs": 2,
    "job": 42,
    "kernels": 17,
    "models": 2,
    "parallel": 5,
    "report": 7,
    "results": 16,
    "rows": 18,
    "scaleout": 24,
    "schemas": 1,
    "setup": 1,
    "text": 8,
    "tune": 43,
    "types.py": 5,
}


def docstrings(text: str) -> list[tuple[int, str]]:
    """List the docstrings of a module, its classes and its functions that begin with a refused word."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and DOCSTRING.match(words := ast.get_docstring(node) or ""):
            found.append((node.body[0].lineno, words.splitlines()[0]))
    return found


def comments(text: str) -> list[tuple[int, str]]:
    """List the comments that begin with a refused word. The later lines of a comment of several lines do not count."""
    found = []
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
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
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
