"""`response_format`, as OpenAI's chat completions have it. It is held as JSON text, in the order in which it was given:
the properties of an object are written in this order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specbatch.errors import FieldError, shown

_TYPES = ("text", "json_object", "json_schema")
_WANTED = (
    'must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
)
_LABELS = ("name", "description", "strict")  # OpenAI's; a schema is always followed


def read_response_format(reader: object, value: Any, path: str) -> str:
    """The option's value, a mapping or its JSON text, as JSON text. Raises FieldError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise FieldError("invalid_value", f"{path} {_WANTED}, not {shown(value)}") from None
    if not isinstance(value, Mapping):
        raise FieldError("invalid_type", f"{path} {_WANTED}, not {shown(value)}")
    if value.get("type") not in _TYPES:
        raise FieldError("invalid_value", f"{path} {_WANTED}; its type is {shown(value.get('type'))}")
    is_schema = value["type"] == "json_schema"
    _check_names(path, value, ("type", "json_schema") if is_schema else ("type",))
    if is_schema:
        holder = value.get("json_schema")
        if not isinstance(holder, Mapping) or not isinstance(holder.get("schema"), Mapping):
            raise FieldError("invalid_value", f"{path} {_WANTED}; json_schema.schema is missing or no object")
        _check_names(f"{path}.json_schema", holder, ("schema", *_LABELS))
    return _json(path, value)


def schema_of(response_format: str) -> str | None:
    """The JSON Schema that the text must match, as JSON; None: any text."""
    value = json.loads(response_format)
    if value["type"] == "text":
        return None
    return '{"type": "object"}' if value["type"] == "json_object" else json.dumps(value["json_schema"]["schema"])


def _check_names(path: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if unknown := [name for name in value if name not in known]:
        names = " and ".join(known)
        raise FieldError("invalid_value", f"{path} has {shown(unknown[0])}, but only {names} are known there")


def _json(path: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as exc:  # YAML has dates and NaN
        raise FieldError("invalid_value", f"{path} has a value that is no JSON: {exc}") from exc
