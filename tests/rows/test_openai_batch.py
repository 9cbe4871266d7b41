"""OpenAI Batch lines in and out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specbatch.config import DataSection
from specbatch.counts import SpeculationCounts
from specbatch.errors import RowError
from specbatch.files.jsonl import encode_line
from specbatch.files.line_types import index_of
from specbatch.logprobs import TokenLogprob, TokenLogprobs
from specbatch.results.logprob_json import LogprobJson
from specbatch.results.results_format import Choice, error_line, result_line
from specbatch.results.stats import RowTotals
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row
from specbatch.rows.sources import RawRow
from specbatch.rows.tokenizer import TextProcessor
from specbatch.types import FinishReason, SamplingParams
from tests.rows.asked import asked
from tests.stub_engine import StubTokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
TEXTS = TextProcessor(StubTokenizer(), DataSection())


def line(url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": "c", "method": "POST", "url": url, "body": {"model": "m", **body}}


def parse(row: dict[str, Any]) -> tuple[Row, Row | RowError]:
    return asked(
        RowParser(SamplingParams(logprobs=None), DataSection(prompts_as_chat=True)).parse(
            RawRow(3, json.dumps(row).encode())
        )
    )


def prompt_of(row: dict[str, Any]) -> Row:
    _, prompt = parse(row)
    assert isinstance(prompt, Row), prompt
    return prompt


def test_chat_request() -> None:
    prompt = prompt_of(line(messages=USER, max_completion_tokens=4, temperature=0.5, seed=1, n=2, user="u", stop=["x"]))
    assert (prompt.kind, prompt.content, prompt.own_seed) == ("messages", USER, True)
    assert prompt.params == SamplingParams(max_tokens=4, temperature=0.5, seed=1, n=2, stop=("x",))
    assert prompt_of(line(messages=USER, logprobs=True, top_logprobs=3)).params.logprobs == 3
    assert prompt_of(line(messages=USER, logprobs=True)).params.logprobs == 0
    assert prompt_of(line(messages=USER, logprobs=False)).params.logprobs is None


def test_completion_request() -> None:
    prompt = prompt_of(line(COMPLETIONS, prompt="x", logprobs=2))
    assert (prompt.kind, prompt.raw, prompt.params.logprobs) == ("prompt", True, 2)
    prompt = prompt_of(line(COMPLETIONS, prompt=[1, 2]))
    assert (prompt.kind, prompt.content) == ("token_ids", [1, 2])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("def f():", "def f():"),
        ("", ""),
        ([{"type": "text", "text": "def f"}, {"type": "text", "text": "():"}], "def f():"),
    ],
)
def test_a_prediction(content: Any, text: str) -> None:
    assert prompt_of(line(messages=USER, prediction={"type": "content", "content": content})).prediction == text
    assert prompt_of(line(messages=USER, prediction=None)).prediction is None


@pytest.mark.parametrize(
    ("prediction", "words"),
    [
        ("x", 'prediction must be {"type": "content", "content": ...}'),
        ({"type": "diff", "content": "x"}, 'prediction must be {"type": "content", "content": ...}'),
        ({"type": "content"}, "prediction.content must be text or a list of text parts, not null"),
        ({"type": "content", "content": 3}, "prediction.content must be text or a list of text parts, not a number"),
        ({"type": "content", "content": ["x"]}, 'prediction.content[0] must be {"type": "text"'),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0] must be text"),
        ({"type": "content", "content": "\ud800"}, "prediction.content has U+D800"),
    ],
)
def test_a_prediction_of_another_form(prediction: Any, words: str) -> None:
    _, error = parse(line(messages=USER, prediction=prediction))
    assert isinstance(error, RowError)
    assert error.message.startswith(words)


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    (line(), "missing_prompt"),
    (line(COMPLETIONS), "missing_prompt"),
    (line("/v1/embeddings", input="x"), "unsupported_parameter"),
    ({**line(messages=USER), "method": "GET"}, "unsupported_parameter"),
    ({**line(messages=USER), "custom_id": 3}, "invalid_type"),
    ({**line(messages=USER), "body": "x"}, "invalid_type"),
    ({"custom_id": "c", "url": CHAT}, "invalid_type"),
    (line(messages=USER, stream=True), "unsupported_parameter"),
    (line(messages=USER, tools=[{}]), "invalid_type"),
    (line(messages=USER, frobnicate=1), "unsupported_parameter"),
    (line(messages=USER, top_logprobs=2), "invalid_value"),
    (line(messages=USER, logprobs=2), "invalid_type"),
    (line(messages=USER, logprobs=True, top_logprobs=99), "invalid_value"),
    (line(messages=USER, max_tokens="9"), "invalid_type"),
    (line(messages=USER, max_tokens=9, max_completion_tokens=8), "invalid_value"),
    (line(messages=USER, chat_template_kwargs=["enable_thinking"]), "invalid_type"),
    (line(COMPLETIONS, prompt="x", tools=[]), "unsupported_parameter"),
    (line(COMPLETIONS, prompt=["a", "b"]), "unsupported_parameter"),
    (line(COMPLETIONS, prompt=[[1]]), "unsupported_parameter"),
    (line(COMPLETIONS, prompt=3), "invalid_type"),
    (line(COMPLETIONS, prompt="x", suffix="y"), "unsupported_parameter"),
    (line(COMPLETIONS, prompt="x", prediction={"type": "content", "content": "y"}), "unsupported_parameter"),
]


@pytest.mark.parametrize(("row", "type"), BAD_REQUESTS)
def test_bad_requests_keep_their_custom_id(row: dict[str, Any], type: str) -> None:
    info, error = parse(row)
    assert isinstance(error, RowError), error
    assert error.type == type
    assert error_line(info, error) == {
        "id": "batch_req_000000000003",
        "custom_id": row["custom_id"],
        "response": None,
        "error": {"code": type, "message": error.message},
    }


def test_native_rows_are_no_batch_lines() -> None:
    assert parse({"prompt": "x", "custom_id": "c"})[0].api is None
    assert parse({"prompt": "x", "body": "c"})[0].api is None
    assert parse({"prompt": "x", "url": "c"})[0].api is None
    assert parse({"prompt": "x", "url": "https://example.org/a", "body": "a page"})[0].api is None


def result(url: str, logprobs: TokenLogprobs | None) -> dict[str, Any]:
    info, _ = parse(line(url, messages=USER) if url == CHAT else line(url, prompt="x"))
    counts = SpeculationCounts()
    counts.record(drafted=3, depth=3, accepted=1, committed=2)
    choice = Choice("hé", list("hé".encode()), FinishReason.STOP, logprobs, counts)
    info.token_ids = [1] * 5
    out = result_line(info, [choice, choice], LogprobJson(TEXTS.pieces), model="target")
    return json.loads(encode_line(out))  # type: ignore[no-any-return]


def test_chat_response() -> None:
    out = result(CHAT, TokenLogprobs.of([TokenLogprob(104, -0.25, ((104, -0.25), (0xC3, float("-inf"))))]))
    assert list(out) == ["id", "custom_id", "response", "error"]
    assert out["error"] is None
    assert out["response"]["status_code"] == 200
    body = out["response"]["body"]
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 0, "target")
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert body["speculation"]["rounds"] == 2
    first = body["choices"][0]
    assert first["message"] == {"role": "assistant", "content": "hé", "refusal": None}
    assert first["finish_reason"] == "stop"
    assert [c["index"] for c in body["choices"]] == [0, 1]
    entry = first["logprobs"]["content"][0]
    assert entry["token"] == "h"
    assert entry["bytes"] == [104]
    assert entry["top_logprobs"][1]["logprob"] == -9999.0


def test_completion_response() -> None:
    scores = [TokenLogprob(104, -0.25, ((104, -0.25),)), TokenLogprob(105, -1.0, ((104, -0.5),))]
    body = result(COMPLETIONS, TokenLogprobs.of(scores))["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["h", "i"],
        "token_logprobs": [-0.25, -1.0],
        "top_logprobs": [{"h": -0.25}, {"h": -0.5}],
        "text_offset": [0, 1],
    }
    assert result(CHAT, None)["response"]["body"]["choices"][0]["logprobs"] is None


def test_lines_can_be_counted_and_found_again() -> None:
    out = result(CHAT, None)
    assert index_of(out) == 3
    assert index_of({"id": "x", "index": 7}) == 7
    for other in ({"id": "7"}, {"id": "x", "index": -1}, {"id": "x", "index": "7"}, {"id": 7}, {}):
        with pytest.raises((LookupError, ValueError, TypeError, AttributeError)):
            index_of(other)
    totals = RowTotals()
    totals.add(out)
    totals.add({"id": "batch_req_1", "custom_id": "c", "response": None, "error": {"code": "e", "message": ""}})
    assert (totals.ok, totals.failed, dict(totals.errors), totals.completion_tokens) == (1, 1, {"e": 1}, 6)
    assert (totals.speculation.rounds, totals.speculation.committed) == (2, 4)
