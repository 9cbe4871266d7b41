"""Lines and rows: what each kind of row becomes."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from specbatch.config import DataSection
from specbatch.errors import ConfigError, RowError
from specbatch.files.jsonl import decode_line, encode_line, numbered_lines
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row
from specbatch.rows.sources import RawRow
from specbatch.rows.templates import PromptTemplate
from specbatch.types import SamplingParams
from tests.rows.asked import asked

DEFAULTS = SamplingParams(max_tokens=9, temperature=0.5)


def parse(row: Any, data: DataSection | None = None) -> tuple[Row, Row | RowError]:
    raw = row if isinstance(row, bytes) else json.dumps(row).encode()
    return asked(RowParser(DEFAULTS, data or DataSection()).parse(RawRow(5, raw)))


def prompt_of(row: Any, data: DataSection | None = None) -> Row:
    _, prompt = parse(row, data)
    assert isinstance(prompt, Row), prompt
    return prompt


def test_blank_lines_are_skipped_but_counted() -> None:
    text = b'\xef\xbb\xbf{"a": 1}\r\n\n   \r\n{"b": "\x00"}\n{"c"'
    lines = numbered_lines(io.BytesIO(text).readline, "x")
    assert list(lines) == [
        (0, b'{"a": 1}'),
        (3, b'{"b": "\x00"}'),
        (4, b'{"c"'),
    ]


@pytest.mark.parametrize("value", ["é😀 \u2028 \x00", "\ud800", [1, 2.5, None, True], {"k": {"l": []}}, 10**30])
def test_lines_round_trip(value: Any) -> None:
    line = encode_line({"v": value})
    assert line.count(b"\n") == 1
    assert json.loads(line) == {"v": value}


def test_columns_of_unknown_types_are_the_same_text_in_each_process() -> None:
    class Image:
        pass

    kept = [Image(), Image()]
    lines = {encode_line({"image": image}) for image in kept}
    digests = {RawRow(0, {"image": image}).digest() for image in kept}
    assert len(lines) == len(digests) == 1
    assert b"Image object" in lines.pop()


def test_numbers_that_json_lacks_become_null() -> None:
    assert json.loads(encode_line({"v": [float("nan"), {"w": float("inf")}]})) == {"v": [None, {"w": None}]}


BAD_LINES: list[tuple[bytes, str]] = [
    (b"{", "invalid_json"),
    (b'{"prompt": "x"} trailing', "invalid_json"),
    (b'{"prompt": NaN}', "invalid_json"),
    (b'{"prompt": ' + b"9" * 5000 + b"}", "invalid_json"),
    (b"[" * 100_000, "invalid_json"),
    (b'{"prompt": "x", "deep": ' + b"[" * 990 + b"]" * 990 + b"}", "invalid_json"),  # readable, but not writable again
    (b'"text"', "invalid_json"),
    (b"[1]", "invalid_json"),
    (b'{"prompt": "\x00"}', "invalid_json"),
    (b'{"prompt": "\xff\xfe"}', "invalid_text"),
]


@pytest.mark.parametrize(("line", "type"), BAD_LINES)
def test_bad_lines(line: bytes, type: str) -> None:
    with pytest.raises(RowError) as caught:
        decode_line(line)
    assert caught.value.type == type


BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({}, "missing_prompt"),
    ({"prompt": None}, "missing_prompt"),
    ({"text": "x"}, "missing_prompt"),
    ({"prompt": 3}, "invalid_type"),
    ({"prompt": ["x"]}, "invalid_type"),
    ({"prompt": "x", "messages": []}, "invalid_type"),
    ({"prompt": "x", "id": {"a": 1}}, "invalid_type"),
    ({"prompt_token_ids": "x"}, "invalid_type"),
    ({"prompt_token_ids": [1, True]}, "invalid_type"),
    ({"prompt_token_ids": [1.0]}, "invalid_type"),
    ({"prompt_token_ids": [-1]}, "invalid_type"),
    ({"messages": "x"}, "invalid_type"),
    ({"messages": []}, "empty_prompt"),
    ({"messages": ["x"]}, "invalid_type"),
    ({"messages": [{"content": "x"}]}, "invalid_type"),
    ({"messages": [{"role": "user"}]}, "invalid_type"),
    ({"messages": [{"role": "user", "content": 3}]}, "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "unsupported_parameter"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "invalid_value"),
    ({"prompt": "x", "max_tokens": "5"}, "invalid_type"),
    ({"prompt": "x", "max_tokens": True}, "invalid_type"),
    ({"prompt": "x", "max_tokens": 0}, "invalid_value"),
    ({"prompt": "x", "max_tokens": 10**12}, "invalid_value"),
    ({"prompt": "x", "temperature": -1}, "invalid_value"),
    ({"prompt": "x", "temperature": "hot"}, "invalid_type"),
    ({"prompt": "x", "top_p": 0}, "invalid_value"),
    ({"prompt": "x", "top_k": 1.5}, "invalid_type"),
    ({"prompt": "x", "seed": "s"}, "invalid_type"),
    ({"prompt": "x", "seed": 2**64}, "invalid_value"),
    ({"prompt": "x", "stop": [1]}, "invalid_type"),
    ({"prompt": "x", "stop": ""}, "invalid_value"),
    ({"prompt": "x", "stop_token_ids": [True]}, "invalid_type"),
    ({"prompt": "x", "ignore_eos": 1}, "invalid_type"),
    ({"prompt": "x", "logprobs": 21}, "invalid_value"),
    ({"prompt": "x", "n": 0}, "invalid_value"),
    ({"prompt": "x", "presence_penalty": 2.5}, "invalid_value"),
    ({"prompt": "x", "frequency_penalty": -2.5}, "invalid_value"),
    ({"prompt": "x", "repetition_penalty": 0}, "invalid_value"),
    ({"prompt": "x", "repetition_penalty": True}, "invalid_type"),
    ({"prompt": "x", "logit_bias": [1]}, "invalid_type"),
    ({"prompt": "x", "logit_bias": {"a": 2}}, "invalid_value"),
    ({"prompt": "x", "logit_bias": {"-1": 2}}, "invalid_value"),
    ({"prompt": "x", "logit_bias": {"1": "2"}}, "invalid_type"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "invalid_value"),
    ({"prompt": "x", "allowed_token_ids": 3}, "invalid_type"),
    ({"prompt": "x", "allowed_token_ids": [-1]}, "invalid_value"),
    ({"prompt": "x", "bad_words": [3]}, "invalid_type"),
    ({"prompt": "x", "bad_words": [" "]}, "invalid_value"),
    ({"prompt": "x", "min_tokens": -1}, "invalid_value"),
    ({"prompt": "x", "min_tokens": 3, "min_new_tokens": 4}, "invalid_value"),
    ({"prompt": "x", "include_stop_str_in_output": "yes"}, "invalid_type"),
    ({"prompt": "x", "tools": [{}]}, "invalid_type"),
    ({"prompt": "x", "response_format": {"type": "json"}}, "invalid_value"),
    ({"prompt": "x", "response_format": {"type": "json_schema", "schema": {}}}, "invalid_value"),
    ({"prompt": "x", "response_format": 1}, "invalid_type"),
    ({"prompt": "x", "regex": ["a"]}, "invalid_type"),
    ({"prompt": "x", "choice": "a"}, "invalid_value"),
    ({"prompt": "x", "choice": ["a", "b"], "regex": "a"}, "invalid_value"),
    ({"prompt": "x", "guided_json": {}}, "unsupported_parameter"),
    ({"prompt": "x", "echo": True}, "unsupported_parameter"),
    ({"prompt": "x", "stream": True}, "unsupported_parameter"),
    ({"prompt": "x", "best_of": 3}, "unsupported_parameter"),
    ({"prompt": "x", "max_completion_tokens": "3"}, "invalid_type"),
    ({"prompt": "x", "max_tokens": 3, "max_new_tokens": 4}, "invalid_value"),
]


@pytest.mark.parametrize(("row", "type"), BAD_ROWS)
def test_bad_rows_are_errors_of_their_own(row: dict[str, Any], type: str) -> None:
    info, error = parse({**row, "note": 1})
    assert isinstance(error, RowError), error
    assert error.type == type
    assert info.index == 5
    assert info.metadata is not None
    assert info.metadata["note"] == 1


def test_deep_rows_within_the_bound_come_back() -> None:
    row = decode_line(b'{"deep": ' + b"[" * 99 + b"1e999" + b"]" * 99 + b', "flat": ' + b"[[]," * 0 + b'"[[[["}')
    assert encode_line(row).endswith(b"\n")


def test_the_first_of_several_unsupported_parameters_is_named() -> None:
    """Not the first of a set, whose order differs from process to process: error rows are part of the file's bytes."""
    _, error = parse({"suffix": "a", "prompt": "x", "echo": True, "best_of": 3, "tools": [1], "logit_bias": {"1": 2}})
    assert isinstance(error, RowError)
    assert error.message.startswith("best_of is not supported")


