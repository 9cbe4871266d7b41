"""The report's figures of answers are compared with those that pandas or the test itself computes."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import jsonschema
import pandas
import pytest

import specbatch.report
from specbatch.errors import InputError
from specbatch.files.local import identify_input
from specbatch.report import charts
from specbatch.report.answers import MAX_VALUES, FieldValues
from specbatch.report.collect import Summary, summarize
from specbatch.report.field_facts import answer_facts
from specbatch.report.job_input import Formats
from specbatch.report.rows import read_row
from tests.report.test_report import Tags, batch, failed, native, page_of, write_results

SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"enum": ["billing", "bug", "other"]},
        "urgent": {"type": "boolean"},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "score": {"type": "number"},
        "day": {"type": ["string", "null"], "format": "date"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "who": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    "required": ["label"],
}


def format_of(schema: Any) -> str:
    return json.dumps({"type": "json_schema", "json_schema": {"schema": schema}})


def summary_of(texts: list[str], wanted: str | None = None, **fields: Any) -> Summary:
    rows = (read_row(native(i, text, **fields)) for i, text in enumerate(texts))
    return summarize(rows, Formats(wanted))


def shares_of(summary: Summary) -> dict[str, tuple[str, str]]:
    facts = answer_facts(summary.answers)
    assert facts is not None
    return {name: (share, words) for name, share, words in facts["shares"]}


def fields_of(summary: Summary) -> dict[str, dict[str, Any]]:
    facts = answer_facts(summary.answers)
    assert facts is not None
    return {field["name"]: field for field in facts["fields"]}


def some_answers(number: int) -> pandas.DataFrame:
    rng = random.Random(7)
    return pandas.DataFrame(
        {
            "label": rng.choices(["billing", "bug", "other"], [6, 3, 1], k=number),
            "urgent": [rng.random() < 0.25 for _ in range(number)],
            "stars": [rng.randint(1, 5) for _ in range(number)],
            "score": [round(rng.gauss(50, 10), 3) for _ in range(number)],
        }
    )


def test_counts_are_those_of_pandas() -> None:
    table = some_answers(900)
    texts = [json.dumps(row) for row in table.to_dict(orient="records")]
    summary = summary_of(texts, format_of(SCHEMA))
    assert shares_of(summary)["Match their schema"][0] == "100.00%"
    fields = fields_of(summary)
    for name in ("label", "urgent", "stars"):
        wanted = {str(value).lower(): times for value, times in table[name].value_counts().items()}
        assert {value: times for value, times, _ in fields[name]["shares"]} == wanted
    assert [value for value, *_ in fields["stars"]["shares"]] == ["1", "2", "3", "4", "5"]
    assert f"mean {table['score'].mean():,.4g}" in fields["score"]["how"]
    assert f"From {table['score'].min():,.4g} to {table['score'].max():,.4g}" in fields["score"]["how"]
    plot = fields["score"]["plot"]
    for span, count in plot.rows:
        low, high = (float(n) for n in re.findall(r"-?[\d.]+", span))
        assert int(count) == ((table["score"] >= low) & (table["score"] < high)).sum()
    assert sum(int(count) for _, count in plot.rows) == 900


def test_shares_of_answers_that_match() -> None:
    good = '{"label": "bug", "day": "2024-02-29"}'
    not_json = ['{"label": "bu', "plain text", '{"label": NaN}']
    not_valid = [
        '{"label": "refund"}',
        '{"urgent": true}',
        '{"label": "bug", "stars": 6}',
        '{"label": "bug", "more": 1}',  # objects are closed, as for the model
        '{"label": "bug", "day": "2023-02-29"}',
    ]
    lines = [native(i, text) for i, text in enumerate([good] * 12 + not_json + not_valid)]
    lines[12]["finish_reason"] = "length"
    lines.append(failed(len(lines)))
    summary = summarize(map(read_row, lines), Formats(format_of(SCHEMA)))
    assert shares_of(summary) == {
        "Are JSON": ("85.00%", "17 of 20 answers of rows that ask for JSON"),
        "Match their schema": ("70.59%", "12 of 17 answers that are JSON and have a schema"),
        "Cut by max_tokens": ("5.00%", "1 of 20 answers; the end of the context cuts, too"),
    }
    invalid = {row.text: reason for row, reason in summary.answers.invalid.items}
    assert invalid.keys() <= {*not_json, *not_valid}
    assert len(invalid) == 6
    facts = answer_facts(summary.answers)
    assert facts is not None
    assert "because they were cut: 1." in facts["notes"][0]


def test_fields_of_objects_and_lists() -> None:
    answer = {"who": {"city": "Rome"}, "tags": ["a", "b", "a"], "mixed": 1, "label": "null"}
    texts = [json.dumps(answer)] * 3 + [json.dumps({**answer, "mixed": "1", "label": None})]
    fields = fields_of(summary_of(texts))
    assert "who" not in fields
    assert fields["who.city"]["shares"] == [("Rome", 4, "4 (100.0%)")]
    assert fields["tags[]"]["shares"] == [("a", 8, "8 (66.7%)"), ("b", 4, "4 (33.3%)")]
    assert fields["mixed"]["shares"] == [("1", 3, "3 (75.0%)"), ('"1"', 1, "1 (25.0%)")]
    assert fields["label"]["shares"] == [('"null"', 3, "3 (75.0%)"), ("null", 1, "1 (25.0%)")]
    assert shares_of(summary_of(texts))["Are JSON"] == ("100.00%", "4 of 4 answers; no row asks for JSON")


def test_numbers_that_differ_have_different_names() -> None:
    ids = [json.dumps({"id": 9007199254740992 + i, "score": 0.12345 + i / 10**6, "stars": 5.0}) for i in range(6)]
    fields = fields_of(summary_of(ids))
    assert [name for name, *_ in fields["id"]["shares"]] == [f"{9007199254740992 + i:,}" for i in range(6)]
    assert len({name for name, *_ in fields["score"]["shares"]}) == 6
    assert fields["stars"]["shares"] == [("5", 6, "6 (100.0%)")]


def test_numbers_beyond_those_of_a_plot_change_no_other_figure() -> None:
    texts = ['{"a": "x"}'] * 4 + ['{"a": 1e999}', '{"a": ' + "9" * 400 + "}"]
    field = fields_of(summary_of(texts))["a"]
    assert field["kinds"] == "text 4, number beyond 1e300 2"
    assert field["shares"] == [("x", 4, "4 (66.7%)")]


def test_a_field_of_several_types_shows_the_more_frequent_one() -> None:
    values = [*(f"t{i}" for i in range(20)), None, True, 1]
    field = fields_of(summary_of([json.dumps({"a": value}) for value in values]))["a"]
    assert field["how"] == "The lengths of its texts. Different texts of at most 80 characters: 20."
    values = ["x", *range(2 * MAX_VALUES), *["x"] * (3 * MAX_VALUES)]
    field = fields_of(summary_of([json.dumps({"a": value}) for value in values]))["a"]
    assert field["how"].endswith("characters: at least 1.")


def test_formats_that_cannot_be_checked_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
    known.pop("date-time", None)  # as without its package
    monkeypatch.setattr(jsonschema.Draft202012Validator.FORMAT_CHECKER, "checkers", known)
    times = {name: {"type": "string", "format": name} for name in ("date", "date-time")}
    wanted = format_of({"type": "object", "properties": times})
    facts = answer_facts(summary_of(['{"date": "2024-02-29", "date-time": "x"}'], wanted).answers)
    assert facts is not None
    assert facts["notes"] == [
        "Formats that were not checked: date-time. pip install 'jsonschema[format-nongpl]' adds checks."
    ]


def test_calls_of_tools_are_no_empty_texts() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    summary = summary_of([""] * 6, '{"type": "json_object"}', tool_calls=[call])
    assert fields_of(summary) == {}
    assert list(shares_of(summary)) == ["Cut by max_tokens"]


def test_few_reasons_are_shown() -> None:
    lines = [native(i, "{}") for i in range(40)]
    schemas = [format_of({"$ref": f"#/$defs/{i}"}) for i in range(40)]
    formats = Formats(None, [None, *schemas], array("H", range(2, 42)))
    facts = answer_facts(summarize(map(read_row, lines), formats).answers)
    assert facts is not None
    assert facts["notes"][5:] == ["Answers that were not checked for other reasons: 35."]


def test_texts_that_repeat_are_values() -> None:
    """Short texts are counted as those of `choice` are; texts that differ are not."""
    fields = fields_of(summary_of(["yes"] * 30 + ["no"] * 10))
    assert fields["text"]["shares"] == [("yes", 30, "30 (75.0%)"), ("no", 10, "10 (25.0%)")]
    assert fields_of(summary_of([f"text {i}" for i in range(40)])) == {}


def test_a_field_with_many_texts_shows_their_lengths() -> None:
    texts = [json.dumps({"summary": "x" * (10 + i % 50) + str(i)}) for i in range(100)]
    field = fields_of(summary_of(texts))["summary"]
    assert field["shares"] is None
    assert sum(int(count) for _, count in field["plot"].rows) == 100
    frequent = [json.dumps({"summary": f"v{i % 30}"}) for i in range(300)]
    shares = fields_of(summary_of(frequent))["summary"]["shares"]
    assert shares[-1] == ("all others", 180, "180 (60.0%)")
    assert len(shares) == 13


@pytest.mark.parametrize(("first", "last"), [(0, 400), (100, 700), (1_000, 1_700), (95, 1_050), (10_000, 13_000)])
def test_lengths_of_texts_are_counted_in_their_bars(first: int, last: int) -> None:
    lengths = [length for length in range(first, last) for _ in range(3)]
    plot = fields_of(summary_of([json.dumps({"a": "x" * length}) for length in lengths]))["a"]["plot"]
    assert len(plot.rows) > 10
    for span, count in plot.rows:
        low, *high = (int(n) for n in span.replace(",", "").split(" to "))
        assert int(count.replace(",", "")) == sum(low <= length <= (high or [low])[0] for length in lengths)


def test_bars_of_large_numbers_have_different_ends() -> None:
    for first, step in [(1_700_000_000, 500), (1_234_567, 1), (10**18, 10**12)]:
        plot = charts.number_histogram([(float(first + i * step), 1.0) for i in range(100)], "a", "answers")
        spans = [span for span, _ in plot.rows]
        assert len(set(spans)) == len(spans)
        assert all(len(set(span.split(" to below "))) == 2 for span in spans)


def test_schemas_of_rows(tmp_path: Path) -> None:
    """Each row of an OpenAI Batch file can have its own format."""
    data = tmp_path / "d.jsonl"
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
    asked: list[Any] = [{"response_format": wanted}, {"response_format": wanted}, {}]
    body = {"model": "m", "messages": [{"role": "user", "content": "a question"}]}
    data.write_text(
        "".join(
            json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": {**body, **own}})
            + "\n"
            for i, own in enumerate(asked)
        )
    )
    path = write_results(
        tmp_path / "d.results.jsonl", [batch(0, '{"a": 1}'), batch(1, '{"a": "x"}'), batch(2, "plain text")]
    )
    write_stats(tmp_path / "d.results.stats.json", data)
    words = Tags(page_of(path)).words
    for part in ("2 of 2 answers of rows that ask for JSON", "1 of 2 answers that are JSON", "user: a question"):
        assert part in words, part
    assert "$.a: 'x' is not of type 'integer'" in words


def write_stats(path: Path, data: Path, **job: Any) -> None:
    facts = {f"input.{name}": value for name, value in identify_input(data)[0].items()}
    path.write_text(json.dumps({"job": {"specbatch": "0", "input.kind": "file", **facts, **job}, "input": data.name}))


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet", "t.json"])
def test_prompts_of_tables(tmp_path: Path, name: str) -> None:
    table = pandas.DataFrame({"no": ["a", "b"], "subject": ["Invoice", None], "body": ["<b>Where</b>", "It is late"]})
    data = tmp_path / name
    if name.endswith(".parquet"):
        table.to_parquet(data)
    elif name.endswith(".json"):
        table.to_json(data, orient="records")
    else:
        table.to_csv(data, index=False)
    path = write_results(tmp_path / "t.results.jsonl", [native(0), native(1)])
    job = {"data.prompt_template": '{{ subject or "-" }}: {{ body }}', "data.id_column": "no"}
    write_stats(tmp_path / "t.results.stats.json", data, **job, **{"input.columns": {"no": "text"}})
    words = Tags(page_of(path)).words
    assert "Invoice: <b>Where</b>" in words
    assert "-: It is late" in words
    write_stats(tmp_path / "t.results.stats.json", data, **{"data.prompt_template": "{% for"})
    assert "--input names it" in Tags(page_of(path)).words, "a template of another version is no traceback"
    with pytest.raises(InputError, match="of another version"):
        page_of(path, input=data)


def test_rows_to_look_at() -> None:
    rng = random.Random(3)
    lines = [
        native(
            i,
            tokens=rng.randint(1, 500),
            certificate={"margin": rng.random(), "position": 0},
            logprobs=[{"token": "a", "logprob": -rng.random(), "top": []} for _ in range(3)],
        )
        for i in range(400)
    ]
    summary = summarize(map(read_row, lines))

    def first(key: Any) -> list[int]:
        return [line["index"] for line in sorted(lines, key=key)[:4]]

    assert [row.index for row in summary.longest.items] == first(lambda line: -line["usage"]["completion_tokens"])
    assert [row.index for row in summary.lowest_margins.items] == first(lambda line: line["certificate"]["margin"])
    assert [row.index for row in summary.lowest_logprobs.items] == first(
        lambda line: sum(token["logprob"] for token in line["logprobs"])
    )
    shown = {row.index for row in (*summary.longest.items, *summary.lowest_margins.items)}
    assert shown <= summary.shown_indices


@pytest.mark.parametrize(
    "logprobs",
    [
        [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -3.0}],
        {"content": [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -3.0}], "refusal": None},
        {"tokens": ["a", "b"], "token_logprobs": [-1.0, -3.0]},
    ],
)
def test_log_probabilities_of_all_formats(logprobs: Any) -> None:
    assert read_row(native(0, logprobs=logprobs)).logprob == -2.0
    line = batch(0)
    line["response"]["body"]["choices"][0]["logprobs"] = logprobs
    assert read_row(line).logprob == -2.0


@pytest.mark.wide
def test_memory_is_bounded() -> None:
    """Values that all differ, fields that all differ, and long texts take no more memory than a limit."""

    def rows(count: int, begin: int = 0) -> Any:
        for i in range(begin, begin + count):
            answer = {"id": f"value {i}", "n": i * 1.5, f"field {i % 500}": i, "long": "x" * (i % 3000)}
            yield read_row(native(i, json.dumps(answer)))

    tracemalloc.start()
    summarize(rows(1_000), Formats(format_of({"type": "object"})))
    _, few = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    summary = summarize(rows(10_500), Formats(format_of({"type": "object"})))
    _, many = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert many < 2.5 * few + 30e6
    answers = summary.answers
    assert len(answers.fields) == 60
    assert answers.fields_left_out == sum(1 for i in range(10_500) if i % 500 >= 57)
    assert len(answers.fields["id"].values) == MAX_VALUES
    assert answers.fields["id"].not_counted == 10_500 - MAX_VALUES
    assert len(answers.fields["n"].numbers.items) == 10_000
    field = fields_of(summary)["n"]
    assert "random sample of 10,000" in field["how"]
    assert sum(int(count.replace(",", "")) for _, count in field["plot"].rows) == pytest.approx(10_500, abs=20)


def test_a_value_that_is_counted_is_counted_each_time() -> None:
    field = FieldValues("a")
    for i in range(3 * MAX_VALUES):
        field.add(f"v{i}")
        field.add("often")
    assert field.values["text", "often"] == 3 * MAX_VALUES
    assert field.not_counted + field.values.total() == 6 * MAX_VALUES


def test_hostile_answers(tmp_path: Path) -> None:
    script = "<script>alert(1)</script>"
    answers = [
        json.dumps({script: script, "a": script}),
        json.dumps({"n": 10**400, "m": 1e308, script * 40: 1}),
        '{"deep": ' + "[" * 5000 + "]" * 5000 + "}",
        "[" * 100_000,
        '{"a": "\\ud800", "": {"": "\\u0000"}}',
        "9" * 10_000,
        "",
    ]
    path = write_results(tmp_path / "d.results.jsonl", [native(i, text) for i, text in enumerate(answers)])
    job = {"sampling.response_format": format_of({"type": "object", "properties": {script: {"const": script}}})}
    (tmp_path / "d.results.stats.json").write_text(json.dumps({"job": {"specbatch": "0", **job}}))
    text = page_of(path)
    tags = Tags(text)
    assert "script" not in tags.names
    assert tags.words.count("alert(1)") >= 3
    assert len(text) < 200_000


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "https://example.invalid/schema.json"}, "cannot be used"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<"}}}, "cannot be used"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}, "cannot be used"),
    ],
)
def test_schemas_that_cannot_be_used(schema: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a note, and nothing is loaded from an address in a schema."""
    import urllib.request

    monkeypatch.setattr(urllib.request, "urlopen", lambda *a, **k: pytest.fail("it opened an address"))
    summary = summary_of(['{"a": "x"}'] * 3, format_of(schema))
    facts = answer_facts(summary.answers)
    assert facts is not None
    assert "Match their schema" not in shares_of(summary)
    assert any("not checked: 3" in note and reason in note for note in facts["notes"])


