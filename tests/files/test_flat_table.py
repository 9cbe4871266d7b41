"""Tables with flat results: their columns, their cells, and the lines that are read back."""

from __future__ import annotations

import csv
import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbatch.files.arrow_table import arrow_rows, kinds_of_columns
from specbatch.files.flat_table import FlatColumns, FlatTable
from specbatch.files.jsonl import encode_line
from specbatch.files.paths import holds_results
from specbatch.files.result_files import open_results, write_lines
from specbatch.schemas.column_kinds import answer_kind
from specbatch.schemas.short_schema import response_format_of

SUFFIXES = (".parquet", ".csv", ".tsv")
ANSWER = answer_kind(response_format_of("label: one of bug, other; n: int; tags: list of text"))


def native(index: int, text: str | None, metadata: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    line = {"id": f"r{index}", "index": index, "text": text, "finish_reason": "stop", **fields}
    return line if metadata is None else {**line, "metadata": metadata}


def failed(index: int, **fields: Any) -> dict[str, Any]:
    return native(index, None, error={"type": "missing_prompt", "message": "no prompt"}, **fields)


def table_of(folder: Path, lines: list[Any], suffix: str = ".parquet", **known: Any) -> Any:
    """The written file as pyarrow or csv has it, after a check that its lines are read back."""
    path = folder / f"t{suffix}"
    path.unlink(missing_ok=True)
    encoded = [encode_line(line) for line in lines]
    table = FlatTable(FlatColumns(**known), encoded)
    facts = write_lines(path, encoded, suffix, table=table)
    assert facts["rows"] == len(lines)
    with open_results(path) as found:
        assert list(found) == encoded
    assert holds_results(path)
    if suffix == ".parquet":
        return pq.read_table(path).drop_columns(["specbatch"])
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file, delimiter="\t" if suffix == ".tsv" else ","))


def test_answers_have_the_types_of_the_schema_and_nothing_depends_on_the_first_rows(tmp_path: Path) -> None:
    lines = [
        failed(0, metadata={"body": "x"}),
        native(1, '{"label": "bug", "n": 3, "tags": ["a", "b"]}', {"body": "y"}),
        native(2, '{"label": "bug", "n": ', {"body": "z"}, incomplete=True) | {"finish_reason": "length"},
        native(3, '{"label": 7, "n": 99999999999999999999, "tags": []}', {"body": "w"}),
        native(4, "[1]", {"body": "v"}),
    ]
    table = table_of(tmp_path, lines, answer=ANSWER)
    assert table.column_names == [*("id", "body", "label", "n", "tags", "text", "finish_reason", "error", "incomplete")]
    assert table.schema.field("n").type == pa.int64()
    assert table.schema.field("tags").type == pa.list_(pa.field("element", pa.string()))
    assert table.column("label").to_pylist() == [None, "bug", None, None, None]
    assert table.column("n").to_pylist() == [None, 3, None, None, None]
    assert table.column("tags").to_pylist() == [None, ["a", "b"], None, [], None]
    assert table.column("finish_reason").to_pylist() == ["error", "stop", "length", "stop", "stop"]
    assert table.column("error").to_pylist() == ["missing_prompt: no prompt", None, None, None, None]
    assert table.column("incomplete").to_pylist() == [None, None, True, None, None]
    no_answers = table_of(tmp_path, lines[:1], answer=ANSWER)
    assert no_answers.schema.field("n").type == pa.int64()


