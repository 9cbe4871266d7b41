"""The positions of subschemas in a JSON Schema. All else in a schema is values: a `$ref` in a `const` is no
reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ONE = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames"),
    *("items", "additionalItems", "unevaluatedItems", "contains"),
    *("not", "if", "then", "else", "contentSchema"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # items can be a list up to draft 2019-09
_MAPS = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")


def changed(schema: Mapping[str, Any], change: Callable[[str, int, Any], Any]) -> dict[str, Any]:
    """Return a copy of the schema, with `change(keyword, number, part)` in place of each schema that is directly in it.
    `number` counts the schemas of the keyword. A part can be `true`, `false`, or, in an invalid schema, any value."""
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
    """List each schema that is directly in this one, with the keyword that holds it. The schemas `true` and `false` are
    left out, and so are invalid values in place of a schema."""
    found: list[tuple[str, dict[str, Any]]] = []

    def see(keyword: str, _: int, part: Any) -> None:
        if isinstance(part, dict):
            found.append((keyword, part))

    changed(schema, see)
    return found


def all_schemas(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield this schema and all schemas in it, each before its own subschemas. A caller may change a schema before it
    takes the next one."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += [found for _, found in subschemas(one)]
