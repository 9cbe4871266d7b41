"""Types of the columns that a JSON Schema gives."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from specbatch.api.columns import answer_columns, result_columns
from specbatch.api.results import Result

NESTED = {
    "$defs": {"p": {"type": "object", "properties": {"a": {"type": "integer"}}}, "loop": {"$ref": "#/$defs/loop"}},
    "type": "object",
}


def column(schema: dict[str, Any], *values: Any) -> pa.Array:
    whole = {**NESTED, "properties": {"x": schema}}
    results = [Result(text=json.dumps({"x": value}), finish_reason="stop") for value in values]
    results.append(Result(text='{"x": 1', finish_reason="length"))
    return answer_columns(results, whole, ())["x"]


@pytest.mark.parametrize(
    ("schema", "type_"),
    [
        ({"type": "string", "format": "date"}, pa.string()),
        ({"type": "integer"}, pa.int64()),
        ({"type": "number"}, pa.float64()),
        ({"type": ["boolean", "null"]}, pa.bool_()),
        ({"enum": ["a", "b", None]}, pa.string()),
        ({"const": 3}, pa.int64()),
        ({"enum": ["a", 1]}, pa.string()),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, pa.int64()),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, pa.string()),
        ({"type": "array", "items": {"type": "integer"}}, pa.list_(pa.int64())),
        ({"$ref": "#/$defs/p"}, pa.struct([("a", pa.int64())])),
        ({"$ref": "#/$defs/loop"}, pa.string()),
        ({"$ref": "#/$defs/absent"}, pa.string()),
        ({"type": "object"}, pa.string()),
        (True, pa.string()),
    ],
)
def test_types_depend_on_the_schema_alone(schema: Any, type_: pa.DataType) -> None:
    assert column(schema).type == type_
    assert column(schema).null_count == 1


def test_values_that_no_type_holds_are_json_text() -> None:
    assert column({"type": "integer"}, 1, 2**70).to_pylist() == ["1", str(2**70), None]
    assert column({"enum": ["a", 1]}, "a", 1).to_pylist() == ['"a"', "1", None]
    assert column({"type": "object"}, {"é": None}).to_pylist() == ['{"é": null}', None]


def test_an_answer_to_another_schema_has_nulls() -> None:
    results = [Result(text=text, finish_reason="stop") for text in ("[1]", "7", '{"y": 1}')]
    columns = answer_columns(results, {"type": "object", "properties": {"x": {"type": "integer"}}}, ())
    assert columns["x"].to_pylist() == [None] * 3


def test_an_answer_that_is_no_object_is_one_column() -> None:
    results = [Result(text="[1, 2]", finish_reason="stop"), Result(text=None, finish_reason="error", error={})]
    results[1]["error"] = {"type": "t", "message": "m"}
    columns = answer_columns(results, {"type": "array", "items": {"type": "integer"}}, ())
    assert columns["answer"].to_pylist() == [[1, 2], None]
    assert columns["error"].to_pylist() == [None, "t: m"]


def test_names_are_given_once() -> None:
    row = {"id": 1, "text": "t", "finish_reason": "stop"}
    results = [Result(row, metadata={"id": "a", "text": 1}), Result(row, metadata={"text": "b", "text_2": None})]
    columns = result_columns(results, None)
    assert list(columns) == ["id", "id_2", "text", "text_2", "text_3", "finish_reason", "error"]
    assert columns["text"].to_pylist() == ["1", '"b"']
