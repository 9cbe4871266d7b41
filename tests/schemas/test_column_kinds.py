"""Kinds of columns: what schemas and values say about their types."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbatch.schemas.column_kinds import answer_kind, cell, either, kind_of
from specbatch.schemas.short_schema import response_format_of


def answer(schema: Any) -> Any:
    return answer_kind(json.dumps({"type": "json_schema", "json_schema": {"schema": schema}}))


def of(schema: Any, **root: Any) -> Any:
    return columns({"type": "object", "properties": {"a": schema}, **root})["a"]


def columns(schema: Any) -> Any:
    return answer(schema)["object"]


def test_the_short_form() -> None:
    text = "label: one of yes, no; urgent: bool; n: int 1 to 5; share: number?; due: date; tags: list of text"
    assert answer_kind(response_format_of(text)) == {
        "object": {
            **{"label": "text", "urgent": "boolean", "n": "integer", "share": "number", "due": "text"},
            "tags": {"list": "text"},
        }
    }


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string", "format": "date"}, "text"),
        ({"type": ["integer", "null"]}, "integer"),
        ({"type": ["integer", "string"]}, "json"),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}, {"type": "null"}]}, "number"),
        ({"oneOf": [{"type": "string"}, {}]}, "json"),
        ({"enum": ["a", "b", None]}, "text"),
        ({"enum": [1, 2.5]}, "number"),
        ({"enum": [True, "maybe"]}, "json"),
        ({"const": 7}, "integer"),
        ({"const": None}, "json"),
        ({"type": "null"}, "json"),
        (True, "json"),
        ({}, "json"),
        ({"type": "object"}, "json"),
        ({"type": "object", "properties": {"x": {"const": 1}, "y": {}}}, {"object": {"x": "integer", "y": "json"}}),
        ({"properties": {"x": {"type": "integer"}}}, {"object": {"x": "integer"}}),
        ({"type": "array"}, "json"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "number"}}}, {"list": {"list": "number"}}),
        ({"type": "array", "prefixItems": [{"type": "number"}], "items": {"type": "string"}}, "json"),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "integer"),
        ({"allOf": [{"minimum": 3}, {"type": "number"}]}, "number"),
        ({"$ref": "#/$defs/d"}, "boolean"),
        ({"$ref": "#/$defs/missing"}, "json"),
        ({"$ref": "other.json"}, "json"),
        ({"$ref": "#/$defs/a~1b"}, "text"),
    ],
    ids=str,
)  # fmt: skip
def test_kinds_of_schemas(schema: Any, kind: Any) -> None:
    assert of(schema, **{"$defs": {"d": {"type": "boolean"}, "a/b": {"type": "string"}}}) == kind


def test_a_schema_that_refers_to_itself_ends() -> None:
    tree = {"type": "object", "properties": {"value": {"type": "integer"}, "left": {"$ref": "#"}}}
    assert columns(tree)["value"] == "integer"
    assert answer({"$ref": "#"}) is None


def test_the_whole_answer() -> None:
    assert answer({"enum": ["a", "b"]}) == "text"
    assert answer({"type": "array", "items": {"type": "integer"}}) == {"list": "integer"}
    assert answer({"type": "object"}) is None
    one = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    other = {"type": "object", "properties": {"a": {"type": "string"}, "c": {"type": "boolean"}}}
    assert columns({"anyOf": [one, other]}) == {"a": "json", "b": "text", "c": "boolean"}
    assert columns({"allOf": [one, {"properties": {"c": {"type": "boolean"}}}]}) == {
        **{"a": "integer", "b": "text", "c": "boolean"}
    }
    for text in (None, '{"type": "json_object"}', '{"type": "text"}'):
        assert answer_kind(text) is None


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("text", "a", "a"),
        ("text", 7, None),
        ("integer", 7, 7),
        ("integer", 7.0, 7),
        ("integer", 7.5, None),
        ("integer", True, None),
        ("integer", 1 << 63, None),
        ("integer", -(1 << 63), -(1 << 63)),
        ("number", 7, 7.0),
        ("number", 10**400, None),
        ("number", True, None),
        ("boolean", False, False),
        ("boolean", 0, None),
        ("json", "a", "a"),
        ("json", {"é": [1, None]}, '{"é": [1, null]}'),
        ("json", None, None),
        ({"list": "integer"}, [1, "x", None], [1, None, None]),
        ({"list": "integer"}, 1, None),
        ({"object": {"a": "integer", "b": "text"}}, {"a": 1, "c": 2}, {"a": 1, "b": None}),
        ("decimal(5, 2)", 7, "7"),
        ("date", "2024-01-02", "2024-01-02"),
    ],
)
def test_cells(kind: Any, value: Any, expected: Any) -> None:
    assert cell(kind, value) == expected
    assert type(cell(kind, value)) is type(expected)


def test_kinds_of_values_together() -> None:
    assert [kind_of(value) for value in (None, True, 1, 1.5, "a", [], {}, 1 << 70)] == [
        *(None, "boolean", "integer", "number", "text", "json", "json", "json")
    ]
    assert either(None, "text") == either("text", None) == "text"
    assert either("integer", "number") == either("number", "integer") == "number"
    assert either("boolean", "integer") == either("text", "integer") == "json"
    assert either({"list": "integer"}, {"list": "number"}) == {"list": "number"}
    assert either({"object": {"a": "integer"}}, {"object": {"a": "text", "b": "text"}}) == {
        "object": {"a": "json", "b": "text"}
    }


def test_a_schema_that_refers_to_itself_has_json_there() -> None:
    names = [f"x{i}" for i in range(40)]
    properties = {"n": {"type": "integer"}, **{name: {"$ref": "#/$defs/Node"} for name in names}}
    schema = {"$defs": {"Node": {"type": "object", "properties": properties}}, "$ref": "#/$defs/Node"}
    assert answer(schema) == {"object": {"n": "integer", **dict.fromkeys(names, "json")}}
