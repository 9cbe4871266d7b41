"""Rows with a grammar, from the file to the result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter

from specbatch import LLM, generate_file
from specbatch.config import DataSection
from specbatch.config_load import dump_config, load_config
from specbatch.errors import ConfigError, InputError
from specbatch.job.row_queue import RowPreparer
from specbatch.job.terminal import closing_table, table_text
from specbatch.results.stats import versions
from specbatch.rows.parser import RowParser
from specbatch.rows.sources import RawRow
from specbatch.rows.tokenizer import TextProcessor
from specbatch.types import EngineLimits, SamplingParams
from tests.grammar.tiny_tokenizer import tiny_tokenizer
from tests.job.test_generate import Run

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "size": {"type": "integer", "minimum": 1, "maximum": 300}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
JSON = SamplingParams(response_format='{"type": "json_object"}')


def parse(fields: dict[str, Any]) -> SamplingParams | str:
    """The sampling options of a row, or its error."""
    row = RowParser(JSON, DataSection()).parse(RawRow(0, json.dumps(fields).encode()))
    return row.params if row.error is None else f"{row.error.type}: {row.error.message}"


def test_a_grammar_of_a_row_replaces_the_default() -> None:
    for fields, expected in (
        ({}, JSON.response_format),
        ({"regex": None}, JSON.response_format),
        ({"regex": "a"}, None),
        ({"choice": ["a", "b"]}, None),
        ({"response_format": {"type": "text"}}, '{"type": "text"}'),
        ({"response_format": FORMAT}, json.dumps(FORMAT)),
    ):
        params = parse({"prompt": "x", **fields})
        assert isinstance(params, SamplingParams)
        assert params.response_format == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "xml"}}, ["json_schema", "json_object", "'xml'"]),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, ["json_schema.schema"]),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "srict": 1}}}, ["'srict'", "name"]),
        ({"response_format": {"type": "json_object", "schema": {}}}, ["'schema'"]),
        ({"response_format": "json"}, ["json_object"]),
        ({"regex": "a", "grammar": "b"}, ["regex and grammar are given"]),
        ({"choice": ["a", "a"]}, ["two or more different texts"]),
        ({"choice": []}, ["two or more different texts"]),
        ({"guided_json": {}}, ["use response_format"]),
        ({"guided_regex": "a"}, ["use regex"]),
        ({"structured_outputs": {"regex": "a"}}, ["use response_format, regex, choice or grammar"]),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], words: list[str]) -> None:
    error = parse({"prompt": "x", **fields})
    assert isinstance(error, str)
    assert all(word in error for word in words), error


def test_a_batch_line_is_openais() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": FORMAT}
    TypeAdapter(CompletionCreateParamsNonStreaming).validate_python(body)
    params = parse({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body})
    assert isinstance(params, SamplingParams)
    assert params.response_format == json.dumps(FORMAT)


def test_a_configuration_is_written_and_read_again(tmp_path: Path) -> None:
    config = load_config(None, [f"sampling.response_format={json.dumps(FORMAT)}"])
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "c.yaml") == config
    (tmp_path / "c.yaml").write_text("sampling: {response_format: {type: json_object}}")
    assert load_config(tmp_path / "c.yaml").sampling == JSON
    with pytest.raises(ConfigError, match="regex and choice are given"):
        load_config(None, ["sampling.choice=[a, b]", "sampling.regex=a"])


TINY: dict[str, Any] = {"model.target": "random:tiny", "device": "cpu", "dtype": "float32", "max_tokens": 60}
ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "response_format": FORMAT, "n": 3, "temperature": 1.0},
    {"prompt": "b", "regex": "[a-d]{3}-[0-9]{2}"},
    {"prompt": "c", "choice": ["yes", "no"], "temperature": 2.0},
    {"prompt": "d"},
    {"prompt": "e", "response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
    {"prompt": "f", "grammar": 'root ::= "x" [0-9]+ "y"', "max_tokens": 20},
    {"prompt": "g", "regex": "a{9}", "allowed_token_ids": [5, 6]},
    {"prompt": "h", "choice": ["yes", "no"], "ignore_eos": True},
]


def test_a_job(tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    report = generate_file(data, tmp_path / "a.jsonl", method="none", **TINY)
    found = list(report.results())
    assert report.num_failed == 3
    for choice in found[0]["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert re.fullmatch(r"[a-d]{3}-[0-9]{2}", found[1]["text"])
    assert found[2]["text"] in ("yes", "no")
    assert {one["finish_reason"] for one in found[:3]} == {"stop"}
    assert re.fullmatch("x[0-9]+y" if found[5]["finish_reason"] == "stop" else "x[0-9]*", found[5]["text"])
    assert "not" in found[4]["error"]["message"]
    assert found[6]["error"]["type"] == "no_token_left"
    assert "regex and allowed_token_ids forbid all" in found[6]["error"]["message"]
    assert "ignore_eos and choice" in found[7]["error"]["message"]


def test_options_without_grammars_make_error_rows() -> None:
    texts = TextProcessor(tiny_tokenizer(), DataSection(prompts_as_chat=False))
    prepare = RowPreparer(
        RowParser(JSON, DataSection()), texts, EngineLimits(99, 61), "speculation.simulate_acceptance"
    )
    one, other = prepare(
        [RawRow(0, b'{"prompt": "a"}'), RawRow(1, b'{"prompt": "a", "response_format": {"type": "text"}}')]
    )
    assert one.error is not None
    assert "not supported with speculation.simulate_acceptance" in one.error.message
    assert other.error is None


def test_a_bad_grammar_of_the_configuration_ends_the_job() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.regex cannot be used"):
        LLM(**{**TINY, "sampling.regex": "(a"})


@pytest.mark.parametrize(
    ("temperature", "methods"),
    [(0.0, ["ngram"]), *(pytest.param(t, ["none", "ngram"], marks=pytest.mark.wide) for t in (0.0, 1.0))],
)
def test_a_limit_of_the_library_is_an_error_of_its_row(tmp_path: Path, temperature: float, methods: list[str]) -> None:
    """The error is at the same token with each draft method, and other rows finish."""
    keys = {f"p{i}": {"type": "string"} for i in range(2600)}
    late = {"a": {"enum": ["xy", "yz"]}, "o": {"type": "object", "properties": keys}}
    schema = {"type": "object", "properties": late, "required": list(late)}
    bad = {"type": "json_schema", "json_schema": {"schema": schema}}
    rows: list[dict[str, Any]] = [{"prompt": "a", "choice": ["yes", "no"]}, {"prompt": "b", "response_format": bad}]
    rows += [{"prompt": "c", "regex": "[ab]{20}"}]
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({**row, "temperature": temperature}) + "\n" for row in rows))
    found = []
    for method in methods:
        report = generate_file(data, tmp_path / f"{method}.jsonl", method=method, **TINY)
        found.append([(line["text"], line.get("error")) for line in report.results()])
        assert report.num_failed == 1
    assert all(one == found[0] for one in found)
    assert found[0][0][0] in ("yes", "no")
    assert re.fullmatch("[ab]{20}", found[0][2][0])
    error = found[0][1][1]
    assert error["type"] == "grammar_limit"
    assert re.match(r"response_format cannot be followed at token \d+: .*max is", error["message"])


def test_answers_that_are_cut_are_counted(tmp_path: Path) -> None:
    """The counts are those of stats.json and of the closing table, after a resume, too."""
    data, out = tmp_path / "d.jsonl", tmp_path / "o.jsonl"
    open_format = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "properties": {"a": {}}}}}
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "response_format": FORMAT, "max_tokens": 5, "n": 2, "temperature": 1.0},
        {"prompt": "b", "max_tokens": 5},
        {"prompt": "c", "choice": ["yes", "no"], "max_tokens": 9},
        {"prompt": "d", "regex": "ab?", "max_tokens": 1},
        {"prompt": "e", "response_format": open_format, "max_tokens": 1},
    ]
    for body in (rows[0], rows[1]):
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **body, "prompt": None}
        rows.append({"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": body})
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = generate_file(data, out, **{**TINY, "max_tokens": 77})
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("incomplete") for line in found[:5]] == [True, None, None, None, True]
    bodies = [line["response"]["body"]["choices"] for line in found[5:]]
    assert [[choice.get("incomplete") for choice in choices] for choices in bodies] == [[True, True], [None]]
    assert report.stats["answers"] == {"total": 9, "cut": 8, "incomplete": 5}
    table = table_text(closing_table(report.stats))
    assert re.search(r"answers +8 of 9 cut at max_tokens; 5 of these are incomplete", table)
    notes = " ".join(report.stats["notes"])
    assert "objects had only the keys that the schema names (1 row)" in notes
    assert "max_tokens 77 of the job was not used: each row has its own max_tokens" in notes


@pytest.mark.parametrize("row", [{"regex": "a"}, {"tools": [TOOL], "tool_choice": "required"}, {}])
def test_the_librarys_version_is_part_of_a_job_with_grammars(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only rows have them: another version may write another text."""
    run = Run(tmp_path)
    run.write([{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}], **row}])
    run()
    other = {**versions(), "llguidance": "0.1"}
    monkeypatch.setattr("specbatch.job.worker.versions", lambda: other)
    if not row:
        run()
        assert "finished already" in run.log
        return
    with pytest.raises(InputError, match=r"llguidance \(grammars\): \d\S* -> 0\.1"):
        run()
