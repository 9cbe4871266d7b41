"""Flat results as a table: the input's own columns, one for each property of the answers' schema, text, end and error.

Their types follow from the schema, from the input's file, and else from all rows together, so a first pass reads all
lines. The last column, `specbatch`, has the result line itself: the file is read back by retries, merges and reports.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from specbatch.files.jsonl import decode_value, valid_text
from specbatch.schemas.column_kinds import Kind, cell, either, kind_of

LINE = "specbatch"  # the last column, with the result line
DELIMITERS = {".csv": ",", ".tsv": "\t"}
FLAT_SUFFIXES = (".parquet", *DELIMITERS)
_WHOLE = "answer"  # the column of an answer that is no object
_SUFFIX = "_answer"  # added to a name that an earlier column has
_MAX_INPUT_COLUMNS = 1000  # fields of JSON lines can have any names; those of later ones are only in LINE
_MAX_HEADER = 64 << 20  # characters
_MAX_CELL = 1 << 30  # characters; the default of `csv` is 128 KiB
_ALWAYS: Mapping[str, Kind] = {"text": "text", "finish_reason": "text", "error": "text"}
_IF_ANY: Mapping[str, Kind] = {
    "incomplete": "boolean",
    "reasoning_content": "text",
    **dict.fromkeys(("tool_calls", "choice_scores", "choices", "logprobs", "prompt_logprobs"), "json"),
}


@dataclass(frozen=True)
class FlatColumns:
    """Facts about the columns of a job, known before its rows. `id_name`: the field of ids. `given`: kinds of the
    input's columns, if its file says them. `answer`: the kind of answers that the schema allows; None: there is no
    schema."""

    id_name: str = "id"
    given: Mapping[str, Kind] = field(default_factory=dict)
    answer: Kind | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its value is `source` of a result's part `part`."""

    name: str
    kind: Kind
    part: str
    source: str


class FlatTable:
    """The columns of one file, made for its lines."""

    def __init__(self, known: FlatColumns, lines: Iterable[bytes]) -> None:
        ids: Kind | None = known.given.get(known.id_name)
        inputs: dict[str, Kind | None] = {name: kind for name, kind in known.given.items() if name != known.id_name}
        id_name = known.id_name
        found: set[str] = set()
        for line in lines:
            result = _Result(json.loads(line))
            if result.is_batch and ids is None:
                id_name = "custom_id"
            if known.id_name not in known.given:
                ids = either(ids, kind_of(result.id))
            for name, value in result.inputs.items():
                if name not in known.given and (name in inputs or len(inputs) < _MAX_INPUT_COLUMNS):
                    inputs[name] = either(inputs.get(name), kind_of(value))
            found.update(name for name in _IF_ANY.keys() - found if result.value("result", name) is not None)
        self.columns: list[Column] = []
        self._taken: set[str] = set()
        self.renamed: list[str] = []  # names with a suffix
        if ids is not None:
            self._add("id", {id_name: ids})
        self._add("input", {name: kind or "text" for name, kind in inputs.items()})
        if isinstance(known.answer, dict) and "object" in known.answer:
            self._add("answer", known.answer["object"])
        elif known.answer is not None:
            self._add("whole", {_WHOLE: known.answer})
        self._add("result", {**_ALWAYS, **{name: kind for name, kind in _IF_ANY.items() if name in found}})
        self._add("line", {LINE: "text"})

    def _add(self, part: str, kinds: Mapping[str, Kind]) -> None:
        for source, kind in kinds.items():
            written = valid_text(source)
            name = free_name(written, self._taken)
            if name != written:
                self.renamed.append(name)
            self._taken.add(name)
            self.columns.append(Column(name, kind, part, source))

    def row(self, line: bytes) -> list[Any]:
        """The cells of a result line."""
        result = _Result(json.loads(line))
        cells = [cell(column.kind, result.value(column.part, column.source)) for column in self.columns[:-1]]
        return [*cells, line[:-1].decode()]


def free_name(name: str, taken: Container[str]) -> str:
    """Return the name of a column, with a suffix if it is taken."""
    free, number = name, 1
    while free in taken:
        free, number = f"{name}{_SUFFIX}{number if number > 1 else ''}", number + 1
    return free


