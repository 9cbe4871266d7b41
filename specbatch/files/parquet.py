"""Results as a parquet table, and back.

A column for each field of a result line. Its type follows from `line_types`, not from the values, so all files have the
same types: text and numbers are plain columns, `usage`, `speculation` and `error` are structs, and what has no fixed
shape (`logprobs`, `choices`, `metadata`, `response`) is JSON text. An `id` that is not text is its JSON text, too.

A table with flat results has the columns of a `FlatTable` instead.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, Union

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.files.flat_table import FlatTable
from specbatch.files.jsonl import encode_line, valid_text
from specbatch.files.line_types import BatchLine, NativeLine, index_of
from specbatch.schemas.column_kinds import Kind

_REST = "other"  # JSON text of fields that have no column: none today
_MARK, _FLAT = {b"specbatch": b"results"}, {b"specbatch": b"flat"}
_SCALARS = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
_KINDS = {
    **{"text": pa.string(), "json": pa.string(), "integer": pa.int64(), "number": pa.float64()},
    **{"boolean": pa.bool_(), "date": pa.date32()},
}
_JSON_TEXT = {"id", "custom_id"}  # text as it is; other values as JSON


def write_parquet(
    file: BinaryIO, lines: Iterable[bytes], group_rows: int, group_bytes: int, table: FlatTable | None = None
) -> None:
    """Write result lines as a table. A row group is written after `group_rows` rows or `group_bytes` bytes. `table`:
    columns of flat results."""
    kind = schema() if table is None else _flat_schema(table)
    with pq.ParquetWriter(file, kind, compression="zstd", version="2.6", write_statistics=True) as writer:

        def write() -> None:
            if table is None:
                writer.write_table(pa.Table.from_pylist([_row(json.loads(line)) for line in group], kind))
                return
            cells = zip(*map(table.row, group), strict=True)
            columns = [array_of(values, column.kind) for values, column in zip(cells, table.columns, strict=True)]
            writer.write_table(pa.Table.from_arrays(columns, schema=kind))

        group: list[bytes] = []
        size = 0
        for line in lines:
            group.append(line)
            size += len(line)
            if len(group) >= group_rows or size >= group_bytes:
                write()
                group, size = [], 0
        if group:
            write()


def read_parquet(path: Path) -> Iterator[bytes]:
    """The result lines of a table that `write_parquet` wrote. Raises ValueError for other tables."""
    with pq.ParquetFile(path) as file:
        columns = file.schema_arrow
        mark = (columns.metadata or {}).get(b"specbatch")
        if mark == _MARK[b"specbatch"]:
            for batch in file.iter_batches(batch_size=256):
                yield from map(encode_line, map(_line, batch.to_pylist()))
        elif mark == _FLAT[b"specbatch"]:
            for batch in file.iter_batches(batch_size=256, columns=[columns.names[-1]]):
                yield from (line.encode() + b"\n" for line in batch.column(0).to_pylist())
        else:
            raise ValueError(f"{path} was not written by specbatch")


def _flat_schema(table: FlatTable) -> pa.Schema:
    return pa.schema([pa.field(column.name, _flat_type(column.kind)) for column in table.columns], metadata=_FLAT)


def _flat_type(kind: Kind) -> pa.DataType:
    if isinstance(kind, dict):
        if "list" in kind:
            return pa.list_(pa.field("element", _flat_type(kind["list"])))
        return pa.struct([pa.field(valid_text(name), _flat_type(one)) for name, one in kind["object"].items()])
    if kind in _KINDS:
        return _KINDS[kind]
    name, _, rest = kind.rstrip(")]").replace("(", "[").partition("[")
    first, _, second = rest.partition(", ")
    return pa.timestamp(first, second or None) if name == "timestamp" else pa.decimal128(int(first), int(second))


def array_of(cells: Iterable[Any], kind: Kind) -> pa.Array:
    """Make a column of what `cell` returns for this kind. Dates, times and decimals are given as texts."""
    column = _flat_type(kind)
    values = [_valid(value) for value in cells]
    if not (pa.types.is_temporal(column) or pa.types.is_decimal(column)):
        return pa.array(values, column)
    texts = pa.array(values, pa.string())
    try:
        return _cast(texts, column)
    except pa.ArrowInvalid:  # A finished job must not fail for a value; its text is in the line.
        return pa.concat_arrays([_cast_or_null(texts.slice(i, 1), column) for i in range(len(texts))])


def _cast(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    # Texts have microseconds also where the column has only milliseconds, and the cast to these refuses them.
    if pa.types.is_timestamp(kind) and kind.unit in ("s", "ms"):
        texts = texts.cast(pa.timestamp("us", kind.tz))
    return texts.cast(kind)


def _cast_or_null(text: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return _cast(text, kind)
    except pa.ArrowInvalid:
        return pa.nulls(1, kind)


def _valid(value: Any) -> Any:
    if isinstance(value, dict):
        return {valid_text(name): _valid(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_valid(item) for item in value]
    return valid_text(value) if isinstance(value, str) else value


@cache
def schema() -> pa.Schema:
    """The columns of every result table."""
    hints = {**typing.get_type_hints(NativeLine), **typing.get_type_hints(BatchLine)}
    hints["index"] = int  # a Batch line has it in its id
    columns = [pa.field(name, pa.string() if name in _JSON_TEXT else _type(hint)) for name, hint in hints.items()]
    return pa.schema([*columns, pa.field(_REST, pa.string())], metadata=_MARK)


def _type(hint: Any) -> pa.DataType:
    """Return the parquet type of a field with this annotation. JSON becomes text."""
    hint = _bare(hint)
    if typing.is_typeddict(hint):
        return pa.struct([pa.field(name, _type(kind)) for name, kind in typing.get_type_hints(hint).items()])
    if hint == list[int]:
        return pa.list_(pa.field("element", pa.int64()))  # the name that parquet gives it
    return _SCALARS.get(hint, pa.string())


def _bare(hint: Any) -> Any:
    """The annotation without `None`; a Literal is text."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (kind for kind in typing.get_args(hint) if kind is not type(None))
    return str if typing.get_origin(hint) is Literal else hint