def test_infinite_and_nan_overrides_are_refused() -> None:
    _, error = parse(b'{"prompt": "x", "temperature": 1e999}')
    assert isinstance(error, RowError)
    assert error.type == "invalid_value"


def test_overrides() -> None:
    prompt = prompt_of(
        {"prompt": "x", "temperature": 0, "stop": "a", "stop_token_ids": [1], "n": 2, "seed": 3, "top_p": 1}
    )
    expected = SamplingParams(9, 0.0, stop=("a",), stop_token_ids=(1,), n=2, seed=3)
    assert prompt.params == expected
    assert prompt.own_seed
    neutral = {"presence_penalty": 0, "tools": [], "stream": False, "echo": None, "best_of": 1, "max_tokens": None}
    assert prompt_of({"prompt": "x", **neutral}).params == DEFAULTS


def test_kinds_of_prompt() -> None:
    assert prompt_of({"prompt": "x"}).content == "x"
    assert prompt_of({"prompt_token_ids": [1, 2]}).kind == "token_ids"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_of({"messages": [{"role": "user", "content": parts}]}).content == [{"role": "user", "content": parts}]


@pytest.mark.parametrize(
    ("row", "metadata"),
    [
        ({}, None),
        ({"a": 1, "b": [2]}, {"a": 1, "b": [2]}),
        ({"metadata": {"a": 1}}, {"a": 1}),
        ({"metadata": {"a": 1}, "b": 2}, {"a": 1, "b": 2}),
        ({"metadata": {"a": 1}, "a": 2}, {"metadata": {"a": 1}, "a": 2}),
        ({"metadata": 3, "a": 2}, {"metadata": 3, "a": 2}),
    ],
)
def test_unknown_fields_are_carried_through(row: dict[str, Any], metadata: Any) -> None:
    info, _ = parse({"prompt": "x", "id": 7, "max_tokens": 3, **row})
    assert info.metadata == metadata
    assert info.id == 7