def test_the_page_can_be_read_without_sight_and_mouse(tmp_path: Path) -> None:
    table = some_answers(200)
    lines = [native(i, json.dumps(row), 3 + i % 40) for i, row in enumerate(table.to_dict(orient="records"))]
    text = page_of(write_results(tmp_path / "d.results.jsonl", [*lines, failed(200)]))
    assert text.count("<table") == text.count("<caption") > 10
    assert text.count('class="scroll"') == text.count('class="scroll" tabindex="0" role="region" aria-label="')
    plots = re.findall(r"<svg.*?</figure>", text, re.DOTALL)
    assert len(plots) >= 6
    assert all("Table of this plot" in plot and plot.count("<tr>") > 1 for plot in plots)
    assert 'aria-label=""' not in text
    assert "<th>" not in text, "each header says of what it is one"


def test_colours_have_contrast() -> None:
    """4.5 for text and 3 for bars and lines, as WCAG 2.2 wants them."""
    css = (Path(specbatch.report.__file__).parent / "page.css").read_text()

    def rgb(colour: str) -> list[float]:
        digits = colour if len(colour) == 6 else "".join(c * 2 for c in colour)
        return [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]

    def luminance(parts: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    themes = [dict(re.findall(r"--(\w+): #(\w+);", block)) for block in re.findall(r"\{[^{}]*--page:[^{}]*\}", css)]
    assert len(themes) == 2
    (opacity,) = map(float, re.findall(r"stroke-opacity: ([.\d]+)", css))
    for theme in themes:
        for name in ("page", "card"):
            ground = rgb(theme[name])
            for ink, least, cover in (("text", 7, 1), ("soft", 4.5, 1), ("bad", 4.5, 1), ("accent", 3, opacity)):
                mixed = [cover * a + (1 - cover) * b for a, b in zip(rgb(theme[ink]), ground, strict=True)]
                one, other = sorted((luminance(mixed), luminance(ground)))
                assert (other + 0.05) / (one + 0.05) >= least, (theme, name, ink)


@pytest.mark.parametrize(
    "values",
    [[1.0], [0.5, 0.5], [float(i) for i in range(30)], [-1e9, *(i / 7 for i in range(500)), 1e9], [1e-12, 2e-12]],
)
def test_histograms_of_numbers_have_all_of_them(values: list[float]) -> None:
    plot = charts.number_histogram([(value, 1) for value in values], "x", "answers")
    assert sum(float(count.replace(",", "")) for _, count in plot.rows) == len(values)
    assert len(plot.rows) <= 45
    if len(values) > 500:
        assert plot.rows[0][0].startswith("below")
        assert plot.rows[-1][0].endswith("and more")
        assert max(float(count) for _, count in plot.rows) < 60
