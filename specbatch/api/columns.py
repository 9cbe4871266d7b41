"""Results as typed columns of Arrow: the rows' own fields, the properties of the answers' schema, and the texts."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from specbatch.api.results import Result

_WHOLE_ANSWER = "answer"  # the column of an answer that is no object


def result_columns(results: Sequence[Result], schema: Mapping[str, Any] | None) -> dict[str, pa.Array]:
    """Return the columns of a table of results: id (if a row has one), the rows' own fields, and `answer_columns`."""
    columns: dict[str, pa.Array] = {}
    ids = [result.get("custom_id", result.get("id")) for result in results]
    if any(value is not None for value in ids):
        columns["id"] = _untyped(ids)
    fields = [result.get("metadata") or {} for result in results]
    for name in dict.fromkeys(name for one in fields for name in one):
        columns[_free(name, columns)] = _untyped([one.get(name) for one in fields])
    return columns | answer_columns(results, schema, columns)


def answer_columns(
    results: Sequence[Result], schema: Mapping[str, Any] | None, taken: Collection[str]
) -> dict[str, pa.Array]:
    """Return the columns of answers: the properties of the schema, text, finish_reason and error. Types depend on the
    schema alone. A row without a valid answer has nulls. A name in `taken` gets a number."""
    import pyarrow as pa

    columns: dict[str, pa.Array] = {}

    def add(name: str, values: list[Any], type_: pa.DataType | None) -> None:
        columns[_free(name, {*taken, *columns})] = _array(values, type_)

    if schema is not None:
        answers = [
            json.loads(result.text or "") if result.is_whole and result.parse_error is None else None
            for result in results
        ]
        whole = _resolved(schema, schema)
        properties = whole.get("properties")
        if isinstance(properties, Mapping) and properties:
            for name, one in properties.items():
                # A row with a schema of its own can have another answer.
                values = [answer.get(name) if isinstance(answer, dict) else None for answer in answers]
                add(name, values, _type(one, schema))
        else:
            add(_WHOLE_ANSWER, answers, _type(whole, schema))
    add("text", [result.text for result in results], pa.string())
    add("finish_reason", [result.finish_reason for result in results], pa.string())
    add("error", [result.error for result in results], pa.string())
    return columns


def _free(name: str, taken: Collection[str]) -> str:
    free, number = name, 2
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


def _array(values: list[Any], type_: pa.DataType | None) -> pa.Array:
    """`type_` None: each value is JSON text, as are values that the type cannot hold, such as huge integers."""
    import pyarrow as pa

    if type_ is not None:
        try:
            return pa.array(values, type_)
        except (pa.ArrowException, OverflowError):
            pass
    return pa.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values], pa.string())


def _untyped(values: list[Any]) -> pa.Array:
    """Values whose type is not known: that of all of them, or JSON text if they have several."""
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return _array(values, None)


def _type(schema: Any, root: Mapping[str, Any]) -> pa.DataType | None:
    """Return the Arrow type of the values of a schema; None if they have several types."""
    import pyarrow as pa

    schema = _resolved(schema, root)
    kind = schema.get("type")
    if isinstance(kind, list) and len(kind := [one for one in kind if one != "null"]) == 1:
        kind = kind[0]
    if kind is None and (values := schema.get("enum") or [schema.get("const")]):
        kinds = {_KINDS.get(type(value)) for value in values if value is not None}
        kind = kinds.pop() if len(kinds) == 1 else None
    if kind == "array":
        items = _type(schema.get("items"), root)
        return None if items is None else pa.list_(items)
    if kind == "object":
        types = {name: _type(one, root) for name, one in (schema.get("properties") or {}).items()}
        return pa.struct(list(types.items())) if types and None not in types.values() else None
    simple = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}
    return simple.get(kind) if isinstance(kind, str) else None


_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number"}


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `schema` without references to definitions, and without the alternative null."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            break
        others = [one for one in schema.get("anyOf") or schema.get("oneOf") or () if one != {"type": "null"}]
        if "$ref" in schema:
            found: Any = root
            for part in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
                found = found.get(part) if isinstance(found, Mapping) else None
            schema = found
        elif len(others) == 1:
            schema = others[0]
        else:
            return schema
    return {}


_MAX_REFERENCES = 20  # one after the other; then the schema has a circle
