"""The cells of CSV and TSV files, which are text, as the fields of a row."""

from __future__ import annotations

import re
from typing import Any

from specbatch.errors import RowError
from specbatch.files.csv_file import Cells
from specbatch.files.jsonl import decode_value
from specbatch.rows.chat_fields import CHAT_FIELDS
from specbatch.rows.choice_scoring import FIELD as CHOICES
from specbatch.rows.parameters import PROMPTS, SAMPLING_NAMES, UNSUPPORTED

_PARAMETERS = {*SAMPLING_NAMES, *CHAT_FIELDS, CHOICES, *PROMPTS, *UNSUPPORTED, "do_sample"}
_TEXTS = ("prompt", "regex", "grammar", "reasoning_effort")  # Their cells are always text.
_LISTS_OF_TEXTS = ("stop", "bad_words", "choice", CHOICES)  # A JSON cell is a list; any other cell is one text.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_BOOLEANS = {"true": True, "false": False}
_MAX_DIGITS = 4000  # Python converts no longer integers.
# Python would fill a text with zeros on its right: 42 as {n:05} would be 42000.
_ZERO_FILL = re.compile(r"[ +-]?#?0\d")


def fields_of(cells: Cells) -> dict[str, Any]:
    """The fields that have content, as a JSON line has them: numbers, true and false, lists and objects where a
    parameter can be one. Raises RowError."""
    return {
        name: _value(name, cell) if name in _PARAMETERS and name not in _TEXTS else cell
        for name, cell in cells.items()
        if cell and (cell.strip() or name not in _PARAMETERS or name in _TEXTS)
    }


def _value(name: str, cell: str) -> Any:
    """A cell that is nothing of this stays text, which the check of the field refuses."""
    text = cell.strip()
    if name in _LISTS_OF_TEXTS:
        return _texts(text) or cell
    if text.startswith(("[", "{")):
        try:
            return decode_value(text)
        except ValueError as exc:
            raise RowError("invalid_json", f"{name} is not valid JSON: {exc}") from exc
    if _is_number(text):
        return _number(text)
    return _BOOLEANS.get(text.lower(), cell)


def _is_number(text: str) -> bool:
    return len(text) < _MAX_DIGITS and _NUMBER.fullmatch(text) is not None


def _number(text: str) -> int | float:
    """A whole number is an integer, however it is written: pandas writes 2 as 2.0 if the column lacks a value."""
    if text.lstrip("+-").isdecimal():
        return int(text)
    number = float(text)
    return int(number) if number.is_integer() else number


def _texts(text: str) -> list[str] | None:
    if not text.startswith("["):
        return None
    try:
        value = decode_value(text)
    except ValueError:
        return None
    return value if isinstance(value, list) and all(isinstance(item, str) for item in value) else None


class TemplateCell(str):
    """A cell in a template. A format for numbers, such as {share:.2f}, takes a cell with a number."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        text = self.strip()
        if _ZERO_FILL.match(spec) and _is_number(text):
            return format(_number(text), spec)
        try:
            return super().__format__(spec)
        except ValueError:
            if not _is_number(text):
                return format(str(self), spec)  # the error is that of a text
            return format(_number(text), spec)

    def __getitem__(self, key: Any) -> str:
        if isinstance(key, slice):  # {{ body[:500] }}, {{ body|truncate(500) }}
            return super().__getitem__(key)
        raise TypeError("a cell of a CSV file is text, and has no items")
