"""Configurations that are made for a file, and the short form of schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specbatch.cli import app
from specbatch.config_load import load_config
from specbatch.errors import ConfigError, InputError, SpecbatchError
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row
from specbatch.rows.sources import open_source
from specbatch.rows.suggested_config import suggested_config
from specbatch.schemas.short_schema import response_format_of, schema_of_fields
from tests.rows.asked import asked

TICKETS = "ticket_id,Subject,body,First name,if\n7,Refund,I want it,Ann,x\n8,,It crashes,Bob,y\n"


def test_a_file_runs_with_the_configuration_that_is_made_for_it(tmp_path: Path) -> None:
    data, file = tmp_path / "tickets.csv", tmp_path / "specbatch.yaml"
    data.write_text(TICKETS)
    done = CliRunner().invoke(app, ["init", str(file), "--for", str(data), "--schema", "label: one of bug, other"])
    assert done.exit_code == 0, done.output
    assert f"specbatch generate {data} -c {file}\n" in done.output
    config = load_config(file)
    assert config.data.id_column == "ticket_id"
    assert json.loads(config.sampling.response_format or "")["json_schema"]["schema"]["required"] == ["label"]
    parser = RowParser(config.sampling, config.data)
    rows = [asked(parser.parse(raw)) for raw in open_source(str(data), config.data).rows()]
    for (info, row), (name, subject) in zip(rows, (("7", "Refund"), ("8", "-")), strict=True):
        assert isinstance(row, Row)
        assert info.id == name
        assert f"Subject: {subject}\n" in row.content
        assert "\nFirst name: " in row.content
        assert "\nif: " in row.content
    assert CliRunner().invoke(app, ["init", str(file), "--for", str(data)]).exit_code == 2, "it exists"
    assert "--schema needs --for" in CliRunner().invoke(app, ["init", "--schema", "a: bool"]).output


ODD = [
    "row",
    "self",
    "range",
    "lipsum",
    "If",
    "a.b",
    '"q"',
    "{{ x }}",
    "{% y %}",
    "e\x85f",
    "g\u2028h",
    "🎉",
    "0a",
    "#",
]


@pytest.mark.parametrize("name", ODD)
def test_columns_of_odd_names(tmp_path: Path, name: str) -> None:
    data, file = tmp_path / "a.jsonl", tmp_path / "specbatch.yaml"
    data.write_text(json.dumps({name: "one", "First name": ""}) + "\n" + json.dumps({name: "two", "First name": "Ann"}))
    file.write_text(suggested_config(str(data), None))
    config = load_config(file)
    parser = RowParser(config.sampling, config.data)
    for raw, texts in zip(open_source(str(data), config.data).rows(), (": one\n", ": two\n"), strict=True):
        row = asked(parser.parse(raw))[1]
        assert isinstance(row, Row), row
        assert texts in row.content
        assert row.content.endswith(("First name: -\n", "First name: Ann\n"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"prompt": "x"}\n', "has prompt, so it needs no template"),
        ("a.csv", "id\n1\n2\n", "no column but id"),
        ("a.jsonl", "[1]\n", "no row with fields"),
        ("a.csv", "", r"a\.csv is empty"),
    ],
)
def test_files_without_columns_for_a_template(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        suggested_config(str(tmp_path / name), None)


def test_an_id_is_different_in_each_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user_id,row_id,text\n1,1,a\n1,2,b\n")
    assert 'id_column: "row_id"' in suggested_config(str(tmp_path / "a.csv"), None)


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        ("bool", {"type": "boolean"}),
        ("text", {"type": "string"}),
        ("date", {"type": "string", "format": "date"}),
        ("one of a b, c", {"enum": ["a b", "c"]}),
        ("int 1 to 5", {"type": "integer", "minimum": 1, "maximum": 5}),
        ("number -0.5 to 1", {"type": "number", "minimum": -0.5, "maximum": 1.0}),
        ("list of one of a, b", {"type": "array", "items": {"enum": ["a", "b"]}}),
        ("int?", {"anyOf": [{"type": "integer"}, {"type": "null"}]}),
    ],
)
def test_kinds_of_fields(kind: str, schema: dict[str, Any]) -> None:
    found = schema_of_fields(f"a: {kind}; b: bool")
    assert found["properties"] == {"a": schema, "b": {"type": "boolean"}}
    assert (found["required"], found["additionalProperties"]) == (["a", "b"], False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no field"),
        ("label", "'label' is no field"),
        ("a: bool; a: int", "the field a is given twice"),
        ("a: color", "a has the unknown kind 'color'"),
        ("a: one of x", "a must be one of two or more"),
        ("a: one of x, y, b: bool", "'b: bool' is a value of a"),
        ("a: one of 'x', 'y'", "a has the value 'x' in quotes"),
        ("a: one of x, x", "a must be one of two or more"),
        ("a: int 5 to 1", "no value from 5 to 1"),
        ("a: int 1.5 to 2", "which is not one of numbers"),
        ("@missing.json", "cannot read missing.json"),
        ("missing.json", "cannot read missing.json"),
    ],
)
def test_schemas_that_are_none(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        response_format_of(text)


def test_schema_files(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"b": {"type": "boolean"}, "a": {"type": "string"}}}
    whole = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": False}}
    file = tmp_path / "s.json"
    for value, expected in ((schema, {"type": "json_schema", "json_schema": {"schema": schema}}), (whole, whole)):
        file.write_text(json.dumps(value))
        assert json.loads(response_format_of(str(file))) == expected
    for text in ("[1]", "{", ""):
        file.write_text(text)
        with pytest.raises(SpecbatchError, match=r"s\.json is"):
            response_format_of(str(file))


def test_schemas_on_the_command_line() -> None:
    config = load_config(None, ["sampling.response_format={type: json_schema, json_schema: {schema: {type: object}}}"])
    assert config.sampling.response_format == '{"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}'
    done = CliRunner().invoke(app, ["generate", "x.jsonl", "--schema", "a: color"])
    assert done.exit_code == 2
    assert "unknown kind" in done.output
