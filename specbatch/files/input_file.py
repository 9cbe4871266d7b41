"""One input file: its format, which its name says, the check that its content has it, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from specbatch.errors import InputError, SpecbatchError
from specbatch.files.csv_file import csv_rows
from specbatch.files.file_kind import HEAD, binary_kind, check_content, check_text
from specbatch.files.json_file import has_lines, json_rows
from specbatch.files.jsonl import READ_ERRORS, BadRow, decompressed, numbered_lines, open_lines
from specbatch.files.local import WHOLE_HASH_BYTES
from specbatch.schemas.column_kinds import Kind

RowData = bytes | dict[str, Any] | BadRow  # a JSON line, the columns of a table, or an error

JSONL = (".jsonl", ".ndjson")
_TEXTS = (*JSONL, ".csv", ".tsv", ".json")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
_COMPRESSED = (".gz", ".zst")
_TABLES = (".parquet", ".arrow")
SUFFIXES = (*(text + end for text in _TEXTS for end in ("", *_COMPRESSED)), *_TABLES)


@dataclass(frozen=True, slots=True)
class InputFile:
    """The rows of a file, each with its index."""

    rows: Callable[[], Iterator[tuple[int, RowData]]]
    total: int | None  # rows, if that is known; of JSON lines their lines, with blank ones
    columns: dict[str, Kind] = field(default_factory=dict)  # only parquet and Arrow files say them


def suffix_of(name: str) -> str | None:
    """The part of a file's name that says its format, in small letters, such as .jsonl.gz; None: no known one."""
    fits = (suffix for suffix in SUFFIXES if name.lower().endswith(suffix))
    return max(fits, key=len, default=None)


def has_json_lines(name: str) -> bool:
    return (suffix_of(name) or "").startswith(JSONL)


def open_file(path: Path, name: str, num_lines: int | None) -> InputFile:
    """Open an input file. `name`: its name for messages. `num_lines`: the number of its lines, if it is known. It
    raises InputError for a file with another kind of content than its name says, for a CSV or JSON file whose syntax is
    broken, and for a table without its end."""
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
    text, end = _parts(suffix)
    check_content(name, head, end or text)
    if text in _TABLES:
        return _open_table(path, name, text)
    if end:
        head = _uncompressed_head(path)
    check_text(f"the content of {name}" if end else name, head, ".jsonl" if text in JSONL else text)
    num_lines = num_lines if not end else None
    opened = partial(open_lines, path)
    if text in JSONL or (text == ".json" and _has_lines(opened, name)):
        return InputFile(lambda: _lines(opened, name), num_lines)
    rows = _numbered(name, lambda: _values(opened, name, text))
    return InputFile(rows, _count(path, rows))


def rows_of_stream(opened: Callable[[], BinaryIO], name: str) -> Iterator[tuple[int, RowData]]:
    """The rows of a text file of a store, whose name says its format. It is read as rows are needed, and not checked
    before. `opened` opens it."""
    text, end = _parts(suffix_of(name) or "")

    def decompress() -> BinaryIO:
        return decompressed(opened(), end)

    if text in JSONL or (text == ".json" and _has_lines(decompress, name)):
        return _lines(decompress, name)
    return _numbered(name, lambda: _values(decompress, name, text))()


def is_text(name: str) -> bool:
    """Return whether a file with this name has lines of text as rows."""
    return (suffix_of(name) or "").startswith(_TEXTS)


def _parts(suffix: str) -> tuple[str, str]:
    """Divide a suffix into (format, compression), such as (.jsonl, .gz)."""
    end = next((end for end in _COMPRESSED if suffix.endswith(end)), "")
    return suffix.removesuffix(end), end


def _open_table(path: Path, name: str, suffix: str) -> InputFile:
    from specbatch.files.arrow_table import arrow_rows, count_parquet_rows, kinds_of_columns, parquet_rows

    if suffix == ".parquet":
        total = count_parquet_rows(path, name)
        return InputFile(_numbered(name, lambda: parquet_rows(path)), total, kinds_of_columns(path))
    return InputFile(_numbered(name, lambda: arrow_rows(path, name)), None, kinds_of_columns(path))


def _has_lines(opened: Callable[[], BinaryIO], name: str) -> bool:
    try:
        with opened() as file:
            return has_lines(file)
    except READ_ERRORS as exc:
        raise InputError(f"{name} cannot be read past row 0: {exc}") from exc


def _lines(opened: Callable[[], BinaryIO], name: str) -> Iterator[tuple[int, RowData]]:
    with opened() as file:
        yield from numbered_lines(file.readline, name)


def _values(opened: Callable[[], BinaryIO], name: str, text: str) -> Iterator[RowData]:
    with opened() as file:
        yield from json_rows(file, name) if text == ".json" else csv_rows(file, name, DELIMITERS[text])


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