def test_prompt_template() -> None:
    data = DataSection(prompt_template="Q: {question} {turns[0]}\nA:")
    row = {"question": "why", "turns": ["t"], "prompt": "ignored", "max_tokens": 2, "suffix": "data here"}
    info, prompt = parse(row, data)
    assert isinstance(prompt, Row)
    assert prompt.content == "Q: why t\nA:"
    assert prompt.params.max_tokens == 2
    assert info.metadata == {"question": "why", "turns": ["t"], "prompt": "ignored", "suffix": "data here"}
    assert prompt_of({"question": None, "turns": ["t"]}, data).content == "Q:  t\nA:"
    for bad in ({"turns": ["t"]}, {"question": None, "turns": None}, {"question": "why", "turns": []}):
        _, error = parse(bad, data)
        assert isinstance(error, RowError)
        assert error.type == "missing_prompt"


def test_prompt_column() -> None:
    data = DataSection(prompt_column="q")
    assert prompt_of({"q": "x"}, data).content == "x"
    assert prompt_of({"q": [{"role": "user", "content": "x"}]}, data).kind == "messages"
    for row, type in (({"prompt": "x"}, "missing_prompt"), ({"q": 3}, "invalid_type")):
        _, error = parse(row, data)
        assert isinstance(error, RowError)
        assert error.type == type


def test_id_column() -> None:
    data = DataSection(prompt_column="q", id_column="ticket")
    info, prompt = parse({"q": "x", "ticket": 7, "id": "data", "note": 1}, data)
    assert isinstance(prompt, Row)
    assert (info.id, info.metadata) == (7, {"id": "data", "note": 1})
    _, error = parse({"q": "x", "ticket": [7]}, data)
    assert isinstance(error, RowError)
    assert error.message.startswith("ticket must be text, a number")


def test_columns_of_a_table_are_data_under_a_template() -> None:
    parser = RowParser(DEFAULTS, DataSection(prompt_template="{city}"))
    info, prompt = asked(parser.parse(RawRow(0, {"city": "Oslo", "temperature": -4.0, "n": "many"})))
    assert isinstance(prompt, Row)
    assert prompt.params == DEFAULTS
    assert info.metadata == {"city": "Oslo", "temperature": -4.0, "n": "many"}
    _, prompt = asked(
        RowParser(DEFAULTS, DataSection()).parse(RawRow(0, {"prompt": "x", "max_tokens": 2, "stop": None}))
    )
    assert isinstance(prompt, Row)
    assert prompt.params.max_tokens == 2


def test_a_row_of_a_table_reads_as_a_json_line() -> None:
    """Structs have nulls, and columns of integers floats, where other rows have a value."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}, "b": None}}}}
    columns = {
        "messages": [{"role": "user", "content": "x", "extra": {"b": None}}],
        "tools": [tool],
        "response_format": {"type": "json_object", "json_schema": None},
        "logit_bias": {"1": None, "2": 3.0},
        "max_tokens": 2.0,
        "temperature": 1.0,
        "seed": None,
        "note": {"a": None, "b": 2.0},
    }
    info, prompt = asked(RowParser(DEFAULTS, DataSection()).parse(RawRow(0, columns)))
    assert isinstance(prompt, Row)
    assert prompt.content == [{"role": "user", "content": "x", "extra": {}}]
    assert prompt.chat.tools[0]["function"]["parameters"] == {"properties": {"a": {}}}
    params = prompt.params
    assert (params.max_tokens, params.temperature, params.logit_bias) == (2, 1.0, {2: 3.0})
    assert params.response_format == '{"type": "json_object"}'
    assert info.metadata == {"note": {"a": None, "b": 2.0}}
    for value in (float("inf"), 2.5):
        _, error = asked(RowParser(DEFAULTS, DataSection()).parse(RawRow(0, {"prompt": "x", "max_tokens": value})))
        assert isinstance(error, RowError)
        assert error.message.startswith("max_tokens must be an integer")


@pytest.mark.parametrize("template", ["{}", "{0}", "{a", "{a.b}", "}"])
def test_templates_that_cannot_work(template: str) -> None:
    with pytest.raises(ConfigError, match="prompt_template"):
        PromptTemplate(template)


def test_template_fields() -> None:
    assert PromptTemplate("{a} {{x}} {b[0]} {a!r}").fields == ("a", "b")