def test_columns_of_json_lines_have_the_types_of_all_their_values(tmp_path: Path) -> None:
    given = [
        {"a": 1, "b": 1, "c": 1, "d": None, "e": [1], "f": True},
        {"b": 2.5, "c": "x", "e": {"k": "é"}, "g": 1 << 70},
        {"a": None, "c": None, "f": False, "g": 1},
    ]
    table = table_of(tmp_path, [native(i, "t", row) for i, row in enumerate(given)])
    assert {field.name: str(field.type) for field in table.schema} == {
        **{"id": "string", "a": "int64", "b": "double", "c": "string", "d": "string", "e": "string"},
        **{"f": "bool", "g": "string", "text": "string", "finish_reason": "string", "error": "string"},
    }
    assert table.column("c").to_pylist() == ["1", "x", None]
    assert table.column("e").to_pylist() == ["[1]", '{"k": "é"}', None]
    assert table.column("g").to_pylist() == [None, str(1 << 70), "1"]
    many = table_of(tmp_path, [native(i, "t", {f"k{i}": 1}) for i in range(1005)])
    assert len(many.column_names) == 1000 + 4, "others are in the lines"


def test_columns_of_a_parquet_file_keep_their_types(tmp_path: Path) -> None:
    zone = pa.timestamp("ns", "Europe/Berlin")
    given = pa.table({
        "key": pa.array([1, 2], pa.int32()),
        "day": pa.array([datetime.date(2024, 1, 2), None]),
        "at": pa.array([datetime.datetime(2024, 1, 2, 3, 4, 5, 6000), None], pa.timestamp("ms")),
        "here": pa.array([datetime.datetime(2024, 1, 2, 3, 4, 5, 6000), None], pa.timestamp("ms", "Europe/Berlin")),
        "early": pa.array([datetime.datetime(1, 1, 2, 3), None], pa.timestamp("ms")),
        "zoned": pa.array([1714611845123456789, None], zone),
        "price": pa.array([Decimal("1.10"), Decimal("2.00")], pa.decimal128(9, 2)),
        "whole": pa.array([Decimal("7"), None], pa.decimal128(9, 0)),
        "share": pa.array([1, float("nan")], pa.float32()),
        "kind": pa.array(["a", "b"]).dictionary_encode(),
        "tags": pa.array([["a", None], None]),
        "place": pa.array([{"x": 1, "d": datetime.date(2024, 1, 2)}, None]),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int8())),
        "bytes": pa.array([b"abc", None]),
        "big": pa.array([1 << 63, None], pa.uint64()),
        "time": pa.array([datetime.time(1), None]),
        "none": pa.nulls(2),
    })  # fmt: skip
    pq.write_table(given, tmp_path / "given.parquet")
    kinds = kinds_of_columns(tmp_path / "given.parquet")
    rows = [json.loads(encode_line(row)) for row in pq.read_table(tmp_path / "given.parquet").to_pylist()]
    rows[0]["map"] = {"k": 1}
    lines = [native(i, "t", {k: v for k, v in row.items() if k != "key"}) | {"id": i + 1} for i, row in enumerate(rows)]
    table = table_of(tmp_path, lines, given=kinds, id_name="key")
    same = ("day", "at", "here", "early", "zoned", "price", "whole")
    assert {name: table.schema.field(name).type for name in same} == {
        name: given.schema.field(name).type for name in same
    }
    for name in (*same, "key", "kind", "tags"):
        assert table.column(name).to_pylist() == given.column(name).to_pylist(), name
    assert table.column("share").to_pylist() == [1.0, None] or table.column("share").to_pylist()[0] == 1.0
    assert table.column("place").to_pylist() == [{"x": 1, "d": "2024-01-02"}, None]
    others = [table.column(name).to_pylist()[0] for name in ("map", "bytes", "big", "time", "none")]
    assert others == ['{"k": 1}', "abc", str(1 << 63), "01:00:00", None]
    # Types that parquet does not have are in Arrow files.
    arrow = pa.table({
        "view": pa.array([[1, 2]], pa.list_view(pa.int64())),
        "runs": pa.RunEndEncodedArray.from_arrays([1], pa.array([5])),
        "empty": pa.array([{}], pa.struct([])),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[1, 2]], pa.list_(pa.int32(), 2))
        ),
    })  # fmt: skip
    with pa.ipc.new_file(tmp_path / "given.arrow", arrow.schema) as file:
        file.write_table(arrow)
    [row] = [json.loads(encode_line(row)) for row in arrow_rows(tmp_path / "given.arrow", "given.arrow")]
    others = table_of(tmp_path, [native(0, "t", row)], given=kinds_of_columns(tmp_path / "given.arrow"))
    assert others.to_pylist()[0].items() >= {"view": "[1, 2]", "runs": "5", "empty": "{}", "tensor": "[1, 2]"}.items()
    # Types are those of the file, also if all rows failed.
    empty = table_of(tmp_path, [failed(0)], given=kinds, id_name="key")
    assert empty.schema.field("zoned").type == zone


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_cells_of_text_files_are_what_the_texts_are(tmp_path: Path, suffix: str) -> None:
    cells = [
        *('=HYPERLINK("x")', "+1", "-1", "@a", "'q", 'say "hi", you', "a\nb\r\nc\rd", "a\rb", "\r"),
        *(" x\t", "é 😀 \u2028", "", "NULL", "\0"),
    ]
    lines = [native(i, text, {"in": text}) for i, text in enumerate(cells)]
    header, *rows = table_of(tmp_path, lines, suffix)
    assert header == ["id", "in", "text", "finish_reason", "error", "specbatch"]
    assert [row[1] for row in rows] == [row[2] for row in rows] == cells
    values = [None, True, 7, 0.5, [1, "é"], {"a": None}]
    header, *rows = table_of(tmp_path, [native(i, "t", {"in": value}) for i, value in enumerate(values)], suffix)
    header, *flags = table_of(tmp_path, [native(i, "t", {"in": flag}) for i, flag in enumerate((True, False))], suffix)
    assert [row[1] for row in flags] == ["true", "false"]
    assert [row[1] for row in rows] == ["", "true", "7", "0.5", '[1, "é"]', '{"a": null}']
    assert not (tmp_path / f"t{suffix}").read_bytes().startswith(b"\xef\xbb\xbf")
    header, *rows = table_of(tmp_path, [native(0, "t\r", {"a\rb": "c"})], suffix)
    assert header[1] == "a\rb"
    assert rows[0][1:3] == ["c", "t\r"]
    for name in ("{{ x }}", '{"id": 1}', "PAR1"):  # as JSON lines and parquet files begin
        header, *rows = table_of(tmp_path, [native(0, "t", {name: "c"}) | {"id": None}], suffix)
        assert header[0] == name
    header, *rows = table_of(tmp_path, [native(0, "half \ud83d", {"half \ud83d": "\ud83d"})], suffix)
    assert header[1] == "half \\ud83d"
    assert rows[0][1:3] == ["\\ud83d", "half \\ud83d"]


