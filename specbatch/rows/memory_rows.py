"""Rows of a program: prompts and dicts as JSON lines, tables as those of files. No package of tables is imported."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from specbatch.errors import InputError
from specbatch.files.input_file import RowData, suffix_of
from specbatch.files.jsonl import json_form
from specbatch.rows.sources import RawRow

_WANTED = "rows are prompts or dicts: one of them, a list or another iterable of them, or a table"
_KINDS = "JSON has dicts, lists, strings, finite numbers, True, False and None"
_FILES = "generate_file(path) runs the rows of a file"


def raw_rows(rows: Any) -> Iterator[RawRow]:
    """The rows of a prompt, a dict, an iterable of these, or a table of pandas, polars, Arrow or `datasets`. They
    are read as they are needed. Raises InputError at once for `rows` of another type, and later for such a row."""
    if isinstance(rows, str):
        if suffix_of(rows) is not None and os.path.isfile(rows):
            raise InputError(f"the prompt {rows[:60]!r} is the name of a file", _FILES)
        rows = [rows]
    elif isinstance(rows, Mapping):
        if any(hasattr(part, "features") for part in rows.values()):
            raise InputError(
                f"a {type(rows).__name__} is no row", f"name one of its splits: {', '.join(map(str, rows))}"
            )
        rows = [rows]
    elif isinstance(rows, bytes | bytearray | memoryview | os.PathLike) or hasattr(rows, "readline"):
        raise InputError(f"rows are of type {type(rows).__name__}; {_WANTED}", _FILES)
    elif hasattr(rows, "collect") and not hasattr(rows, "__arrow_c_stream__"):  # a plan of polars or Spark
        raise InputError(f"rows are of type {type(rows).__name__}; {_WANTED}", "collect() makes a table of it")
    elif (columns := _columns(rows)) is not None:
        return itertools.starmap(RawRow, enumerate(columns))
    try:
        iterator = iter(rows)
    except TypeError as exc:
        raise InputError(f"rows are of type {type(rows).__name__}; {_WANTED}") from exc
    return itertools.starmap(_line, enumerate(iterator))


def _columns(rows: Any) -> Iterator[RowData] | None:
    """The rows of a table; None if it is none."""
    if hasattr(rows, "itertuples") and hasattr(rows, "columns"):  # pandas
        return _of_pandas(rows)
    if hasattr(rows, "features") and hasattr(rows, "column_names"):  # datasets
        return map(_plain, rows)
    is_table = hasattr(rows, "columns") or hasattr(rows, "schema")  # a column is none
    if is_table and (hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__")):
        return _of_arrow(rows)
    return None


def _of_pandas(frame: Any) -> Iterator[dict[str, Any]]:
    # Not through Arrow, which refuses a column with two types, such as the contents of messages.
    names = [str(name) for name in frame.columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"the table has two columns {twice[:60]!r}", "give each column its own name")
    values = frame.itertuples(index=False, name=None)
    return (_plain(dict(zip(names, row, strict=True))) for row in values)


def _of_arrow(table: Any) -> Iterator[RowData]:
    import pyarrow as pa

    from specbatch.files.arrow_table import check_columns, rows_of_batches

    if not hasattr(table, "__arrow_c_stream__"):
        table = pa.Table.from_batches([pa.record_batch(table)])
    stream = pa.RecordBatchReader.from_stream(table)
    check_columns(stream.schema, "the table")
    return rows_of_batches(stream)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _column(value) for name, value in row.items()}


def _line(index: int, row: Any) -> RawRow:
    if hasattr(row, "as_py"):  # an Arrow scalar
        row = row.as_py()
    fields = {"prompt": str(row)} if isinstance(row, str) else row
    if not isinstance(fields, Mapping):
        raise InputError(f"row {index} is of type {type(row).__name__}; a row is a prompt or a dict")
    try:
        try:
            text = json.dumps(dict(fields), allow_nan=False)
        except (TypeError, ValueError):
            text = json.dumps(_json(fields), allow_nan=False)
        return RawRow(index, text.encode())
    except (TypeError, ValueError, RecursionError) as exc:
        raise InputError(f"row {index} is not JSON: {exc}", _KINDS) from exc


def _json(value: Any) -> Any:
    """`value` without what JSON lacks: numbers and times of numpy and pandas, and NaN, which is a value that is
    missing. Raises TypeError."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return {_key(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return _json(json_form(value))


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    raise TypeError(f"keys must be text, not {type(key).__name__}")


def _column(value: Any) -> Any:
    """A value of a table, as files have it: times stay times, for templates."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {str(key): _column(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_column(item) for item in value]
    if hasattr(value, "tolist") or type(value).__name__ in ("NaTType", "NAType"):
        return _column(json_form(value))
    return value
