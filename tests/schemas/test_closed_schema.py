"""Objects of a `response_format` are closed, unless the schema or `strict: false` says otherwise."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import BaseModel

from specbatch.errors import FieldError, RowError
from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import constraint_of
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.schemas.response_format import read_response_format
from specbatch.types import SamplingParams

TOKENIZER = byte_tokenizer(300, [299])
COMPILER = GrammarCompiler(TOKENIZER, 1)
S = {"type": "string", "maxLength": 2}
A: dict[str, Any] = {"type": "object", "properties": {"a": S}, "required": ["a"]}
B: dict[str, Any] = {"type": "object", "properties": {"b": S}, "required": ["b"]}
DEFS = {"A": A, "B": B}
NODE: dict[str, Any] = {"type": "object", "properties": {"v": S, "next": {"$ref": "#/$defs/M"}}, "required": ["v"]}
CAT = {"type": "object", "properties": {"k": {"const": "cat"}, "v": S}, "required": ["k"]}
DOG = {"type": "object", "properties": {"k": {"const": "dog"}, "v": {"type": "integer"}}, "required": ["k"]}
ANY_A_B = '{"a": "x", "b": "y"}'


class Kid(BaseModel):
    name: str
    tags: dict[str, int] = {}


class Family(BaseModel):
    kid: Kid
    kids: list[Kid] = []
    other: Kid | None = None
    free: dict[str, Any] = {}


def write(schema: dict[str, Any], value: str, **labels: Any) -> bool:
    holder = {"name": "x", "schema": schema, **labels}
    params = SamplingParams(response_format=json.dumps({"type": "json_schema", "json_schema": holder}))
    constraint = constraint_of(params)
    assert constraint is not None
    matcher = COMPILER.matcher(constraint)
    tokens = TOKENIZER.encode(value, add_special_tokens=False)
    return matcher.advance_by(tokens) == len(tokens) and matcher.is_complete()


def compile_format(text: str) -> None:
    constraint = constraint_of(SamplingParams(response_format=read_response_format(None, text, "x")))
    assert constraint is not None
    COMPILER.matcher(constraint)


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "plain": (A, ['{"a": "x"}'], ['{"a": "x", "b": 1}']),
    "pydantic": (
        Family.model_json_schema(),
        ['{"kid": {"name": "n", "tags": {"q": 1}}, "kids": [{"name": "m"}], "other": null, "free": {"z": []}}'],
        ['{"kid": {"name": "n", "z": 1}}', '{"kid": {"name": "n"}, "kids": [{"name": "m", "z": 1}]}'],
    ),
    "items": ({"type": "array", "items": A}, ['[{"a": "x"}]'], ['[{"a": "x", "b": 1}]']),
    "prefixItems": ({"type": "array", "prefixItems": [A]}, ['[{"a": "x"}]'], ['[{"a": "x", "b": 1}]']),
    "values": ({"type": "object", "additionalProperties": A}, ['{"q": {"a": "x"}}'], ['{"q": {"a": "x", "b": 1}}']),
    "free": ({"type": "object"}, ['{"q": 1}'], []),
    "free member": ({"type": "object", "properties": {"m": {"type": "object"}}}, ['{"m": {"q": 1}}'], ['{"q": 1}']),
    "no keys": ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
    "said": ({**A, "additionalProperties": {"type": "integer"}}, ['{"a": "x", "q": 1}'], ['{"a": "x", "q": []}']),
    "null": ({"type": ["object", "null"], "properties": {"a": S}}, ["null", '{"a": "x"}'], ['{"b": 1}']),
    "patterns": ({"type": "object", "patternProperties": {"^x": S}}, ['{"xa": "x"}'], ['{"y": "x"}']),
    "required": ({**A, "required": ["a", "q"]}, ['{"a": "x", "q": 1}'], ['{"a": "x", "q": 1, "z": 1}']),
    "minProperties": ({**A, "minProperties": 2}, ['{"a": "x", "q": 1}'], []),
    "allOf": ({"allOf": [A, B]}, [ANY_A_B], ['{"a": "x", "b": "y", "c": 1}', '{"a": "x", "b": 1}']),
    "allOf of references": (
        {"$defs": DEFS, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
        [ANY_A_B],
        ['{"a": "x", "b": "y", "c": 1}'],
    ),
    "allOf with patterns": (
        {"allOf": [A, {"patternProperties": {"^x": S}}]},
        ['{"a": "x", "xb": "y"}'],
        ['{"a": "x", "y": "x"}', '{"a": "x", "xb": 1}'],
    ),
    "allOf, one is open": ({"allOf": [A, {"additionalProperties": True}]}, ['{"a": "x", "q": 1}'], []),
    "anyOf": ({"anyOf": [A, B]}, ['{"a": "x"}', '{"b": "x"}'], [ANY_A_B]),
    "anyOf and keys": (
        {"type": "object", "properties": {"k": S}, "required": ["k"], "anyOf": [A, B]},
        ['{"k": "x", "a": "y"}', '{"k": "x", "b": "y"}'],
        ['{"k": "x", "a": "y", "c": 1}'],
    ),
    "anyOf of required": (
        {"type": "object", "properties": {"a": S, "b": S}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": "x"}', '{"b": "x"}'],
        ['{"a": "x", "c": 1}'],
    ),
    "oneOf": (
        {"oneOf": [CAT, DOG]},
        ['{"k": "dog", "v": 3}', '{"k": "cat", "v": "x"}'],
        ['{"k": "dog", "v": 3, "q": 1}'],
    ),
    "reference and keys": (
        {"$defs": DEFS, "$ref": "#/$defs/A", "properties": {"c": {"$ref": "#/$defs/A"}}},
        ['{"a": "x", "c": {"a": "y"}}'],
        ['{"a": "x", "d": 1}', '{"a": "x", "c": {"a": "y", "c": 1}}'],
    ),
    "anchor": (
        {"$defs": {"A": {**A, "$anchor": "q"}}, "$ref": "#q", "properties": {"c": S}},
        ['{"a": "x", "c": "y"}'],
        ['{"a": "x", "d": "y"}'],
    ),
    "recursion": (
        {"$defs": {"N": NODE, "M": {"allOf": [{"$ref": "#/$defs/N"}, {"properties": {"w": S}}]}}, "$ref": "#/$defs/M"},
        ['{"v": "x", "next": {"v": "x", "w": "y"}, "w": "z"}'],
        ['{"v": "x", "next": {"v": "x", "u": 1}}', '{"v": "x", "u": 1}'],
    ),
    "root": (
        {"type": "object", "properties": {"v": S, "kids": {"type": "array", "items": {"$ref": "#"}}}},
        ['{"v": "x", "kids": [{"v": "y"}]}'],
        ['{"v": "x", "kids": [{"u": "y"}]}'],
    ),
    "values are no schemas": (
        {"enum": [{"properties": {"x": 1}}], "default": {"properties": {}}, "examples": [{"properties": {}}]},
        ['{"properties": {"x": 1}}'],
        [],
    ),
    "a key of that name": (
        {"type": "object", "properties": {"properties": A, "const": {"const": {"properties": {}}}}},
        ['{"properties": {"a": "x"}, "const": {"properties": {}}}'],
        ['{"properties": {"a": "x", "b": 1}}'],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_objects_are_closed(name: str) -> None:
    schema, good, bad = CASES[name]
    given = json.dumps(schema)
    assert [text for text in good if not write(schema, text)] == []
    assert [text for text in bad if write(schema, text)] == []
    assert json.dumps(schema) == given


def test_strict_false_leaves_objects_open() -> None:
    text = '{"a": "x", "b": 1}'
    assert write(A, text, strict=False)
    assert not write(A, text, strict=True)
    assert not write(A, text, strict=None)
    with pytest.raises(FieldError, match="strict must be true or false, not 'no'"):
        read_response_format(None, {"type": "json_schema", "json_schema": {"schema": A, "strict": "no"}}, "x")


@pytest.mark.parametrize("kind", ["same references", "alternatives", "many parts"])
def test_parts_that_refer_to_each_other_take_bounded_time(kind: str) -> None:
    n = 60
    definitions = {
        "same references": lambda i: {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2},
        "alternatives": lambda i: {
            "anyOf": [{"properties": {f"{key}{i}": S}, "$ref": f"#/$defs/{i + 1}"} for key in "xy"]
        },
        "many parts": lambda i: {"allOf": [{"properties": {f"{i}-{j}": S}} for j in range(1 if i else 400)]},
    }[kind]
    schema = {"$ref": "#/$defs/0", "$defs": {**{str(i): definitions(i) for i in range(n)}, str(n): A}}
    value = json.dumps({"type": "json_schema", "json_schema": {"schema": schema}})
    began = time.monotonic()
    refused = pytest.raises(FieldError, match="response_format: the schema has too many parts")
    with nullcontext() if kind == "same references" else refused:
        constraint_of(SamplingParams(response_format=value))
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("depth", [300, 600, 100_000])
def test_a_schema_that_is_nested_too_deeply_is_an_error(depth: int) -> None:
    schema = '{"properties": {"a": ' * depth + "{}" + "}}" * depth
    text = '{"type": "json_schema", "json_schema": {"schema": ' + schema + "}}"
    with pytest.raises((FieldError, RowError), match=r"nested too deeply|recursion limit"):
        compile_format(text)
