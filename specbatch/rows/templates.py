"""The prompt template of a configuration."""

from __future__ import annotations

import contextlib
import os
import re
import string
from collections.abc import Mapping
from typing import Any

from specbatch.errors import ConfigError, RowError
from specbatch.text.bounds import Bounded

_HINT = "fields are written {name} or {name[key]}; literal braces are doubled: {{ }}"
_FIELD = re.compile(r"([^.\[\]]+)(\[[^\]]+\])*")  # no attributes: {x.__class__} would read the interpreter
_MAX_WIDTH = 10_000  # characters that a format can ask for


class PromptTemplate:
    """data.prompt_template: a prompt made of a row's fields, in the syntax of str.format.

    Raises ConfigError for what no row can fill: wrong syntax, fields without a name, unknown conversions and formats;
    and for a template without fields.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._has_nested = False
        self.fields = tuple(dict.fromkeys(self._checked(text)))  # names of the row's fields that the template uses
        if not self.fields:
            raise ConfigError(
                "data.prompt_template names no field, so all rows would have the same prompt", _hint(text)
            )

    def fill(self, row: Mapping[str, Any]) -> str:
        """The prompt of a row. Raises RowError."""
        for name in self.fields:
            if row.get(name) is None:
                raise RowError("missing_prompt", f"the row has no {name!r}, which data.prompt_template uses")
        try:
            # A format that the row gives ({x:{width}}) can ask for gigabytes.
            with Bounded() if self._has_nested else contextlib.nullcontext():
                return self._text.format_map(row)
        except Exception as exc:  # a lookup or format that this row's value does not support
            raise RowError("missing_prompt", f"data.prompt_template does not fit the row: {exc!r}") from exc

    def _checked(self, text: str) -> list[str]:
        try:
            parts = list(string.Formatter().parse(text))
        except ValueError as exc:
            raise ConfigError(f"data.prompt_template is not a valid template: {exc}", _HINT) from exc
        names: list[str] = []
        for _, field, spec, conversion in parts:
            if field is None:
                continue
            matched = _FIELD.fullmatch(field)
            if matched is None or matched[1].isdigit():
                raise ConfigError(f"data.prompt_template: {{{field}}} does not name a field of the row", _HINT)
            names.append(matched[1])
            if conversion not in (None, "r", "s", "a"):
                shown = f"{{{field}!{conversion}}}"
                raise ConfigError(f"data.prompt_template: {shown} has an unknown conversion; use !r, !s or !a")
            if spec and "{" in spec:
                self._has_nested = True
                names += self._checked(spec)
            elif spec:
                _check_spec(field, spec, text_only=conversion is not None)
        return names


def _hint(text: str) -> str:
    if "{{" in text:
        return f"it is not a Jinja template: {_HINT}"
    if len(text) < 256 and os.path.exists(text):
        return f"@{text} reads the file"
    return f"{_HINT}; @PATH reads a file"


def _check_spec(field: str, spec: str, *, text_only: bool) -> None:
    """Raises ConfigError if no value can have this format: text or a number, or a date if it has a `%`."""
    shown = f"data.prompt_template: {{{field}:{spec[:60]}}}"
    if any(int(number[:9]) > _MAX_WIDTH for number in re.findall(r"[1-9]\d*", spec)):
        raise ConfigError(f"{shown} asks for more than {_MAX_WIDTH:,} characters")
    samples: tuple[Any, ...] = ("",) if text_only else ("", 0, 0.0)
    if not any(_takes(value, spec) for value in samples) and (text_only or "%" not in spec):
        raise ConfigError(f"{shown} is not a format for text or a number", "such as {name:>10} or {share:.2f}")


def _takes(value: Any, spec: str) -> bool:
    try:
        format(value, spec)
    except ValueError:
        return False
    return True
