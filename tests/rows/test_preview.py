"""Fields that prompts are made of and that no row has: an error before a model is loaded."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbatch.config import Config, DataSection
from specbatch.errors import InputError
from specbatch.rows.parser import RowParser, with_checked_fields
from specbatch.rows.sources import Source, open_source
from specbatch.tune.start import TuneOptions, open_input
from specbatch.types import SamplingParams
from tests.job.test_generate import CONFIG, Run

TEMPLATE = DataSection(prompt_template="{question} {hint}", prompts_as_chat=False)


def checked(source: Source, data: DataSection) -> Source:
    return with_checked_fields(source, RowParser(SamplingParams(), data))


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def refusal(path: Path, data: DataSection) -> InputError:
    with pytest.raises(InputError) as caught:
        checked(open_source(str(path), data), data)
    return caught.value


@pytest.mark.parametrize(
    ("data", "rows", "words", "hint"),
    [
        (TEMPLATE, [{"Question": "q", "hint": "h"}] * 3, "none of the first 3 rows", "did you mean Question?"),
        (TEMPLATE, [{"question": "q", "hints": "h"}], "has no 'hint', which data.prompt_template", "mean hints?"),
        (
            DataSection(id_column="key"),
            [{"prompt": "x", "keys": 1}],
            "has no 'key', which data.id_column",
            "mean keys?",
        ),
        (DataSection(prompt_column="q"), [{"text": "x"}] * 2, "'q', which data.prompt_column", "fields found: text"),
        (DataSection(), [{"promt": "x"}], "has no prompt, messages or prompt_token_ids", "did you mean promt?"),
        (DataSection(), [{"question": "x"}] * 500, "none of the first 100 rows", "data.prompt_column"),
        (
            DataSection(prompt_column="q"),
            [{"text": "x"}, {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}],
            "the first row of",
            "text",
        ),
        (DataSection(prompt_column="q"), [{"a\ud800b": "x"}], "'q'", r"'a\ud800b'"),
    ],
)
def test_fields_that_no_row_has(tmp_path: Path, data: DataSection, rows: list[Any], words: str, hint: str) -> None:
    (tmp_path / "d.jsonl").write_bytes(lines(rows))
    error = refusal(tmp_path / "d.jsonl", data)
    assert words in error.message
    assert hint in (error.hint or "")


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"other": 1}] * 50 + [{"question": "q", "hint": None}],
        [{"question": "q"}, {"hint": "h"}],
        ["broken", [1]],
        [{"custom_id": "c", "url": "/v1/completions"}, {"question": "q", "hint": "h"}],
        [{"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}],
    ],
)
def test_rows_that_may_differ_are_left_to_the_run(tmp_path: Path, rows: list[Any]) -> None:
    (tmp_path / "d.jsonl").write_bytes(lines(rows))
    source = checked(open_source(str(tmp_path / "d.jsonl"), TEMPLATE), TEMPLATE)
    for _ in range(2):  # and any number of times, as before
        assert [raw.index for raw in source.rows()] == list(range(len(rows)))


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("/v1/embeddings", "vllm run-batch"),
        ("/v1/responses", "`input` and `instructions` become messages"),
        ("/v1/moderations", "with response_format"),
        ("/v1/images/generations", "text only"),
        ("/v1/images/edits", "text only"),
        ("/v1/made/up", ""),
        (None, ""),
    ],
)
def test_openai_endpoints_that_do_not_exist_here(tmp_path: Path, url: str | None, hint: str) -> None:
    line = {"custom_id": "c", "method": "POST", "url": url, "body": {"input": "x"}}
    (tmp_path / "d.jsonl").write_bytes(lines([line] * 3))
    error = refusal(tmp_path / "d.jsonl", DataSection())
    assert f"url must be /v1/chat/completions or /v1/completions, not {str(url)!r}" in error.message
    assert hint in (error.hint or "")
    assert bool(hint) == bool(error.hint)
    # One line among others is an error of this line.
    (tmp_path / "d.jsonl").write_bytes(lines([line, {"prompt": "x"}]))
    first, _ = checked(open_source(str(tmp_path / "d.jsonl"), DataSection()), DataSection()).rows()
    row = RowParser(SamplingParams(), DataSection()).parse(first)
    assert row.error is not None
    assert hint in row.error.message


def test_tables_are_known_by_their_first_row(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("id,qestion\n" + "1,why\n" * 300)
    error = refusal(path, DataSection(prompt_column="question"))
    assert "the first row of" in error.message
    assert "did you mean qestion?" in (error.hint or "")
    data = DataSection(prompt_column="qestion")
    assert len(list(checked(open_source(str(path), data), data).rows())) == 300


@pytest.mark.parametrize("position", [0, 30, 400])
def test_no_row_of_standard_input_is_lost(position: int) -> None:
    rows: list[Any] = [{"question": "q" * 500} for _ in range(500)]  # several times the head that identifies it
    rows[position]["hint"] = "h"
    stdin = io.BytesIO(lines(rows))
    if position == 400:
        with pytest.raises(InputError, match="standard input has 'hint'"):
            checked(open_source("-", TEMPLATE, stdin), TEMPLATE)
        return
    source = checked(open_source("-", TEMPLATE, stdin), TEMPLATE)
    found = list(source.rows())
    assert [raw.index for raw in found] == list(range(500))
    assert json.loads(found[position].data)["hint"] == "h"


def test_generate_refuses_before_it_resolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.write([{"question": "q"}])
    monkeypatch.setattr("tests.job.test_generate.resolve", lambda config: pytest.fail("resolved"))
    with pytest.raises(InputError, match="hint"):
        run(replace(CONFIG, data=TEMPLATE))
    assert [p.name for p in tmp_path.iterdir()] == ["d.jsonl"]


def test_tune_refuses_too(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(lines([{"question": "q"}] * 9))
    with pytest.raises(InputError, match="hint"):
        open_input(TuneOptions(str(tmp_path / "d.jsonl"), tmp_path / "tuned.yaml", None, 60.0), Config(data=TEMPLATE))
