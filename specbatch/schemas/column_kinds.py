"""Kinds of the columns of a table with flat results: what a JSON Schema, or the values of a column, say about its type.

A kind is JSON:

    "text", "integer" (64 bits), "number", "boolean", "json"
    {"list": kind}, {"object": {name: kind, ...}}
    "date", "timestamp[us]", "timestamp[us, UTC]", "decimal(10, 2)": of tables only; the values are text

A column of the kind "json" has texts as they are, and the JSON of all other values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

Kind = str | dict[str, Any]

_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean"}
_ALTERNATIVES = ("anyOf", "oneOf")
_NUMBERS = ("integer", "number")
_MAX_DEPTH = 16
_MAX_INTEGER = 1 << 63


def answer_kind(response_format: str | None) -> Kind | None:
    """Return the kind of answers in this format, which is JSON text. None: no schema says more than that it is JSON."""
    value = None if response_format is None else json.loads(response_format)
    if value is None or value["type"] != "json_schema":
        return None
    kind = _Schema(value["json_schema"]["schema"]).kind()
    return None if kind == "json" else kind


class _Schema:
    """A JSON Schema with its references. Of a `$ref`, an `allOf` and the keywords next to them all hold."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._open: list[str] = []  # the references that lead to the schema that is read

    def kind(self) -> Kind | None:
        return self._kind(self._root, 0)

    def _kind(self, schema: Any, depth: int) -> Kind | None:
        """Return the kind of the values that a schema allows, next to null. None: only null. "json": any."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return "json"
        found = [self._own(schema, depth)]
        if isinstance(reference := schema.get("$ref"), str):
            if reference in self._open:  # Its values can be nested to any depth, and a column's type cannot.
                return "json"
            self._open.append(reference)
            found.append(self._kind(self._target(reference), depth + 1))
            self._open.pop()
        if isinstance(parts := schema.get("allOf"), list):
            found += [self._kind(part, depth + 1) for part in parts]
        for name in _ALTERNATIVES:
            if isinstance(parts := schema.get(name), list):
                found.append(_one_of([self._kind(part, depth + 1) for part in parts]))
        return None if None in found else _all_of([kind for kind in found if kind is not None])

    def _own(self, schema: Mapping[str, Any], depth: int) -> Kind | None:
        """Return the kind that the schema's own keywords say."""
        if isinstance(values := schema.get("enum"), list):
            return _one_of([kind_of(value) for value in values])
        if "const" in schema:
            return kind_of(schema["const"])
        types = schema.get("type", "object" if "properties" in schema else "any")
        return _one_of([self._of_type(schema, name, depth) for name in (types if isinstance(types, list) else [types])])

    def _of_type(self, schema: Mapping[str, Any], name: Any, depth: int) -> Kind | None:
        if name == "object":
            named = schema.get("properties")
            if not isinstance(named, Mapping) or not named:
                return "json"
            return {"object": {key: self._kind(part, depth + 1) or "json" for key, part in named.items()}}
        if name == "array":
            items = schema.get("items")
            if "prefixItems" in schema or not isinstance(items, Mapping):
                return "json"
            return {"list": self._kind(items, depth + 1) or "json"}
        return None if name == "null" else _TYPES.get(name, "json")

    def _target(self, reference: str) -> Any:
        """Return the schema that a reference to this document points to. None: it is missing, or has a name."""
        found = self._root if reference.startswith("#") else None
        for step in filter(None, unquote(reference[1:]).split("/")):
            step = step.replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, Mapping) else None
        return found


def kind_of(value: Any) -> Kind | None:
    """Return the kind of a JSON value; null has none. Objects and lists are "json"."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if -_MAX_INTEGER <= value < _MAX_INTEGER else "json"
    if isinstance(value, str | float):
        return "text" if isinstance(value, str) else "number"
    return None if value is None else "json"


def either(one: Kind | None, other: Kind | None) -> Kind | None:
    """Return the kind of a column with values of both kinds; None has no values."""
    if one is None or other is None or one == other:
        return other if one is None else one
    if one in _NUMBERS and other in _NUMBERS:
        return "number"
    if isinstance(one, dict) and isinstance(other, dict):
        if "list" in one and "list" in other:
            return {"list": either(one["list"], other["list"])}
        if "object" in one and "object" in other:
            return {"object": _joined(one["object"], other["object"], either)}
    return "json"


def _one_of(kinds: list[Kind | None]) -> Kind | None:
    found: Kind | None = None
    for kind in kinds:
        found = either(found, kind)
    return found


def _all_of(kinds: list[Kind]) -> Kind:
    """Return the kind of values for which all of these hold: "json" says nothing, and objects have all their keys."""
    found: Kind = "json"
    for kind in kinds:
        found = _both(found, kind)
    return found


def _both(one: Kind, other: Kind) -> Kind:
    if isinstance(one, dict) and isinstance(other, dict) and "object" in one and "object" in other:
        return {"object": _joined(one["object"], other["object"], _both)}
    if one in _NUMBERS and other in _NUMBERS:
        return "integer" if "integer" in (one, other) else "number"
    return other if one == "json" else one


def _joined(one: dict[str, Kind], other: dict[str, Kind], join: Callable[[Kind, Kind], Kind | None]) -> dict[str, Any]:
    return {**one, **{name: join(one[name], kind) if name in one else kind for name, kind in other.items()}}


def cell(kind: Kind, value: Any) -> Any:
    """Return a JSON value as a column of this kind has it. None: it is null, or not of this kind."""
    if value is None:
        return None
    if isinstance(kind, dict):
        if "list" in kind:
            return [cell(kind["list"], item) for item in value] if isinstance(value, list) else None
        named = kind["object"]
        return {name: cell(one, value.get(name)) for name, one in named.items()} if isinstance(value, dict) else None
    if kind == "json":
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if kind == "integer":
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return value if kind_of(value) == "integer" else None
    if kind == "number":
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        try:
            number = float(value)
        except OverflowError:
            return None
        return number if math.isfinite(number) else None
    if kind == "boolean":
        return value if isinstance(value, bool) else None
    if kind == "text":
        return value if isinstance(value, str) else None
    return value if isinstance(value, str) else str(value)  # dates, times and decimals are texts or integers