class _Result:
    """A result line, native or OpenAI Batch."""

    def __init__(self, line: dict[str, Any]) -> None:
        self.is_batch = "index" not in line
        self.id = line["custom_id"] if self.is_batch else line["id"]
        self.inputs: dict[str, Any] = line.get("metadata") or {}
        self._result = line
        if self.is_batch:
            body = (line["response"] or {}).get("body", {})
            choices = body.get("choices", [])
            first = choices[0] if choices else {}
            message = first.get("message", {})
            self._result = {**body, **first, "text": first.get("text"), **message, "choices": choices[1:] and choices}
            if message:
                self._result["text"] = message["content"]
        if error := line.get("error"):
            words = f"{error['type'] if 'type' in error else error['code']}: {error['message']}"
            self._result = {**self._result, "text": None, "finish_reason": "error", "error": words}
        self._answer: Any = None
        self._is_parsed = False

    def value(self, part: str, name: str) -> Any:
        """The JSON value of a column; None if there is none."""
        if part == "id":
            return self.id
        if part == "input":
            return self.inputs.get(name)
        if part == "result":
            return self._result.get(name) or None if name == "choices" else self._result.get(name)
        if not self._is_parsed:
            text = None if self._result.get("incomplete") else self._result.get("text")
            self._answer, self._is_parsed = _parsed(text), True
            # A number that was cut is a number, too: it is not known whether it went on.
            if self._result["finish_reason"] == "length" and isinstance(self._answer, int | float):
                self._answer = None
        if part == "whole":
            return self._answer
        return self._answer.get(name) if isinstance(self._answer, dict) else None


def _parsed(text: str | None) -> Any:
    """The JSON value of a text; None if it is none, as a text that was cut."""
    try:
        return None if text is None else decode_value(text)
    except ValueError:
        return None


def write_delimited(file: BinaryIO, table: FlatTable, lines: Iterable[bytes], delimiter: str) -> None:
    """Write a CSV or TSV file: UTF-8 without a byte-order mark, `\\n` at the end of a row, and quotes where they are
    needed. Null is an empty cell. Texts are written as they are, also those that begin with `=`."""
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
    needs_quotes = re.compile(f'[{delimiter}"\r\n]')  # `csv.writer` writes a lone `\r` without quotes

    def written(value: Any) -> str:
        cell = _written(value)
        return _quoted(cell) if needs_quotes.search(cell) else cell

    first, *names = (column.name for column in table.columns)
    # The first bytes say what a file is: JSON lines and parquet files begin with these.
    begin = _quoted(first) if first.startswith(("{", "PAR1")) else written(first)
    text.write(delimiter.join([begin, *map(written, names)]) + "\n")
    for line in lines:
        text.write(delimiter.join(map(written, table.row(line))) + "\n")
    text.flush()
    text.detach()


def _quoted(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"'


def _written(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list | bool) else str(value)


def read_delimited(path: Path) -> Iterator[bytes]:
    """The result lines of a file that `write_delimited` wrote. Raises ValueError for other files, and for damage."""
    delimiter = _delimiter(path)
    with path.open(encoding="utf-8", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            width = len(next(reader))
            for cells in reader:
                if len(cells) != width:
                    raise ValueError(f"line {reader.line_num} of {path} is damaged")
                yield cells[-1].encode() + b"\n"
        except csv.Error as exc:
            raise ValueError(f"line {reader.line_num} of {path} is damaged: {exc}") from exc


def is_delimited(path: Path) -> bool:
    """Return whether the header of a text file says that `write_delimited` wrote it."""
    try:
        return bool(_delimiter(path))
    except ValueError:  # also a file that is not UTF-8
        return False


def _delimiter(path: Path) -> str:
    """Return the delimiter of the file. Raises ValueError if its last column has no result lines."""
    csv.field_size_limit(_MAX_CELL)
    for delimiter in DELIMITERS.values():
        with path.open(encoding="utf-8", newline="") as text:
            try:
                header = next(csv.reader(_head(text), delimiter=delimiter, strict=True), [])
            except csv.Error:
                continue
            if len(header) > len(_ALWAYS) and header[-1].startswith(LINE):
                return delimiter
    raise ValueError(f"{path} was not written by specbatch")


def _head(text: TextIO) -> Iterator[str]:
    """Yield the first lines of a text. One with a quote that is never closed is not read to its end."""
    left = _MAX_HEADER
    while left > 0 and (line := text.readline(left)):
        left -= len(line)
        yield line
