"""Parameters of other engines in rows, and the remarks on rows at the end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbatch.config import DataSection
from specbatch.config_load import load_config
from specbatch.errors import RowError
from specbatch.job.warnings import Remarks
from specbatch.results.finished import remark_on
from specbatch.rows.parameters import KNOWN_NAMES, SAMPLING_NAMES, UNSUPPORTED, meant_by
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row
from specbatch.rows.sources import RawRow
from specbatch.types import SamplingParams
from tests.rows.asked import asked

PARSER = RowParser(SamplingParams(max_tokens=9), DataSection())


def parse(row: dict[str, Any], index: int = 0, parser: RowParser = PARSER) -> tuple[Row, Row | RowError]:
    return asked(parser.parse(RawRow(index, json.dumps(row).encode())))


def refused(row: dict[str, Any]) -> str | None:
    _, prompt = parse({"prompt": "x", **row})
    if isinstance(prompt, RowError):
        assert prompt.type == "unsupported_parameter", prompt.message
        return prompt.message
    return None


CHANGING: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"thinking_budget": 100},
    {"thinking_token_budget": 0},
    {"reasoning": {"effort": "low"}},
    {"functions": [{}]},
    {"json_schema": "{}"},
    {"ebnf": "root ::= 'a'"},
    {"guided_choice": ["a", "b"]},
    {"structured_outputs": {"choice": ["a"]}},
    {"sampling_params": {"temperature": 1}},
    {"stop_sequences": ["a"]},
    {"stop_strings": "a"},
    {"stop_regex": "a+"},
    {"num_beams": 4},
    {"do_sample": True},
    {"temperature": 1, "do_sample": False},
    {"bad_words_ids": [[1]]},
    {"lora_path": "a"},
    {"lora": [{"id": 0, "scale": 1.0}]},
    {"adapter": "org/adapter"},
    {"image": "cat.png"},
    {"images": ["aGk="]},
    {"audio": {"data": "aGk="}},
    {"video_url": "https://a/b.mp4"},
    {"system": "Be brief."},
    {"skip_special_tokens": False},
    {"eos_token_id": 2},
    {"no_repeat_ngram_size": 3},
    {"top_p_decay": 0.5},
    {"top_logprobs": 2},
    {"verbosity": "low"},
    {"truncate_prompt_tokens": 10},
    {"vllm_xargs": {"a": 1}},
    {"custom_params": {"a": 1}},
]
NEUTRAL: list[dict[str, Any]] = [
    {"chat_template_kwargs": {}},
    {"stop_sequences": []},
    {"num_beams": 1},
    {"do_sample": False},
    {"temperature": 0.5, "do_sample": True},
    {"include_stop_str_in_output": False},
    {"skip_special_tokens": True},
    {"repetition_penalty": 1.0},
    {"thinking_token_budget": -1},
    {"tool_choice": "auto"},
    {"modalities": ["text"]},
    {"lora_path": None},
    {"images": []},
    {"image": ""},
    {"adapter": None},
    {"reasoning": "because"},  # no engine takes text there: it is data
]


@pytest.mark.parametrize("row", CHANGING, ids=lambda row: next(reversed(row)))
def test_parameters_that_would_change_the_output_are_errors(row: dict[str, Any]) -> None:
    message = refused(row)
    assert message is not None
    assert next(reversed(row)) in message


@pytest.mark.parametrize("row", NEUTRAL, ids=lambda row: next(reversed(row)))
def test_values_that_change_nothing_are_not(row: dict[str, Any]) -> None:
    assert refused(row) is None


def test_the_way_out_is_named() -> None:
    assert "use stop" in (refused({"stop_sequences": ["a"]}) or "")
    assert "data.system_prompt" in (refused({"system": "a"}) or "")
    for name in ("ebnf", "system", "input_ids"):  # columns of data sets
        assert "if it is only data, put it under `metadata`, or set data.prompt_column" in (refused({name: "a"}) or "")
    info, prompt = parse({"prompt": "x", "metadata": {"ebnf": "a"}})
    assert isinstance(prompt, Row)
    assert info.metadata == {"ebnf": "a"}


def test_no_supported_field_is_refused() -> None:
    assert not UNSUPPORTED.keys() & {*SAMPLING_NAMES, "prompt", "messages", "prompt_token_ids", "id", "metadata"}


def test_a_row_names_the_model_that_answers_or_none() -> None:
    parser = RowParser(SamplingParams(), DataSection(), "org/Model-1B")
    for name in ("org/Model-1B", "model-1b", "./Model-1B.gguf", None):
        info, prompt = parse({"prompt": "x", "model": name}, parser=parser)
        assert isinstance(prompt, Row), prompt
        assert not info.unread_fields
    for other in ("gpt-4", "", 3):
        _, error = parse({"prompt": "x", "model": other}, parser=parser)
        assert isinstance(error, RowError)
        assert error.type == "unsupported_parameter"
        assert "org/Model-1B answers; leave it out; if it is only data, put it under `metadata`" in error.message
    _, prompt = parse({"prompt": "x", "metadata": {"model": "gpt-4"}}, parser=parser)
    assert isinstance(prompt, Row)
    # With data.prompt_column it is data.
    parser = RowParser(SamplingParams(), DataSection(prompt_column="q"), "org/Model-1B")
    info, prompt = parse({"q": "x", "model": "gpt-4"}, parser=parser)
    assert isinstance(prompt, Row)
    assert info.metadata == {"model": "gpt-4"}


@pytest.mark.parametrize("name", ["audio", "image", "images", "videos"])
def test_media_next_to_a_message(name: str) -> None:
    message = {"role": "user", "content": "What is this?"}
    _, error = parse({"messages": [{**message, name: ["aGk="]}]})
    assert isinstance(error, RowError)
    assert error.message == f"messages[0].{name} is not supported"
    assert isinstance(parse({"messages": [{**message, name: None}]})[1], Row)
    assert isinstance(parse({"messages": [{**message, name: []}]})[1], Row)


def test_an_unknown_parameter_of_a_body_that_is_null_is_absent() -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for url, prompt in (("chat/completions", chat), ("completions", {"prompt": "x"})):
        line = {"custom_id": "c", "method": "POST", "url": f"/v1/{url}"}
        for name in ("moderation", "extra_body", "made_up", "lora", "temprature"):
            assert isinstance(parse({**line, "body": {**prompt, name: None}})[1], Row)
            assert isinstance(parse({**line, "body": {**prompt, name: "a"}})[1], RowError)


@pytest.mark.parametrize("off", [0, -1])
def test_top_k_is_off(off: int) -> None:
    """0 in transformers, and -1 in vLLM: the job is the same."""
    for given in (SamplingParams(top_k=off), load_config(None, [f"sampling.top_k={off}"]).sampling):
        assert given == SamplingParams()
    for row in (
        {"prompt": "x", "top_k": off},
        {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "top_k": off}},
    ):
        _, prompt = parse(row, parser=RowParser(SamplingParams(top_k=5), DataSection()))
        assert isinstance(prompt, Row)
        assert prompt.params.top_k == 0
    _, error = parse({"prompt": "x", "top_k": -2})
    assert isinstance(error, RowError)
    assert "top_k must be >= -1" in error.message


@pytest.mark.parametrize("name", ["max_new_tokens", "max_completion_tokens"])
def test_aliases(name: str) -> None:
    info, prompt = parse({"prompt": "x", name: 4})
    assert isinstance(prompt, Row)
    assert (prompt.params.max_tokens, info.metadata) == (4, None)
    _, prompt = parse({"prompt": "x", name: 4, "max_tokens": 4})
    assert isinstance(prompt, Row)
    _, error = parse({"prompt": "x", name: 4, "max_tokens": 5})
    assert isinstance(error, RowError)
    assert name in error.message


@pytest.mark.parametrize("data", [DataSection(prompt_template="{q}"), DataSection(prompt_column="q")])
def test_columns_that_make_prompts_are_data(data: DataSection) -> None:
    row = {"q": "x", "ebnf": "a", "system": "s", "do_sample": True, "tools": [1]}
    for raw in (row, json.dumps(row).encode()):
        info, prompt = asked(RowParser(SamplingParams(), data).parse(RawRow(0, raw)))
        assert isinstance(prompt, Row), prompt
        assert (info.metadata or {}).items() >= {"ebnf": "a", "system": "s", "do_sample": True, "tools": [1]}.items()


def test_bodies_name_the_parameter_that_was_meant() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "temprature": 1}
    _, error = parse({"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body})
    assert isinstance(error, RowError)
    assert "did you mean temperature?" in error.message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("topk", "top_k"),
        ("stop-sequences", "stop_sequences"),
        ("topic", None),
        ("question", None),
        ("prompt_id", None),
        ("index", None),
        ("label", None),
        ("source", None),
    ],
)
def test_misspelled_names(name: str, meant: str | None) -> None:
    assert meant_by(name) == meant


def remarks_of(rows: list[dict[str, Any]], data: DataSection | None = None) -> list[str]:
    parser = RowParser(SamplingParams(), data or DataSection())
    remarks = Remarks("org/Model-1B", columns=parser.makes_prompts)
    for index, row in enumerate(rows):
        remarks.add(index, remark_on(parse(row, index, parser)[0]))
    return remarks.lines()


def test_fields_that_nothing_read_are_named_with_their_rows() -> None:
    rows = [{"prompt": "x", "topic": "t", "max_tokens": 3, "metadata": {"own": 1}} for _ in range(3)]
    rows[1]["temprature"] = 1
    (line,) = remarks_of(rows)
    assert "temprature (1 row; did you mean temperature?), topic (3 rows)" in line
    assert "own" not in line
    assert remarks_of([{"prompt": "x", "id": 1, "metadata": {"topic": 1}}]) == []
    assert remarks_of([{"prompt": "x", "ebnf": "[0-9]"}, {"prompt": 3, "topic": 1}]) == []  # errors


def test_with_a_template_only_misspelled_names_are_reported() -> None:
    rows = [{"question": "x", "answer": "y", "temprature": 1, "suffix": "s", "tool": 1}]
    (line,) = remarks_of(rows, DataSection(prompt_template="{question}"))
    assert line.endswith(": temprature (1 row; did you mean temperature?)")
    assert remarks_of([{"question": "x", "answer": "y"}], DataSection(prompt_template="{question}")) == []


def test_names_are_bounded() -> None:
    rows = [{"prompt": "x", f"field {i}": 1, "y" * 10_000 + "\n": 1} for i in range(1000)]
    (line,) = remarks_of(rows)
    assert len(line) < 1000
    assert line.endswith("and others")
    assert "\n" not in line


def request(custom_id: str, model: Any = "Org/model-1b") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "x"}]}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_another_model_is_named_once() -> None:
    assert remarks_of([request("a"), request("b", "/models/Model-1B.gguf"), request("c", None)]) == []
    (line,) = remarks_of([request("a", "gpt-4"), request("b", "gpt-4"), request("c"), request("d", 7)])
    assert "org/Model-1B answered, but body.model names other models: gpt-4 (2 rows), 7 (1 row)" in line


def test_ids_that_are_given_twice_are_named_once() -> None:
    assert remarks_of([{"prompt": "x", "id": i} for i in range(9)] + [{"prompt": "x"}] * 3) == []
    ids = ["a", "b", "c", "b", "d", "a", "b"]
    (line,) = remarks_of([{"prompt": "x", "id": i} for i in ids])
    assert line == "2 ids are on more than one row, for example on those with index 0 and 5"
    (line,) = remarks_of([request("a"), {"prompt": ""}, request("b"), request("b")])
    assert line == "1 id is on more than one row, for example on those with index 2 and 3"


def test_every_known_name_is_its_own() -> None:
    assert all(meant_by(name) == name for name in KNOWN_NAMES)


def test_equal_sampling_fields_are_read_once() -> None:
    parser = RowParser(SamplingParams(), DataSection())

    def params(defaults: SamplingParams | None = None, **fields: Any) -> SamplingParams:
        row = parser.parse(RawRow(0, json.dumps({"prompt": "x", **fields}).encode(), defaults))
        assert row.error is None, row.error
        return row.params

    first = params(stop=["a"], max_tokens=7, id=1)
    assert params(stop=["a"], max_tokens=7, id=2) is first
    assert (first.stop, first.max_tokens) == (("a",), 7)
    # What the fields leave open is that of the row's call.
    assert params(SamplingParams(top_k=3), stop=["a"], max_tokens=7).top_k == 3
    assert params(stop=["a"], max_tokens=7) is first
    # Values that are equal in Python and are not in JSON.
    assert params(temperature=1).temperature == 1
    for value in (True, "1"):
        row = parser.parse(RawRow(0, json.dumps({"prompt": "x", "temperature": value}).encode()))
        assert row.error is not None
        assert row.error.type == "invalid_type"
    for seed in range(200):  # more than are kept
        assert params(seed=seed).seed == seed
    assert params(stop=["a"], max_tokens=7) == first
