"""Rows of a program: one row, many, and tables give the rows that a file with them would give."""

from __future__ import annotations

import datetime as dt
import io
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from specbatch.errors import InputError
from specbatch.files.jsonl import decode_line, encode_line
from specbatch.rows.memory_rows import raw_rows

COLUMNS = {"prompt": ["a", "b"], "id": [1, 2]}
EXPECTED = [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}]
TABLE = pa.table(COLUMNS)


def rows(given: Any) -> list[dict[str, Any]]:
    """As JSON has them."""
    found = list(raw_rows(given))
    assert [row.index for row in found] == list(range(len(found)))
    return [decode_line(encode_line(row.fields())) for row in found]


class ArrowTable:
    """A table of a package that is not known here, such as polars."""

    columns = ("prompt", "id")

    def __arrow_c_stream__(self, schema: object = None) -> object:
        return TABLE.__arrow_c_stream__(schema)


class Plan:
    """A query that has not run, such as a LazyFrame of polars; it looks like a table."""

    columns = ("prompt", "id")

    def collect(self) -> pa.Table:
        return TABLE

    def __getitem__(self, index: int) -> None:
        raise TypeError


def datasets_table() -> Any:
    import datasets

    return datasets.Dataset.from_dict(COLUMNS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: EXPECTED,
        lambda: iter(EXPECTED),
        lambda: pd.DataFrame(COLUMNS),
        lambda: pd.DataFrame(COLUMNS, index=[7, 7]),
        lambda: TABLE,
        lambda: TABLE.to_batches()[0],
        lambda: TABLE.to_reader(),
        ArrowTable,
        datasets_table,
        lambda: datasets_table().with_format("numpy"),
        lambda: datasets_table().to_iterable_dataset(),
    ],
)
def test_tables_give_their_rows(make: Any) -> None:
    assert rows(make()) == EXPECTED


def test_one_row_and_columns_of_prompts() -> None:
    assert rows("a text") == [{"prompt": "a text"}]
    assert rows(EXPECTED[0]) == EXPECTED[:1]
    for prompts in (["a", "b"], ("a", "b"), pd.Series(["a", "b"]), np.array(["a", "b"]), TABLE["prompt"], iter("ab")):
        assert rows(prompts) == [{"prompt": "a"}, {"prompt": "b"}]
    assert rows([]) == rows(pd.DataFrame({"prompt": []})) == []


VALUES = [
    (np.int64(3), 3),
    (np.float32(0.5), 0.5),
    (np.float64("nan"), None),
    (float("nan"), None),
    (np.bool_(True), True),
    (np.array([[1, 2]]), [[1, 2]]),
    (np.array([{"role": np.str_("user")}], dtype=object), [{"role": "user"}]),
    (np.datetime64("2024-01-02T03:04"), "2024-01-02T03:04"),
    (np.datetime64("NaT"), None),
    (pd.NaT, None),
    (pd.NA, None),
    (pd.Timestamp("2024-01-02T03:04:05.123456789+02:00"), "2024-01-02T03:04:05.123456789+02:00"),
    (dt.date(2024, 1, 2), "2024-01-02"),
    (Decimal("1.10"), "1.10"),
    (Decimal(10**20), 10**20),
    ({"a": [np.int8(1), float("nan")], 5: (1,)}, {"a": [1, None], "5": [1]}),
]


@pytest.mark.parametrize(("value", "expected"), VALUES)
def test_values(value: Any, expected: Any) -> None:
    assert rows([{"prompt": "a", "v": value}]) == [{"prompt": "a", "v": expected}]
    frame = pd.DataFrame({"prompt": ["a"], "v": pd.Series([value], dtype=object)})
    assert rows(frame) == [{"prompt": "a", "v": expected}]


def test_a_column_with_two_types_of_messages() -> None:
    """Arrow has no type for it."""
    contents: list[Any] = ["hi", [{"type": "text", "text": "hi"}]]
    messages = [np.array([{"role": "user", "content": content}], dtype=object) for content in contents]
    found = rows(pd.DataFrame({"messages": messages, "max_tokens": [5, None]}))
    assert [row["messages"][0]["content"] for row in found] == contents
    assert [row["max_tokens"] for row in found] == [5.0, None]


@pytest.mark.parametrize(
    ("given", "words", "hint"),
    [
        (None, "of type NoneType", ""),
        (7, "of type int", ""),
        (b"text", "of type bytes", "generate_file"),
        (Path("d.jsonl"), "of type PosixPath", "generate_file"),
        (io.StringIO("a\n"), "of type StringIO", "generate_file"),
        (Plan(), "of type Plan", "collect()"),
        (pd.DataFrame([["a", "b"]], columns=["x", "x"]), "two columns 'x'", ""),
        (pa.Table.from_arrays([pa.array(["a"])] * 2, names=["x", "x"]), "two columns 'x'", ""),
    ],
    ids=range(8),
)
def test_what_is_no_rows_is_refused_at_once(given: Any, words: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        raw_rows(given)
    assert words in caught.value.message
    assert hint in (caught.value.hint or "")


def test_names_of_files_are_no_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rows("d.jsonl") == [{"prompt": "d.jsonl"}]
    Path("d.jsonl").write_text("{}")
    with pytest.raises(InputError, match=r"'d\.jsonl' is the name of a file"):
        raw_rows("d.jsonl")


def test_a_group_of_splits_is_no_row() -> None:
    import datasets

    with pytest.raises(InputError, match="DatasetDict is no row") as caught:
        raw_rows(datasets.DatasetDict(train=datasets_table()))
    assert "train" in (caught.value.hint or "")


@pytest.mark.parametrize("row", [7, None, ["a"], b"a", {"prompt": "a", "v": float("inf")}, {"v": b"x"}, {"v": {1}}])
def test_a_row_that_is_none_is_refused_when_it_is_read(row: Any) -> None:
    def given() -> Iterator[Any]:
        yield "a"
        yield row

    found = raw_rows(given())
    assert next(found).index == 0
    with pytest.raises(InputError, match="row 1 is "):
        next(found)


def test_a_line_is_what_json_dumps_writes() -> None:
    row = {"prompt": "é\ud800", "n": 1, "l": [1.5, None, True]}
    assert next(raw_rows(row)).data == json.dumps(row).encode()
