"""Formats of JSON Schema: what a text may be, compared with what Python reads."""

from __future__ import annotations

import json
from datetime import date, datetime, time
from typing import Any

import pytest

from specbatch.grammar.compiler import GrammarCompiler
from specbatch.grammar.constraint import Constraint, constraint_of
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.types import SamplingParams

TOKENIZER = byte_tokenizer(300, [0])
COMPILER = GrammarCompiler(TOKENIZER)
DAYS = ["01", "28", "29", "30", "31"]


def constraint(schema: dict[str, Any]) -> Constraint:
    given = {"type": "json_schema", "json_schema": {"schema": schema}}
    found = constraint_of(SamplingParams(response_format=json.dumps(given)))
    assert found is not None
    return found


def taken(schema: dict[str, Any], values: list[Any]) -> list[Any]:
    start = COMPILER.matcher(constraint(schema))
    found = []
    for value in values:
        matcher, ids = start.fork(), TOKENIZER.encode(json.dumps(value), add_special_tokens=False)
        if matcher.advance_by(ids) == len(ids) and matcher.is_complete():
            found.append(value)
    return found


def read_by(read: Any, texts: list[str]) -> list[str]:
    found = []
    for text in texts:
        try:
            read(text)
        except ValueError:
            continue
        found.append(text)
    return found


def test_dates_are_those_of_the_calendar() -> None:
    years = ["0000", "0001", "0004", "0100", "0400", "1900", "1999", "2000", "2023", "2024", "9996", "9999"]
    texts = [f"{year}-{month:02}-{day}" for year in years for month in (0, 1, 2, 4, 12, 13) for day in ["00", *DAYS]]
    assert taken({"type": "string", "format": "date"}, texts) == read_by(date.fromisoformat, texts)


@pytest.mark.wide
def test_ends_of_february_in_all_years_of_a_cycle() -> None:
    texts = [f"{year}-02-{day}" for year in range(1896, 2304) for day in DAYS]
    assert taken({"type": "string", "format": "date"}, texts) == read_by(date.fromisoformat, texts)


def test_times() -> None:
    clocks = ["00:00:00", "23:59:59", "23:60:00", "23:59:60", "12:30:00.5", "12:30:00.123456789"]
    wrong = ["12:30:00", "12:30Z", "12:30:00.Z", "1:30:00Z", "24:00:00Z", "12:30:00+05:60"]
    texts = [clock + zone for clock in clocks for zone in ("Z", "+05:30", "-23:59", "+24:00")]
    assert taken({"type": "string", "format": "time"}, texts) == read_by(time.fromisoformat, texts)
    assert taken({"type": "string", "format": "time"}, wrong) == []


def test_dates_with_times() -> None:
    days = ["2024-02-29", "2023-02-29", "2023-12-31", "0000-01-01"]
    texts = [f"{day}T{clock}" for day in days for clock in ("00:00:00Z", "23:59:59.5+01:00", "23:59:60Z")]
    assert taken({"type": "string", "format": "date-time"}, texts) == read_by(datetime.fromisoformat, texts)
    assert (
        taken(
            {"type": "string", "format": "date-time"},
            ["2024-02-29 00:00:00Z", "2024-02-29T00:00:00", "2024-02-29T24:00:00Z"],
        )
        == []
    )


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"format": "date"}, ["2024-02-29", 3, None], ["2023-02-29", "x"]),
        ({"type": ["string", "null"], "format": "date"}, ["2024-02-29", None], ["2023-02-29", 3]),
        ({"type": "string", "format": "date", "pattern": "^20"}, ["2024-02-29"], ["2023-02-29", "1996-02-29"]),
        ({"type": "string", "format": "date", "pattern": "^20", "allOf": [{"pattern": "9$"}]},
         ["2024-02-29"], ["2023-02-29", "1996-02-29", "2024-02-28"]),
        ({"type": "array", "items": {"type": "string", "format": "date"}}, [["2024-02-29"]], [["2023-02-29"]]),
        ({"$ref": "#/$defs/d", "$defs": {"d": {"type": "string", "format": "date"}}}, ["2024-02-29"], ["2023-02-29"]),
        ({"properties": {"format": {"const": "date"}}, "required": ["format"]}, [{"format": "date"}],
         [{"format": "2024-02-29"}]),
        ({"const": {"format": "date"}}, [{"format": "date"}], [{}]),
    ],
)  # fmt: skip
def test_where_a_format_is(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    assert taken(schema, [*right, *wrong]) == right


def test_formats_of_the_library() -> None:
    """It follows these exactly enough, or as a part of what they allow."""
    for name, right, wrong in (
        ("uuid", "2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638"),
        ("ipv4", "1.2.3.255", "1.2.3.256"),
        ("ipv6", "1::8", "1::2::8"),
        ("email", "a@b.de", "a..b@c.de"),
        ("hostname", "a-b.de", "-a.de"),
        ("duration", "P1DT2H", "P1DT"),
        ("uri", "http://a.de/%20", "http://a.de/%2"),
    ):
        assert taken({"type": "string", "format": name}, [right, wrong]) == [right], name
