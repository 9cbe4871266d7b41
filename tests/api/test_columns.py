"""Columns of results: their types, names and nulls."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from specbatch.api.columns import columns_of_answers, result_columns
from specbatch.api.results import Result


def response_format(schema: dict[str, Any]) -> str:
    return json.dumps({"type": "json_schema", "json_schema": {"schema": schema}})


def columns(schema: dict[str, Any], *texts: str) -> dict[str, pa.Array]:
    results = [Result(text=text, finish_reason="stop") for text in texts]
    results.append(Result(text='{"x": 1}', finish_reason="stop", incomplete=True))
    results.append(Result(text=None, finish_reason="error", error={"type": "t", "message": "m"}))
    return columns_of_answers(results, response_format(schema), ())


@pytest.mark.parametrize(
    ("schema", "type_"),
    [
        ({"type": "string"}, pa.string()),
        ({"type": ["integer", "null"]}, pa.int64()),
        ({"type": "number"}, pa.float64()),
        ({"enum": [True, None]}, pa.bool_()),
        ({"enum": ["a", 1]}, pa.string()),
        ({"type": "array", "items": {"type": "integer"}}, pa.list_(pa.int64())),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, pa.struct([("a", pa.int64())])),
    ],
)
def test_types_depend_on_the_schema_alone(schema: dict[str, Any], type_: pa.DataType) -> None:
    column = columns({"type": "object", "properties": {"x": schema}})["x"]
    assert (column.type, column.null_count, len(column)) == (type_, 2, 2)


def test_values_of_answers() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"enum": ["a", 1]}}}
    found = columns(schema, '{"x": 5, "y": "a"}', '{"y": 1}', "[1]", "7")
    assert found["x"].to_pylist() == [5, *[None] * 5]
    assert found["y"].to_pylist() == ["a", "1", *[None] * 4]
    assert found["error"].to_pylist() == [*[None] * 5, "t: m"]
    assert columns({"type": "array", "items": {"type": "integer"}}, "[1, 2]")["answer"].to_pylist()[0] == [1, 2]


def test_names_are_given_once() -> None:
    row = {"id": 1, "text": "t", "finish_reason": "stop"}
    fields: list[dict[str, Any]] = [{"id": "a", "text": 1}, {"text": "b", "text_answer": None}]
    found = result_columns([Result(row, metadata=metadata) for metadata in fields], None)
    assert list(found) == ["id", "id_answer", "text", "text_answer", "text_answer2", "finish_reason", "error"]
    assert found["text"].to_pylist() == ["1", "b"]
    assert found["text_answer2"].to_pylist() == ["t", "t"]


def test_half_of_a_surrogate_pair_is_written_as_in_files() -> None:
    schema = response_format({"type": "object", "properties": {"x": {"type": "string"}, "\ud83d": {}}})
    result = Result(text='{"x": "\\ud83d"}', finish_reason="stop", metadata={"\ud83d": "\ud83d"})
    broken = Result(text="\ud83d", finish_reason="length")
    found = result_columns([result, broken], schema)
    assert found["\\ud83d"].to_pylist() == ["\\ud83d", None]
    assert found["\\ud83d_answer"].to_pylist() == [None, None]
    assert found["x"].to_pylist() == ["\\ud83d", None]
    assert found["text"].to_pylist() == ['{"x": "\\ud83d"}', "\\ud83d"]
