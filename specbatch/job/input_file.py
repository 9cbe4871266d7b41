"""One input file: its format, which its name says, the check that its content has it, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.errors import InputError, SpecbatchError
from specbatch.job.csv_file import csv_rows
from specbatch.job.file_kind import HEAD, binary_kind, check_content, check_text
from specbatch.job.files import WHOLE_HASH_BYTES
from specbatch.job.json_file import has_lines, json_rows
from specbatch.job.jsonl import READ_ERRORS, BadRow, numbered_lines, open_lines

RowData = bytes | dict[str, Any] | BadRow  # a JSON line, the columns of a table, or an error

JSONL = (".jsonl", ".ndjson")
_TEXTS = (*JSONL, ".csv", ".tsv", ".json")
_COMPRESSED = (".gz", ".zst")
_TABLES = (".parquet", ".arrow")
SUFFIXES = (*(text + end for text in _TEXTS for end in ("", *_COMPRESSED)), *_TABLES)


@dataclass(frozen=True, slots=True)
class InputFile:
    """The rows of a file, each with its index."""

    rows: Callable[[], Iterator[tuple[int, RowData]]]
    total: int | None  # rows, if that is known; of JSON lines their lines, with blank ones


def suffix_of(name: str) -> str | None:
    """The part of a file's name that says its format, in small letters, such as .jsonl.gz; None: no known one."""
    fits = (suffix for suffix in SUFFIXES if name.lower().endswith(suffix))
    return max(fits, key=len, default=None)


def has_json_lines(name: str) -> bool:
    return (suffix_of(name) or "").startswith(JSONL)


def open_file(path: Path, name: str, num_lines: int | None) -> InputFile:
    """`name`: for messages. `num_lines`: of the file, if they are known. A file with another kind of content than its
    name says is an InputError here, as is a CSV or JSON file whose syntax is broken, and a table without its end."""
    suffix = suffix_of(path.name)
    with path.open("rb") as file:
        head = file.read(HEAD)
    if suffix is None:
        kind = binary_kind(head)
        raise InputError(
            f"the input {name} has no known format" + (f": it is {kind[0]}" if kind else ""),
            (f"{kind[1]}; " if kind and kind[1] else "")
            + f"known: {', '.join(SUFFIXES)}; `-` reads JSON lines from standard input",
        )
    text, end = suffix, ""
    if suffix not in _TABLES:
        end = next((end for end in _COMPRESSED if suffix.endswith(end)), "")
        text = suffix.removesuffix(end)
    check_content(name, head, end or text)
    if text in _TABLES:
        return _open_table(path, name, text)
    if end:
        head = _uncompressed_head(path)
    check_text(f"the content of {name}" if end else name, head, ".jsonl" if text in JSONL else text)
    if text in JSONL:
        return InputFile(lambda: _lines(path, name), num_lines if not end else None)
    if text == ".json":
        return _open_json(path, name, num_lines if not end else None)
    rows = _numbered(name, lambda: _csv(path, name, "\t" if text == ".tsv" else ","))
    return InputFile(rows, _count(path, rows))


def _open_table(path: Path, name: str, suffix: str) -> InputFile:
    from specbatch.job.arrow_table import arrow_rows, count_parquet_rows, parquet_rows

    if suffix == ".parquet":
        return InputFile(_numbered(name, lambda: parquet_rows(path)), count_parquet_rows(path, name))
    return InputFile(_numbered(name, lambda: arrow_rows(path, name)), None)


def _open_json(path: Path, name: str, num_lines: int | None) -> InputFile:
    try:
        with open_lines(path) as file:
            are_lines = has_lines(file)
    except READ_ERRORS as exc:
        raise InputError(f"{name} cannot be read past row 0: {exc}") from exc
    if are_lines:
        return InputFile(lambda: _lines(path, name), num_lines)

    def values() -> Iterator[RowData]:
        with open_lines(path) as file:
            yield from json_rows(file, name)

    rows = _numbered(name, values)
    return InputFile(rows, _count(path, rows))


def _lines(path: Path, name: str) -> Iterator[tuple[int, RowData]]:
    with open_lines(path) as file:
        yield from numbered_lines(file.readline, name)


def _csv(path: Path, name: str, delimiter: str) -> Iterator[RowData]:
    with open_lines(path) as file:
        yield from csv_rows(file, name, delimiter)


def _numbered(name: str, rows: Callable[[], Iterator[RowData]]) -> Callable[[], Iterator[tuple[int, RowData]]]:
    """The rows with their indices. Errors of readers, which are of many kinds, say which row is the last good one."""

    def numbered() -> Iterator[tuple[int, RowData]]:
        index = -1
        try:
            for index, row in enumerate(rows()):
                yield index, row
        except SpecbatchError:
            raise
        except Exception as exc:
            raise InputError(f"{name} cannot be read past row {index + 1}: {first_line(exc)}") from exc

    return numbered


def _count(path: Path, rows: Callable[[], Iterator[Any]]) -> int | None:
    """The number of rows, which are all read: a file that cannot be read to its end is found before the work. None for
    a file so long that this would take minutes."""
    return sum(1 for _ in rows()) if path.stat().st_size <= WHOLE_HASH_BYTES else None


def _uncompressed_head(path: Path) -> bytes:
    """Empty for a damaged file: its rows say where."""
    try:
        with open_lines(path) as file:
            return file.read(HEAD)
    except READ_ERRORS:
        return b""


def first_line(exc: BaseException) -> str:
    """An error of a library in one line."""
    cause = exc.__cause__ if exc.__cause__ is not None and not str(exc).strip() else exc
    text = str(cause).strip().splitlines()
    return text[0] if text else type(cause).__name__
