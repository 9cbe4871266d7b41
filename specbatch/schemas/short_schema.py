"""A short form of JSON Schema for the command line: `label: one of billing, bug, other; urgent: bool`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from specbatch.errors import ConfigError, shown

_TYPES = {
    "text": "string",
    "str": "string",
    "string": "string",
    "bool": "boolean",
    "boolean": "boolean",
    "int": "integer",
    "integer": "integer",
    "number": "number",
    "float": "number",
}
_KINDS = "one of A, B, C; bool; int; int 1 to 5; number; text; date; list of KIND; a `?` after it allows null"
_FIELD = re.compile(r"\s*([^\W\d][\w-]*)\s*:\s*(.+?)\s*", re.DOTALL)
_RANGE = re.compile(r"(int|integer|number|float)\s+(-?[\d.]+)\s+to\s+(-?[\d.]+)")


def response_format_of(text: str) -> str:
    """Return the value of `sampling.response_format`, as JSON, for the option --schema: a file with a JSON Schema, or
    the short form. Raises ConfigError."""
    value = _of_file(Path(text.removeprefix("@"))) if _names_file(text) else schema_of_fields(text)
    if value.get("type") != "json_schema":  # what OpenAI's API takes is used as it is
        value = {"type": "json_schema", "json_schema": {"schema": value}}
    return json.dumps(value, ensure_ascii=False)


def schema_of_fields(text: str) -> dict[str, Any]:
    """Return the JSON Schema of the short form: an object that has all fields, and no others. Raises ConfigError."""
    properties: dict[str, Any] = {}
    for part in filter(str.strip, text.split(";")):
        matched = _FIELD.fullmatch(part)
        if matched is None:
            raise ConfigError(f"--schema: {shown(part.strip())} is no field", f"write name: KIND; KIND is {_KINDS}")
        name, kind = matched.groups()
        if name in properties:
            raise ConfigError(f"--schema: the field {name} is given twice")
        properties[name] = _kind(name, kind)
    if not properties:
        raise ConfigError("--schema names no field", f"write name: KIND; KIND is {_KINDS}")
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def _kind(name: str, kind: str) -> dict[str, Any]:
    if kind.endswith("?"):
        return {"anyOf": [_kind(name, kind[:-1].rstrip()), {"type": "null"}]}
    if kind in _TYPES:
        return {"type": _TYPES[kind]}
    if kind == "date":
        return {"type": "string", "format": "date"}
    if kind.startswith("list of "):
        return {"type": "array", "items": _kind(name, kind.removeprefix("list of ").strip())}
    if kind.startswith("one of "):
        values = [value.strip() for value in kind.removeprefix("one of ").split(",")]
        if len(values) < 2 or not all(values) or len(set(values)) < len(values):
            raise ConfigError(f"--schema: {name} must be one of two or more different texts", "label: one of yes, no")
        for value in values:
            if _is_field(value):
                raise ConfigError(f"--schema: {shown(value)} is a value of {name}", "write ; between fields, and not ,")
            if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
                raise ConfigError(f"--schema: {name} has the value {value} in quotes", "write it without quotes")
        return {"enum": values}
    if matched := _RANGE.fullmatch(kind):
        number = int if matched[1].startswith("int") else float
        try:
            low, high = number(matched[2]), number(matched[3])
        except ValueError as exc:
            raise ConfigError(f"--schema: {name} has the range {shown(kind)}, which is not one of numbers") from exc
        if low > high:
            raise ConfigError(f"--schema: {name} has no value from {matched[2]} to {matched[3]}")
        return {"type": _TYPES[matched[1]], "minimum": low, "maximum": high}
    raise ConfigError(f"--schema: {name} has the unknown kind {shown(kind)}", f"known: {_KINDS}")


def _is_field(text: str) -> bool:
    """Return whether a text is a field of the short form, too."""
    matched = _FIELD.fullmatch(text)
    if matched is None:
        return False
    try:
        _kind(*matched.groups())
    except ConfigError:
        return False
    return True


def _names_file(text: str) -> bool:
    return text.startswith("@") or text.endswith(".json")


def _of_file(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"--schema: cannot read {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"--schema: {path} is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"--schema: {path} is no JSON Schema: it must be an object, not {shown(value)}")
    return value
