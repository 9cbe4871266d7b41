"""The answers of a job: how many are JSON and match their schemas, and the values of their fields. Memory does not grow
with the number of rows."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from specbatch.report.answer_check import AnswerCheck
from specbatch.report.job_input import Formats
from specbatch.report.rows import Row
from specbatch.report.sampling import Sample

MAX_VALUES = 1000  # different values of a field that are counted; later ones are counted together
_MAX_FIELDS = 60
MAX_CHARS = 80  # characters of a value, and of a name, that is counted by itself
_MAX_DEPTH = 4  # objects in objects whose fields are counted
_NUM_NUMBERS = 10_000  # sampled numbers of a field that has more than MAX_VALUES of them
_NUM_INVALID = 6
_MAX_NUMBER = 1e300  # larger ones have no place in a plot, and their sum can be infinite
_TOO_LARGE = "number beyond 1e300"

Value = tuple[str, str | bool | int | float | None]  # its type, and itself: in Python True is 1


def length_step(length: int) -> int:
    """Return the unit to which a length is rounded down: three digits are left, so that there are few lengths."""
    return int(10 ** max(len(str(length)) - 3, 0))


@dataclass(slots=True)
class FieldValues:
    """The values of a field in all answers. The counts of `values` are exact: a value that is in it was counted each
    time."""

    name: str
    kinds: Counter[str] = field(default_factory=Counter)  # the kinds of `_kind` -> times
    values: Counter[Value] = field(default_factory=Counter)
    not_counted: int = 0  # short values that came after MAX_VALUES others
    long_texts: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # characters of texts, rounded down to three digits
    num_numbers: int = 0
    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    numbers: Sample[float] = field(default_factory=lambda: Sample(_NUM_NUMBERS))

    @property
    def times(self) -> int:
        return self.kinds.total()

    @property
    def is_counted(self) -> bool:
        """Return whether `values` has all short values."""
        return not self.not_counted

    def add(self, value: Any) -> None:
        kind = _kind(value)
        self.kinds[kind] += 1
        if kind in ("list", "object", _TOO_LARGE):
            return
        if kind == "text":
            step = length_step(len(value))
            self.lengths[len(value) // step * step] += 1
            if len(value) > MAX_CHARS:
                self.long_texts += 1
                return
        if kind == "number":
            number = float(value)
            self.num_numbers += 1
            self.low, self.high, self.total = min(self.low, number), max(self.high, number), self.total + number
            self.numbers.add(number)
        key = kind, value
        if key in self.values or len(self.values) < MAX_VALUES:
            self.values[key] += 1
        else:
            self.not_counted += 1


@dataclass
class Answers:
    """Facts about all answers. `asked`: rows that ask for JSON; `json`: those of them whose answers are JSON.
    `other_json`: objects and lists among the answers of other rows. `invalid`: a sample of the rows that ask for JSON
    and have another answer, or one that does not match their schema, each with the reason."""

    formats: Formats = field(default_factory=Formats)
    rows: int = 0
    asked: int = 0
    json: int = 0
    other_json: int = 0
    cut: int = 0  # rows whose answers were cut
    cut_not_json: int = 0  # rows that ask for JSON and have none, because it was cut
    valid: int = 0
    not_valid: int = 0
    not_checked: Counter[str] = field(default_factory=Counter)  # reasons why a schema checks nothing -> rows
    fields: dict[str, FieldValues] = field(default_factory=dict)
    fields_left_out: int = 0  # values of fields that came after _MAX_FIELDS others
    texts: FieldValues = field(default_factory=lambda: FieldValues("text"))
    invalid: Sample[tuple[Row, str]] = field(default_factory=lambda: Sample(_NUM_INVALID))

    def __post_init__(self) -> None:
        self._check = AnswerCheck()

    @property
    def unknown_formats(self) -> list[str]:
        return self._check.unknown_formats

    def add(self, row: Row) -> None:
        """Count a row that did not fail."""
        self.rows += 1
        self.cut += row.finish_reason == "length"
        if row.tool_calls and not row.text:  # the calls are the answer
            return
        self.texts.add(row.text)
        wanted = self.formats.of(row.index)
        asks = self._check.asks_for_json(wanted)
        self.asked += asks
        if not asks and not row.text.lstrip().startswith(("{", "[")):
            return
        try:
            value = _DECODER.decode(row.text)
        except (ValueError, RecursionError) as exc:
            if asks:
                is_cut = row.finish_reason == "length"
                self.cut_not_json += is_cut
                self.invalid.add((row, "it was cut" if is_cut else f"it cannot be read as JSON: {exc}"))
            return
        for name, part in _parts(value):
            self._add_value(name, part)
        if not asks:
            self.other_json += 1
            return
        self.json += 1
        checked = self._check.of(wanted, row.text, value)
        self.valid += checked.is_valid is True
        if checked.is_valid is False:
            self.not_valid += 1
            self.invalid.add((row, checked.reason))
        elif checked.is_valid is None and checked.reason:
            self.not_checked[checked.reason] += 1

    def _add_value(self, name: str, value: Any) -> None:
        name = name[:MAX_CHARS]
        found = self.fields.get(name)
        if found is None:
            if len(self.fields) == _MAX_FIELDS:
                self.fields_left_out += 1
                return
            found = self.fields[name] = FieldValues(name)
        found.add(value)


def _refuse(constant: str) -> None:
    raise ValueError(f"it has {constant}")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number" if -_MAX_NUMBER < value < _MAX_NUMBER else _TOO_LARGE
    return "text" if isinstance(value, str) else "list" if isinstance(value, list) else "object"


def _parts(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the fields in a JSON value: `a`, `a.b` in an object, `a[]` in a list."""
    if name:
        yield name, value
    if depth < _MAX_DEPTH and isinstance(value, dict):
        for key, part in value.items():
            yield from _parts(part, f"{name}.{key}" if name else str(key) or '""', depth + 1)
    elif depth < _MAX_DEPTH and isinstance(value, list):
        for part in value:
            yield from _parts(part, f"{name}[]", depth + 1)
    elif not name:
        yield "(the answer)", value
