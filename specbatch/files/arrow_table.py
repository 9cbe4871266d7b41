"""Rows of Arrow tables, which parquet and .arrow files hold: each value as Python has it.

`jsonl.encode_line` says what is written of values that JSON lacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.errors import InputError
from specbatch.files.jsonl import BadRow
from specbatch.schemas.column_kinds import Kind

_MAX_DIGITS = 38  # a decimal128 has at most these
_BATCH = 1024  # rows that are in memory


def count_parquet_rows(path: Path, name: str) -> int:
    """Raises InputError for a file that is no parquet file."""
    try:
        with pq.ParquetFile(path) as file:
            check_columns(file.schema_arrow, name)
            return int(file.metadata.num_rows)
    except (pa.ArrowException, OSError) as exc:
        raise InputError(f"{name} cannot be read: {str(exc).splitlines()[0]}") from exc


def parquet_rows(path: Path) -> Iterator[dict[str, Any] | BadRow]:
    with pq.ParquetFile(path) as file:
        yield from rows_of_batches(file.iter_batches(batch_size=_BATCH))


def arrow_rows(path: Path, name: str) -> Iterator[dict[str, Any] | BadRow]:
    """The rows of an IPC file, or of an IPC stream under the name of a file, which `datasets` writes."""
    with pa.memory_map(str(path)) as file:
        try:
            opened = pa.ipc.open_file(file)
        except pa.ArrowInvalid:
            file.seek(0)
            stream = pa.ipc.open_stream(file)
            check_columns(stream.schema, name)
            yield from rows_of_batches(stream)
            return
        check_columns(opened.schema, name)
        yield from rows_of_batches(opened.get_batch(i) for i in range(opened.num_record_batches))


def kinds_of_columns(path: Path) -> dict[str, Kind]:
    """The kinds of the columns of a file that `count_parquet_rows` or `arrow_rows` can read. Raises pa.ArrowException
    and OSError."""
    if path.suffix == ".parquet":
        schema = pq.read_schema(path)
    else:
        with pa.memory_map(str(path)) as file:
            try:
                schema = pa.ipc.open_file(file).schema
            except pa.ArrowInvalid:
                file.seek(0)
                schema = pa.ipc.open_stream(file).schema
    return {field.name: _kind(field.type) for field in schema}


def _kind(kind: pa.DataType, is_part: bool = False) -> Kind:
    """Return the kind of a column's values as JSON has them. `is_part`: of a list or a struct."""
    types = pa.types
    if types.is_dictionary(kind):
        return _kind(kind.value_type, is_part)
    if types.is_integer(kind):
        return "json" if kind == pa.uint64() else "integer"
    if types.is_floating(kind):
        return "number"
    if types.is_boolean(kind):
        return "boolean"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return {"list": _kind(kind.value_type, True)}
    if types.is_struct(kind) and kind.num_fields:
        return {"object": {kind.field(i).name: _kind(kind.field(i).type, True) for i in range(kind.num_fields)}}
    if types.is_date(kind) and not is_part:
        return "date"
    if types.is_timestamp(kind) and not is_part:
        return f"timestamp[{kind.unit}, {kind.tz}]" if kind.tz else f"timestamp[{kind.unit}]"
    if types.is_decimal(kind) and not is_part and kind.precision <= _MAX_DIGITS and kind.scale >= 0:
        return f"decimal({kind.precision}, {kind.scale})"
    # Values of all other types are texts (times, bytes), or what only JSON has.
    return "text" if types.is_string(kind) or types.is_large_string(kind) else "json"


def check_columns(schema: pa.Schema, name: str) -> None:
    """Raises InputError for two columns of one name, of which a row could have only one."""
    twice = next((column for column in schema.names if schema.names.count(column) > 1), None)
    if twice is not None:
        raise InputError(f"{name} has two columns {twice[:60]!r}", "give each column its own name")


def rows_of_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[dict[str, Any] | BadRow]:
    """NaN in a column is a value that is missing, as in pandas. A map is an object."""
    for batch in batches:
        has_other_keys = any(_has_other_keys(kind) for kind in batch.schema.types)
        for start in range(0, batch.num_rows, _BATCH):
            for row in _rows(_with_long_times(batch.slice(start, _BATCH))):
                if isinstance(row, BadRow):
                    yield row
                    continue
                for column, value in row.items():
                    if isinstance(value, float) and math.isnan(value):
                        row[column] = None
                yield _with_text_keys(row) if has_other_keys else row


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | BadRow]:
    try:
        yield from batch.to_pylist(maps_as_pydicts="strict")
    except Exception as exc:  # Arrow has many kinds: a map with a key twice, a date after the year 9999
        if batch.num_rows > 1:
            for i in range(batch.num_rows):
                yield from _rows(batch.slice(i, 1))
        else:
            text = str(exc).strip(" '\"") or type(exc).__name__
            yield BadRow("invalid_value", f"the row has a value that cannot be read: {text.splitlines()[0]}")


def _with_long_times(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Times in nanoseconds, at any depth, become text: Python's times have microseconds."""
    for i, field in enumerate(batch.schema):
        if (kind := _without_long_times(field.type)) != field.type:
            batch = batch.set_column(i, field.name, batch.column(i).cast(kind))
    return batch


def _without_long_times(kind: pa.DataType) -> pa.DataType:
    if kind == pa.time64("ns"):
        return pa.string()
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return pa.struct([field.with_type(_without_long_times(field.type)) for field in fields])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = kind.value_field.with_type(_without_long_times(kind.value_type))
        return pa.list_(item) if pa.types.is_list(kind) else pa.large_list(item)
    if pa.types.is_map(kind):
        item = kind.item_field.with_type(_without_long_times(kind.item_type))
        return pa.map_(kind.key_field, item, kind.keys_sorted)
    return kind


def _has_other_keys(kind: pa.DataType) -> bool:
    """Return whether a value of this type can have a map whose keys are not text."""
    if pa.types.is_map(kind) and not (pa.types.is_string(kind.key_type) or pa.types.is_large_string(kind.key_type)):
        return True
    if pa.types.is_dictionary(kind):
        return _has_other_keys(kind.value_type)
    return any(_has_other_keys(kind.field(i).type) for i in range(kind.num_fields))


def _with_text_keys(value: Any) -> Any:
    """Convert the keys of maps to text, as JSON requires."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value
