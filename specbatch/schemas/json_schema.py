"""Positions of subschemas in a JSON Schema. The rest of a schema is values: a `$ref` in a `const` is no reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ONE = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("items", "additionalItems", "unevaluatedItems", "contains"),
    *("not", "if", "then", "else", "contentSchema"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # items: a list up to draft 2019-09
_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")


def changed(schema: Mapping[str, Any], change: Callable[[str, int, Any], Any]) -> dict[str, Any]:
    """A copy of the schema, with `change(keyword, number, part)` in the place of each schema that is directly within
    it. `number` counts those of the keyword. A part can be `true`, `false`, or no schema where there must be one."""
    result = dict(schema)
    for keyword, value in schema.items():
        if keyword in _LISTS and isinstance(value, list):
            result[keyword] = [change(keyword, i, part) for i, part in enumerate(value)]
        elif keyword in _MAPS and isinstance(value, Mapping):
            parts = enumerate(value.items())
            result[keyword] = {name: change(keyword, i, part) for i, (name, part) in parts}
        elif keyword in _ONE:
            result[keyword] = change(keyword, 0, value)
    return result


def subschemas(schema: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each schema that is directly within this one, after the keyword that holds it. The schemas `true` and `false`
    are left out, and so is what is no schema where there must be one."""
    found: list[tuple[str, dict[str, Any]]] = []

    def see(keyword: str, _: int, part: Any) -> None:
        if isinstance(part, dict):
            found.append((keyword, part))

    changed(schema, see)
    return found


def all_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yields this schema and all within it, each before those that it has. A caller may change what it gets, before
    it takes the next one."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += [found for _, found in subschemas(one)]
