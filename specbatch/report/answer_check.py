"""Checks of answers against JSON Schemas, by `jsonschema`: a second implementation next to the one that made them."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import jsonschema
import referencing

from specbatch.errors import FieldError
from specbatch.schemas.response_format import schema_of

_MAX_KEPT = 20_000  # answers whose results are remembered: labels repeat
_MAX_KEPT_CHARS = 400
_MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class Checked:
    """`is_valid` None: the row has no schema, or `reason` says why it checks nothing."""

    is_valid: bool | None
    reason: str = ""


class _Formats(jsonschema.FormatChecker):
    """Checks of formats such as dates. `unknown`: those that need a package which is not installed."""

    def __init__(self) -> None:
        super().__init__(())
        self.checkers = jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers
        self.unknown: set[str] = set()

    def check(self, instance: object, format: str) -> None:
        if format not in self.checkers:
            self.unknown.add(format)
        super().check(instance, format)


class AnswerCheck:
    """Checks answers by the `response_format` of their rows, given as JSON text."""

    def __init__(self) -> None:
        self._formats = _Formats()
        self._validators: dict[str, jsonschema.Draft202012Validator | str] = {}  # or why there is none
        self._kept: OrderedDict[tuple[str, str], Checked] = OrderedDict()

    @property
    def unknown_formats(self) -> list[str]:
        """Return the formats, such as `date-time`, that this installation has no check for."""
        return sorted(self._formats.unknown)

    def asks_for_json(self, response_format: str | None) -> bool:
        return response_format is not None and self._validator(response_format) is not None

    def of(self, response_format: str | None, text: str, value: Any) -> Checked:
        """Check an answer. `value`: the JSON value of the text."""
        if response_format is None:
            return Checked(None)
        key = response_format, text
        if (found := self._kept.get(key)) is not None:
            return found
        found = self._check(self._validator(response_format), value)
        if len(text) <= _MAX_KEPT_CHARS:
            self._kept[key] = found
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return found

    def _check(self, validator: jsonschema.Draft202012Validator | str | None, value: Any) -> Checked:
        if not isinstance(validator, jsonschema.Draft202012Validator):
            return Checked(None, validator or "")
        try:
            errors = list(validator.iter_errors(value))
        except Exception as exc:  # a pattern of another dialect, a reference that is missing
            return Checked(None, f"the schema cannot be used: {exc}"[:_MAX_REASON])
        if not errors:
            return Checked(True)
        best = jsonschema.exceptions.best_match(errors)
        return Checked(False, f"{best.json_path}: {best.message}"[:_MAX_REASON])

    def _validator(self, response_format: str) -> jsonschema.Draft202012Validator | str | None:
        """Return the validator, or why there is none. None: any text is allowed."""
        if response_format not in self._validators:
            self._validators[response_format] = _made(response_format, self._formats)
        return self._validators[response_format]


def _made(response_format: str, formats: _Formats) -> Any:
    try:
        schema = schema_of(response_format)
    except (FieldError, ValueError, LookupError, TypeError) as exc:
        return f"the schema cannot be read: {exc}"[:_MAX_REASON]
    if schema is None:
        return None
    # An empty registry: a `$ref` to a URL is not fetched.
    return jsonschema.Draft202012Validator(
        json.loads(schema),
        registry=referencing.Registry(),
        format_checker=formats,
    )
