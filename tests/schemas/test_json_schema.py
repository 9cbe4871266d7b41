"""Where a JSON Schema has schemas, and where it has values."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.schemas.json_schema import all_schemas, subschemas

MARK = {"minimum": 3}


@pytest.mark.parametrize(
    "schema",
    [
        {"additionalProperties": MARK},
        {"items": MARK},
        {"items": [True, MARK]},
        {"prefixItems": [MARK]},
        {"anyOf": [{"allOf": [MARK]}]},
        {"properties": {"const": MARK}},
        {"properties": {"enum": {"properties": {"default": MARK}}}},
        {"patternProperties": {"^a": MARK}},
        {"$defs": {"$ref": MARK}},
        {"definitions": {"a": MARK}},
        {"dependencies": {"a": MARK, "b": ["a"]}},
        {"if": {}, "then": MARK},
    ],
)
def test_schemas(schema: dict[str, Any]) -> None:
    assert MARK in list(all_schemas(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"const": MARK},
        {"enum": [MARK, {"properties": MARK}]},
        {"default": {"items": MARK}},
        {"examples": [MARK]},
        {"x-of-mine": {"properties": {"a": MARK}}},
        {"properties": {"a": {"const": {"properties": {"a": MARK}}}}},
        {"properties": [MARK]},
    ],
)
def test_values(schema: dict[str, Any]) -> None:
    assert MARK not in list(all_schemas(schema))


def test_a_caller_can_change_what_it_gets() -> None:
    schema: dict[str, Any] = {"properties": {"a": {"items": {}}}}
    for one in all_schemas(schema):
        one["title"] = "seen"
    assert schema == {"properties": {"a": {"items": {"title": "seen"}, "title": "seen"}}, "title": "seen"}
    assert [keyword for keyword, _ in subschemas(schema)] == ["properties"]


def test_deep_schemas() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5_000):
        schema = {"items": schema}
    assert len(list(all_schemas(schema))) == 5_001