def test_pandas_reads_types_of_a_csv_file(tmp_path: Path) -> None:
    answer = answer_kind(response_format_of("label: text; urgent: bool; n: int; share: number"))
    texts = [
        '{"label": "a", "urgent": true, "n": 1, "share": 2}',
        '{"label": "b", "urgent": false, "n": 2, "share": 1}',
    ]
    table_of(tmp_path, [native(i, text) for i, text in enumerate(texts)], ".csv", answer=answer)
    frame = pandas.read_csv(tmp_path / "t.csv")
    assert list(map(str, frame.dtypes[["urgent", "n", "share"]])) == ["bool", "int64", "float64"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_other_parts_of_results_are_columns_if_a_row_has_them(tmp_path: Path, suffix: str) -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    text = '{"label": "bug", "n": 1, "tags": []}'
    choices = [{"index": 0, "text": text}, {"index": 1, "text": '{"label": "other", "n": 2, "tags": []}'}]
    lines = [
        native(0, text, choices=choices),
        native(1, "", reasoning_content="hm", tool_calls=[call]),
        native(2, " honey", choice_scores=[{"text": " honey", "logprob": -1.5, "num_tokens": 1}]),
        native(3, "a", logprobs=[{"token": "a", "token_id": 1, "logprob": -0.25, "top": []}], prompt_logprobs=[None]),
    ]
    names = ["reasoning_content", "tool_calls", "choice_scores", "choices", "logprobs", "prompt_logprobs"]
    table = table_of(tmp_path, lines, suffix, answer=ANSWER)
    if suffix != ".parquet":
        table = pa.table({name: [row[i] or None for row in table[1:]] for i, name in enumerate(table[0])})
        table = table.drop_columns(["specbatch"])
    assert table.column_names == ["id", "label", "n", "tags", "text", "finish_reason", "error", *names]
    assert table.column("label").to_pylist() == ["bug", None, None, None], "of the first completion"
    assert json.loads(table.column("choices").to_pylist()[0]) == choices
    assert json.loads(table.column("tool_calls").to_pylist()[1]) == [call]
    assert table.column("reasoning_content").to_pylist()[1] == "hm"
    assert json.loads(table.column("choice_scores").to_pylist()[2])[0]["logprob"] == -1.5


def test_an_answer_that_is_no_object_is_one_column(tmp_path: Path) -> None:
    lines = [native(i, text) for i, text in enumerate(['["a", "b"]', "[]", '["a', "7"])]
    table = table_of(tmp_path, lines, answer={"list": "text"})
    assert table.column("answer").to_pylist() == [["a", "b"], [], None, None]
    half = table_of(tmp_path, [native(0, '["\\ud83d"]')], answer={"list": "text"})
    assert half.column("answer").to_pylist() == [["\\ud83d"]]
    assert table_of(tmp_path, [native(0, "a")], answer="text").column("answer").to_pylist() == [None]


def test_a_text_that_was_cut_is_no_answer_also_if_it_is_json(tmp_path: Path) -> None:
    lines = [native(0, "12", incomplete=True), native(1, "123"), native(2, "12", finish_reason="length")]
    assert table_of(tmp_path, lines, answer="integer").column("answer").to_pylist() == [None, 123, None]
    whole = native(0, '{"label": "bug", "n": 1, "tags": []}', finish_reason="length")
    assert table_of(tmp_path, [whole], answer=ANSWER).column("n").to_pylist() == [1], "an object shows its end"


def test_no_value_ends_a_finished_job(tmp_path: Path) -> None:
    given = {"day": "date", "price": "decimal(12, 10)", "at": "timestamp[ns, UTC]"}
    good = {"day": "2024-01-02", "price": "0E-10", "at": "2024-01-02T00:00:00+00:00"}
    bad = {"day": "soon", "price": "much", "at": "never"}
    lines = [native(0, "t", good), native(1, "t", bad), native(2, "t", dict.fromkeys(given))]
    table = table_of(tmp_path, lines, given=given)
    assert table.column("day").to_pylist() == [datetime.date(2024, 1, 2), None, None]
    assert table.column("price").to_pylist() == [Decimal(0), None, None]
    assert table.column("at").null_count == 2
    nested = {"object": {"a": {"object": {"\ud83d": "text"}}}}
    table = table_of(tmp_path, [native(0, '{"a": {"\\ud83d": "x"}}')], answer=nested)
    assert table.column("a").to_pylist() == [{"\\ud83d": "x"}]
    names = table_of(tmp_path, [native(0, "t", {"\ud83d": "\ud83d", "\\ud83d": [{"a": "\ud83d"}]})]).column_names
    assert names == ["id", "\\ud83d", "\\ud83d_answer", "text", "finish_reason", "error"]


def test_names_that_occur_twice_get_a_suffix(tmp_path: Path) -> None:
    given = {"label": "old", "text": "t", "error": 1, "specbatch": "x", "n": 5, "n_answer": 6}
    lines = [encode_line(native(0, '{"label": "bug", "n": 1, "tags": []}', given))]
    table = FlatTable(FlatColumns(answer=ANSWER), lines)
    assert [column.name for column in table.columns] == [
        *("id", *given, "label_answer", "n_answer2", "tags"),
        *("text_answer", "finish_reason", "error_answer", "specbatch_answer"),
    ]
    assert table.renamed == ["label_answer", "n_answer2", "text_answer", "error_answer", "specbatch_answer"]
    row = dict(zip([column.name for column in table.columns], table.row(lines[0]), strict=True))
    assert (row["label"], row["label_answer"], row["n_answer2"], row["text"]) == ("old", "bug", 1, "t")
    for suffix in SUFFIXES:  # it is read back in any case
        table_of(tmp_path, [native(0, "x", given)], suffix)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_openai_batch_lines(tmp_path: Path, suffix: str) -> None:
    def line(index: int, response: Any, error: Any = None) -> dict[str, Any]:
        body = {"status_code": 200, "request_id": "r", "body": response}
        return {
            "id": f"batch_req_{index:012d}",
            "custom_id": f"c{index}",
            "response": None if response is None else body,
            "error": error,
        }

    message = {"role": "assistant", "content": '{"label": "bug", "n": 4, "tags": []}', "refusal": None}
    lines = [
        line(0, {"choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]}),
        line(1, {"choices": [{"index": i, "text": f"t{i}", "finish_reason": "stop"} for i in range(2)]}),
        line(2, None, {"code": "empty_prompt", "message": "no"}),
    ]
    table = table_of(tmp_path, lines, suffix, answer=ANSWER)
    if suffix != ".parquet":
        table = pa.table({name: [row[i] or None for row in table[1:]] for i, name in enumerate(table[0])})
        table = table.drop_columns(["specbatch"])
    assert table.column_names == [*("custom_id", "label", "n", "tags", "text", "finish_reason", "error", "choices")]
    assert table.column("custom_id").to_pylist() == ["c0", "c1", "c2"]
    assert table.column("label").to_pylist() == ["bug", None, None]
    assert table.column("text").to_pylist() == [message["content"], "t0", None]
    assert table.column("finish_reason").to_pylist() == ["stop", "stop", "error"]
    assert table.column("error").to_pylist() == [None, None, "empty_prompt: no"]
    choices = table.column("choices").to_pylist()
    assert [choices[0], len(json.loads(choices[1])), choices[2]] == [None, 2, None]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_without_rows(tmp_path: Path, suffix: str) -> None:
    table = table_of(tmp_path, [], suffix, answer=ANSWER, given={"key": "integer", "body": "text"}, id_name="key")
    names = ["key", "body", "label", "n", "tags", "text", "finish_reason", "error"]
    assert (table.column_names if suffix == ".parquet" else table[0][:-1]) == names


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1,2\n",
        "",
        "text\n",
        '["a"]\n',
        "a,specbatch\n1,2\n",
        'a,b,c,specbatch\n1,2,3,{"k": 1}\n',
        '"',
        "\xff,\xfe\n",
    ],
)
def test_other_text_files_are_not_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode("latin-1"))
    assert holds_results(path) == (text == ""), "nothing is lost with an empty file"
    if text:
        with pytest.raises((ValueError, KeyError, TypeError)), open_results(path) as lines:
            _ = [json.loads(line)["index"] for line in lines]


def test_damage_of_a_text_file_is_an_error(tmp_path: Path) -> None:
    table_of(tmp_path, [native(i, "a\nb") for i in range(3)], ".csv")
    path = tmp_path / "t.csv"
    whole = path.read_bytes()
    for damaged in (whole[:-30], whole + b"1,2\n", whole[:80] + b'"' + whole[80:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged"), open_results(path) as lines:
            list(lines)
    path.write_bytes(whole[: whole.index(b"\n") + 9])  # torn in its first row, by a kill
    assert holds_results(path)
