"""Positions of subschemas in a JSON Schema. The rest of a schema is values: a `$ref` in a `const` is no reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ONE = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("items", "additionalItems", "unevaluatedItems", "contains"),
    *("not", "if", "then", "else", "contentSchema"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # items: a list up to draft 2019-09
_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each schema that is directly within this one, after the keyword that holds it. The schemas `true` and
    `false` are left out, and so is what is no schema where there must be one."""
    for keyword, value in schema.items():
        found: list[Any] = []
        if keyword in _ONE:
            found.append(value)
        if keyword in _LISTS and isinstance(value, list):
            found += value
        if keyword in _MAPS and isinstance(value, dict):
            found += value.values()
        yield from ((keyword, one) for one in found if isinstance(one, dict))


def all_schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields this schema and all within it, each before those that it has. A caller may change what it gets, before
    it takes the next one."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += [found for _, found in subschemas(one)]
