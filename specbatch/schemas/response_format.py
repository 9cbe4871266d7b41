"""The option `response_format` of OpenAI's chat completions. It is kept as JSON text, in the order in which it was
given, because the model writes the properties of an object in this order."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specbatch.errors import FieldError, shown
from specbatch.schemas.closed_schema import closed

_TYPES = ("text", "json_object", "json_schema")
_WANTED = (
    'must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
)
_TOO_DEEP = "response_format: the schema is nested too deeply"
_LABELS = ("name", "description")  # keys that OpenAI's API has only as labels
_STRICT = "strict"  # true: objects are closed, see `closed_schema`; the default is true, as in xgrammar


def read_response_format(reader: object, value: Any, path: str) -> str:
    """Return the option's value, which is a mapping or its JSON text, as JSON text. It raises FieldError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except RecursionError:
            raise FieldError("invalid_value", _TOO_DEEP) from None
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
        _check_names(f"{path}.json_schema", holder, ("schema", *_LABELS, _STRICT))
        if not isinstance(strict := holder.get(_STRICT), bool | None):
            raise FieldError("invalid_type", f"{path}.json_schema.strict must be true or false, not {shown(strict)}")
    return _json(path, value)


def schema_of(response_format: str) -> str | None:
    """Return the JSON Schema, as JSON, that the text must match, or None if any text is allowed. It raises
    FieldError."""
    value = json.loads(response_format)
    if value["type"] == "text":
        return None
    if value["type"] == "json_object":
        return '{"type": "object"}'
    schema, is_strict = _schema(value["json_schema"])
    try:
        return json.dumps(closed(schema) if is_strict else schema)
    except FieldError as exc:
        raise FieldError(exc.type, f"response_format: {exc.message}") from exc
    except RecursionError:
        raise FieldError("invalid_value", _TOO_DEEP) from None


def closes_objects(response_format: str | None) -> bool:
    """Return whether the text must not have some keys that the given schema allows."""
    value = None if response_format is None else json.loads(response_format)
    if value is None or value["type"] != "json_schema":
        return False
    schema, is_strict = _schema(value["json_schema"])
    try:
        return is_strict and closed(schema) != schema
    except (FieldError, RecursionError):  # `schema_of` reports it
        return False


def _schema(holder: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    return holder["schema"], holder.get(_STRICT) is not False


def _check_names(path: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if unknown := [name for name in value if name not in known]:
        names = " and ".join(known)
        raise FieldError("invalid_value", f"{path} has {shown(unknown[0])}, but only {names} are known there")


def _json(path: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise FieldError("invalid_value", _TOO_DEEP) from None
    except (TypeError, ValueError) as exc:  # YAML has dates and NaN
        raise FieldError("invalid_value", f"{path} has a value that is no JSON: {exc}") from exc
