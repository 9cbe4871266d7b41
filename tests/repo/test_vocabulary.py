"""One meaning for each word: retired names are not used, nor the words that CONTRIBUTING.md replaces."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import specbatch

ROOT = Path(specbatch.__file__).resolve().parent.parent
CODE = sorted(path for folder in ("specbatch", "scripts") for path in (ROOT / folder).rglob("*.py"))
FOLDERS = ("docs", "docs/bench", "configs", "tests")  # not docs/log: it has the words of its day
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md")),
        *(ROOT / "specbatch").rglob("*.md"),
    ]
)
LIST = "| do not write | write |"
# Retired identifiers, and what they are called now.
RETIRED = {
    "DeviceEngine": "Engine",
    "NoiseKey": "RngKey",
    "Purpose": "Draw",
    "SlotState": "RequestTable",
    "SlotColumns": "batch.Field",
    "rows_B": "req_idx_B",
    "picked_T": "logits_indices",
    "capture_layers": "aux_layers",
    "is_computed": "prefill_done",
    "prefill_end": "prefill_done",
    "worthwhile_tokens": "min_prefill_tokens",
    "goes_on": "resume_deferred",
    "awaits": "shares_pending_page",
    "lead": "draft_kv_offset",
    "redraft": "set_drafters",
    "abandon": "abort_all",
    "stand": "start_dummy_batch",
    "told": "log",
    "tell": "log",
    "wave": "traced batch",
    "spell": "timing window",
    "kept_folder": "TuneCache",
    "Kept": "TuneCache",
    "Widest": "SearchLimits",
    "Candidate": "DraftShape",
    "Chosen": "Plan",
    "Point": "Plan",
    "linear_config": "GemmTile",
    "tuned_products": "nothing: the option is gone",
    "twin": "reference",
    "behind": "offset, after",
}
# A reference to a module, or to a function: `module.Class`, see `module`.
REFERENCE = re.compile(r"`([a-z]\w*)\.[A-Z]\w*`|\b[Ss]ee `([a-z]\w*)`")
# Limits are max_x and min_x.
RETIRED_PREFIXES = ("MOST_", "LEAST_", "FEW_")


def refused_words() -> list[str]:
    """The first column of the list in CONTRIBUTING.md."""
    _, _, table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(LIST)
    rows = table.split("\n\n")[0].splitlines()[2:]
    return [word.strip() for row in rows for word in row.split("|")[1].split(",")]


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Every name that a module defines or uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield from (*node.name.split("."), node.asname or "")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The comments and texts of a module, each with its line; a comment over several lines is one text."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)):
            yield token.start[0], " ".join(token.string.split())


@cache
def prose_of(file: Path) -> list[tuple[int, str]]:
    return list(prose(file.read_text(encoding="utf-8")))


def with_match(files: list[Path], pattern: re.Pattern[str]) -> list[Path]:
    """List the files in whose names or texts a pattern matches, also over the end of a line. Few need to be parsed."""
    texts = ((file, f"{file.stem} {file.read_text(encoding='utf-8')}") for file in files)
    return [file for file, text in texts if pattern.search(" ".join(text.split()))]


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def retired(name: str) -> bool:
    bare = name.lstrip("_")
    return name in RETIRED or bare in RETIRED or bare.startswith(RETIRED_PREFIXES)


@pytest.fixture(scope="module")
def refused() -> re.Pattern[str]:
    if not (ROOT / "CONTRIBUTING.md").is_file():
        pytest.skip("no checkout")
    words = refused_words()
    assert len(words) > 10
    return re.compile(rf"\b({'|'.join(re.escape(word) for word in words)})\b", re.IGNORECASE)


def test_retired_names_are_not_used() -> None:
    found = {}
    word = re.compile(rf"\b_*(?:(?:{'|'.join(RETIRED)})\b|{'|'.join(RETIRED_PREFIXES)})")
    for file in with_match(CODE, word):
        names = {file.stem, *identifiers(ast.parse(file.read_text(encoding="utf-8")))}
        if used := {name: RETIRED.get(name.lstrip("_"), "max_x, min_x") for name in filter(retired, names)}:
            found[name_of(file)] = used
    assert not found, "the names on the right are used instead"


def test_texts_and_comments_have_plain_words(refused: re.Pattern[str]) -> None:
    found = [
        (f"{name_of(file)}:{line}", match.group())
        for file in with_match(CODE, refused)
        for line, text in prose_of(file)
        if (match := refused.search(text))
    ]
    assert not found, "CONTRIBUTING.md says what to write"


def test_pages_have_plain_words(refused: re.Pattern[str]) -> None:
    assert len(PAGES) > 10
    found = []
    for page in PAGES:
        before, _, after = page.read_text(encoding="utf-8").partition(LIST)
        text = " ".join((before + after.partition("\n\n")[2]).split())
        found += [(name_of(page), match.group()) for match in refused.finditer(text)]
    assert not found, "CONTRIBUTING.md says what to write"


def test_references_are_to_what_exists() -> None:
    """A module that is renamed is renamed in prose, too."""
    functions = {name for file in CODE for name in re.findall(r"\bdef (\w+)\(", file.read_text(encoding="utf-8"))}
    known = {"torch", "datasets", *functions, *(name for file in CODE for name in (file.stem, file.parent.name))}
    texts = [(file, text) for file in with_match(CODE, REFERENCE) for _, text in prose_of(file)]
    texts += [(page, " ".join(page.read_text(encoding="utf-8").split())) for page in PAGES]
    references = [(name_of(file), match[1] or match[2]) for file, text in texts for match in REFERENCE.finditer(text)]
    assert len(references) > 20
    assert [reference for reference in references if reference[1] not in known] == []


def test_what_is_refused_is_seen() -> None:
    """There are files to read, and the parsers see names, comments and texts of every kind."""
    assert len(CODE) > 100
    code = "def redraft(x):\n    # is told\n    'stands'\n    return f'so many {x}', x.Kept\n"
    assert {"redraft", "x", "Kept"} <= set(identifiers(ast.parse(code)))
    texts = [text for _, text in prose(code)]
    assert any("told" in t for t in texts)
    assert any("stands" in t for t in texts)
    assert any("so many" in t for t in texts)
    assert retired("_MOST_ROWS")
    assert not retired("most_common")
