"""Parquet and Arrow files: every type of column, and nothing changed without a word."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.config import DataSection
from specbatch.errors import InputError
from specbatch.files.jsonl import BadRow, encode_line
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row
from specbatch.rows.sources import open_source
from specbatch.types import SamplingParams
from tests.job.test_generate import Run
from tests.rows.asked import asked

DAY = dt.date(2024, 1, 2)
TIME = pa.time64("ns")
BERLIN = pa.timestamp("ns", "Europe/Berlin")


def rows(folder: Path, table: pa.Table, name: str = "d.parquet") -> list[Any]:
    if name.endswith("parquet"):
        pq.write_table(table, folder / name)
    else:
        kind = pa.ipc.new_file if "file" in name else pa.ipc.new_stream
        with kind(folder / name, table.schema) as writer:
            writer.write_table(table)
    return [row.data for row in open_source(str(folder / name), DataSection()).rows()]


@pytest.mark.parametrize(
    ("column", "written"),
    [
        (pa.array([[("k", 1), ("l", None)]], pa.map_(pa.string(), pa.int8())), {"k": 1, "l": None}),
        (pa.array([[]], pa.map_(pa.string(), pa.int8())), {}),
        (pa.array([[(5, 1.5)]], pa.map_(pa.int32(), pa.float64())), {"5": 1.5}),
        (
            pa.array([[[(dt.date(2024, 1, 2), "x")]]], pa.list_(pa.map_(pa.date32(), pa.string()))),
            [{"2024-01-02": "x"}],
        ),
        (pa.array([Decimal("1.10")], pa.decimal128(5, 2)), "1.10"),
        (pa.array([Decimal("12345678901234567890")], pa.decimal128(38, 0)), 12345678901234567890),
        (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
        (pa.array([DAY]), "2024-01-02"),
        (pa.array([1714611845123456789], BERLIN), "2024-05-02T03:04:05.123456789+02:00"),
        (pa.array([dt.datetime(2024, 1, 2)], pa.timestamp("us")), "2024-01-02T00:00:00"),
        (pa.array([1_000_000_001], pa.time64("ns")), "00:00:01.000000001"),
        (pa.array([{"t": 1, "a": 2}], pa.struct([("t", TIME), ("a", pa.int8())])), {"t": "00:00:00.000000001", "a": 2}),
        (pa.array([[1, None]], pa.list_(TIME)), ["00:00:00.000000001", None]),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), TIME)), {"k": "00:00:00.000000001"}),
        (pa.array([1], pa.duration("s")), "0:00:01"),
        (pa.array([b"text"]), "text"),
        (pa.array([b"\xff\x00"]), "data:;base64,/wA="),
        (pa.array(["x"], pa.large_string()), "x"),
        (pa.array(["x"]).dictionary_encode(), "x"),
        (pa.array([{"a": 1, "b": None}]), {"a": 1, "b": None}),
        (pa.array([[1, None]]), [1, None]),
        (pa.array([None], pa.null()), None),
        (pa.array([float("nan")]), None),
        (pa.array([1.5], pa.float16()), 1.5),
    ],
)
@pytest.mark.parametrize("name", ["d.parquet", "file.arrow", "stream.arrow"])
def test_types(tmp_path: Path, column: pa.Array, written: Any, name: str) -> None:
    (row,) = rows(tmp_path, pa.table({"prompt": ["p"], "c": column}), name)
    parsed, prompt = asked(
        RowParser(SamplingParams(), DataSection()).parse(next(open_source(str(tmp_path / name), DataSection()).rows()))
    )
    assert isinstance(prompt, Row)
    assert json.loads(encode_line(row)) == {"prompt": "p", "c": written}
    assert parsed.metadata == {"c": row["c"]}


def test_a_job_over_a_map(tmp_path: Path) -> None:
    headers = pa.array([[("k", "v")]] * 2, pa.map_(pa.string(), pa.string()))
    bias = pa.array([[("5", 1.5)], None], pa.map_(pa.string(), pa.float64()))
    run = Run(tmp_path)
    run.input = tmp_path / "d.parquet"
    pq.write_table(pa.table({"prompt": ["a", "b"], "headers": headers, "logit_bias": bias}), run.input)
    assert run() == 0
    assert [row["metadata"] for row in run.results()] == [{"headers": {"k": "v"}}] * 2


def test_options_of_decimals(tmp_path: Path) -> None:
    """Data bases write integers so."""
    columns = {"temperature": pa.array([Decimal("0.50")]), "max_tokens": pa.array([Decimal(7)], pa.decimal128(38, 0))}
    pq.write_table(pa.table({"prompt": ["p"], **columns}), tmp_path / "d.parquet")
    (row,) = open_source(str(tmp_path / "d.parquet"), DataSection()).rows()
    _, prompt = asked(RowParser(SamplingParams(), DataSection()).parse(row))
    assert isinstance(prompt, Row)
    assert prompt.params == SamplingParams(7, 0.5)


def test_a_value_that_cannot_be_read_is_an_error_of_its_row(tmp_path: Path) -> None:
    twice = pa.array([[("a", 1)], [("a", 1), ("a", 2)], []], pa.map_(pa.string(), pa.int8()))
    late = pa.array([0, 0, 2**60], pa.timestamp("us"))
    found = rows(tmp_path, pa.table({"prompt": ["a", "b", "c"], "m": twice, "t": late}))
    assert found[0]["m"] == {"a": 1}
    assert [isinstance(row, BadRow) for row in found] == [False, True, True]
    assert "duplicate key was 'a'" in found[1].message


@pytest.mark.parametrize("name", ["d.parquet", "file.arrow", "stream.arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, name: str) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    with pytest.raises(InputError, match="has two columns 'prompt'"):
        rows(tmp_path, table, name)


def test_the_number_of_rows_is_known(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["p"] * 3000}), tmp_path / "d.parquet", row_group_size=700)
    source = open_source(str(tmp_path / "d.parquet"), DataSection())
    assert source.total == len(list(source.rows())) == 3000