@cache
def _is_json() -> frozenset[str]:
    """The columns with JSON text."""
    hints = {**typing.get_type_hints(NativeLine), **typing.get_type_hints(BatchLine)}
    texts = {name for name, hint in hints.items() if _type(hint) == pa.string() and _bare(hint) is not str}
    return frozenset(texts - _JSON_TEXT)


def _row(line: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {name: line.pop(name, None) for name in schema().names if name != _REST}
    row["index"] = index_of({"id": row["id"]} if row["index"] is None else row)
    for name in _is_json():
        row[name] = None if row[name] is None else _json_text(row[name])
    for name in _JSON_TEXT:
        if row[name] is not None:
            row[name] = valid_text(row[name]) if isinstance(row[name], str) else _json_text(row[name])
    for name in ("text", "reasoning_content"):
        if row[name] is not None:
            row[name] = valid_text(row[name])
    row[_REST] = _json_text(line) if line else None
    return row


def _line(row: dict[str, Any]) -> dict[str, Any]:
    rest = row.pop(_REST)
    is_batch = row["finish_reason"] is None
    kind: Any = BatchLine if is_batch else NativeLine
    line: dict[str, Any] = {}
    for name in typing.get_type_hints(kind):
        value = row[name]
        if value is None and name not in kind.__required_keys__:
            continue
        if isinstance(value, dict):  # a struct has all its fields
            value = {key: item for key, item in value.items() if item is not None or key == "acceptance_length"}
        line[name] = json.loads(value) if name in _is_json() and value is not None else value
    return {**line, **(json.loads(rest) if rest else {})}


def _json_text(value: Any) -> str:
    return encode_line(value).decode()[:-1]
