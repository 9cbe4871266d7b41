"""JSON Schemas of the configuration, of result lines and of stats.json, made of the types that the code uses."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

from specbatch.config import Config
from specbatch.files.line_types import BatchLine, NativeLine
from specbatch.files.stats_types import SCHEMA_VERSION, Stats
from specbatch.strict.option import option_doc, option_range
from specbatch.strict.reader import Option, options_of

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_SCALARS: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_BOUND = re.compile(r"(>=|<=|>|<) (2\^)?(-?[0-9.]+)")
_KEYWORDS = {">=": "minimum", "<=": "maximum", ">": "exclusiveMinimum", "<": "exclusiveMaximum"}


def schemas() -> dict[str, Any]:
    """Return what `specbatch config --schemas` prints: schemas for a YAML file, a line of results and stats.json."""
    return {
        "schema_version": SCHEMA_VERSION,
        "config": {"$schema": _DRAFT, "title": "specbatch configuration", **_section(Config)},
        "result": {
            "$schema": _DRAFT,
            "title": "a line of specbatch results",
            "anyOf": [of_type(NativeLine), of_type(BatchLine)],
        },
        "stats": {"$schema": _DRAFT, "title": "specbatch stats.json", **of_type(Stats)},
    }


def of_type(hint: Any) -> dict[str, Any]:
    """The schema of values with this annotation: scalars, lists, mappings, Literals, TypedDicts and unions of these."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint)
        return {
            "type": "object",
            **({"description": " ".join(hint.__doc__.split())} if hint.__doc__ else {}),
            "properties": {name: of_type(kind) for name, kind in hints.items()},
            "required": [name for name in hints if name in hint.__required_keys__],
            "additionalProperties": False,
        }
    if origin in (Union, types.UnionType):
        return {"anyOf": [of_type(kind) for kind in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": of_type(arguments[0])}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": of_type(arguments[1])}
    return {"type": _SCALARS[hint]} if hint in _SCALARS else {}


def _section(cls: Any) -> dict[str, Any]:
    """Return the schema of a dataclass of options. A file can leave out every option; null is an empty section."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    options = options_of(cls)
    required = [name for name, option in options.items() if option.is_required]
    return {
        "type": ["object", "null"],
        "description": " ".join((cls.__doc__ or "").split()),
        "properties": {name: _option(option, fields[name]) for name, option in options.items()},
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _option(option: Option, field: dataclasses.Field[Any]) -> dict[str, Any]:
    doc = option_doc(field)
    if dataclasses.is_dataclass(option.kind) and not option.is_list:
        return _section(option.kind)
    about: dict[str, Any] = {"description": doc}
    if field.default is not dataclasses.MISSING:
        about["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
    if option.read is not None:  # its reader decides
        return about
    if dataclasses.is_dataclass(option.kind):
        one = _section(option.kind)
    elif option.kind is Mapping or typing.get_origin(option.kind) is Mapping:
        one = {"type": "object"}
    else:
        one = {**of_type(option.kind), **_bounds(option_range(field))}
        if "off" in one.get("enum", ()):
            one["enum"] = [*one["enum"], False]  # YAML reads off so
    kinds = [one]
    if option.is_list:
        kinds = [{"type": "array", "items": one}, *([one] if option.kind is str else [])]
    if option.nullable:
        kinds.append({"type": "null"})
    return {**about, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})}


def _bounds(words: str) -> dict[str, Any]:
    """Return the bounds in a text such as ">= 0 and < 2^63", as keywords of JSON Schema."""
    return {
        _KEYWORDS[sign]: 2 ** int(number) if power else float(number) for sign, power, number in _BOUND.findall(words)
    }
