"""The input of a finished job, if it is there and unchanged: what its rows asked."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbatch.errors import InputError, RowError, SpecbatchError
from specbatch.files.input_file import SUFFIXES, RowData, open_file
from specbatch.files.local import identify_input
from specbatch.report.rows import Results
from specbatch.results.fingerprint import INPUT_COLUMNS, INPUT_FACTS
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row
from specbatch.rows.sources import RawRow
from specbatch.types import GRAMMAR_FIELDS

_NAMES = tuple(f'"{name}"'.encode() for name in GRAMMAR_FIELDS)
_MAX_FORMATS = 1000  # formats that rows have of their own; a row with yet another one is not checked
_MAX_ROWS = 1 << 27  # rows whose formats are remembered: 256 MiB at most, 2 bytes for each row of a job


@dataclass
class Formats:
    """The `response_format` of each row, as JSON text. `job`: that of rows that give none."""

    job: str | None = None
    others: list[str | None] = field(default_factory=lambda: [None])
    numbers: array[int] = field(default_factory=lambda: array("H"))  # [index] = 0: the job's; n: others[n - 1]
    not_kept: int = 0  # rows whose formats are left out, because there are too many

    def of(self, index: int) -> str | None:
        number = self.numbers[index] if index < len(self.numbers) else 0
        return self.others[number - 1] if number else self.job


@dataclass(frozen=True)
class JobInput:
    """The file that a job read. `parser`: reads rows as the job did."""

    path: Path
    parser: RowParser

    @classmethod
    def find(cls, results: Results, named: Path | None) -> JobInput | None:
        """Return the input of the results. None: it was not found, or has changed. Raises InputError for an input that
        the user has `named`, if it is not that of the job."""
        if named is not None and not named.is_file():
            raise InputError(f"there is no input file {named}")
        for path in [named] if named is not None else _likely(results):
            if path.name.lower().endswith(SUFFIXES) and path.is_file() and _is_input(path, results.job):
                try:
                    return cls(path, RowParser.of_fingerprint(results.job))
                except (SpecbatchError, TypeError) as exc:
                    if named is None:
                        return None
                    raise InputError(f"{results.path} is of a job of another version: {exc}") from exc
        if named is not None:
            raise InputError(f"{named} is not the input of this job, or has changed")
        return None

    def formats(self, job: str | None) -> Formats:
        """Read the formats that rows give themselves. `job`: that of the others. Raises InputError if the file cannot
        be read."""
        found = Formats(job)
        numbers: dict[str | None, int] = {None: 1}
        for index, data in self._rows():
            if isinstance(data, dict):  # a table: all rows have the same columns
                if self.parser.makes_prompts or not data.keys() & set(GRAMMAR_FIELDS):
                    break
            elif not isinstance(data, bytes) or not any(name in data for name in _NAMES):
                continue
            wanted = self._parse(index, data).params.response_format
            if wanted == job or index >= _MAX_ROWS:
                continue
            if wanted not in numbers and len(found.others) > _MAX_FORMATS:
                found.not_kept += 1
                wanted = None
            elif wanted not in numbers:
                found.others.append(wanted)
                numbers[wanted] = len(found.others)
            found.numbers.extend([0] * (index + 1 - len(found.numbers)))
            found.numbers[index] = numbers[wanted]
        return found

    def prompts(self, indices: Collection[int]) -> dict[int, str]:
        """Return the prompts of rows, before the chat template. Raises InputError if the file cannot be read."""
        last = max(indices, default=-1)
        found: dict[int, str] = {}
        for index, data in self._rows():
            if index > last:
                break
            if index in indices:
                found[index] = _prompt(self._parse(index, data), data)
        return found

    def _rows(self) -> Iterator[tuple[int, RowData]]:
        return open_file(self.path, self.path.name, None).rows()

    def _parse(self, index: int, data: RowData) -> Row:
        return self.parser.parse(RawRow(index, data))


def _likely(results: Results) -> list[Path]:
    folder, name = results.path.parent, (results.stats or {}).get("input")
    stem = results.path.name.partition(".results.")[0]
    named = [folder / str(name), Path(str(name))] if name else []
    return [*named, *(folder / f"{stem}{suffix}" for suffix in SUFFIXES)]


def _is_input(path: Path, job: Mapping[str, Any]) -> bool:
    wanted = {
        name.removeprefix(INPUT_FACTS): fact
        for name, fact in job.items()
        if name.startswith(INPUT_FACTS) and name != INPUT_COLUMNS
    }
    if wanted.get("size") != path.stat().st_size:
        return False
    return {"kind": "file", **identify_input(path)[0]} == wanted


def _prompt(row: Row, data: RowData) -> str:
    """Return the prompt of a row. A row that has none is shown as it is in the file."""
    if row.kind == "messages" and isinstance(row.content, list):
        return "\n\n".join(f"{message.get('role')}: {_content(message)}" for message in row.content)
    if isinstance(row.content, str):
        return row.content
    if row.content is not None:
        return json.dumps(row.content)
    if isinstance(data, bytes):
        return data.decode("utf-8", "replace")
    try:
        return json.dumps(RawRow(row.index, data).fields(), ensure_ascii=False, default=str)
    except RowError as exc:
        return exc.message


def _content(message: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in message.items() if name != "role" and value is not None}
    content = rest.pop("content", "")
    shown = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return " ".join(filter(None, [shown, json.dumps(rest, ensure_ascii=False) if rest else ""]))
