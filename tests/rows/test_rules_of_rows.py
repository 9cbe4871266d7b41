"""Rules in rows, OpenAI Batch lines and the configuration: what they change, and the errors of those that cannot be
followed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatBody
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as TextBody
from pydantic import TypeAdapter

from specbatch import LLM
from specbatch.config import DataSection
from specbatch.counts import SpeculationCounts
from specbatch.rows.tokenizer import TextProcessor
from specbatch.types import Completion, FinishReason, SamplingParams
from tests.stub_engine import StubTokenizer

A, B = 98, 99  # token ids of "a" and "b" in the tiny model, whose token 0 ends a text
PROMPT = {"prompt": "ab", "max_tokens": 12}
ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty must be > 0 and <= 100 (1 = off), not 0"),
    ({"presence_penalty": "1"}, "invalid_type", "presence_penalty must be a number >= -2 and <= 2 (0 = off), not '1'"),
    ({"presence_penalty": 3}, "invalid_value", "presence_penalty must be >= -2 and <= 2 (0 = off), not 3"),
    ({"frequency_penalty": -2.5}, "invalid_value", "frequency_penalty must be >= -2 and <= 2 (0 = off), not -2.5"),
    ({"min_tokens": -1}, "invalid_value", "min_tokens must be >= 0 and <= max_tokens, not -1"),
    ({"min_tokens": 13}, "invalid_value", "min_tokens must be <= max_tokens, which is 12, not 13"),
    ({"logit_bias": [1]}, "invalid_type", "logit_bias must map token ids to numbers, not [1]"),
    ({"logit_bias": {"a": 1}}, "invalid_value", "logit_bias must have token ids as keys, not 'a'"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias[5] must be >= -100 and <= 100, not 101"),
    ({"logit_bias": {"5": True}}, "invalid_type", "logit_bias[5] must be a number, not true"),
    ({"logit_bias": {"264": 1}}, "invalid_value", "logit_bias: 264 is not a token id (0 .. 263)"),
    ({"bad_words": [" "]}, "invalid_value", "bad_words[0] must have a visible character"),
    ({"bad_words": ["a\ud800"]}, "invalid_text", "bad_words[0] has U+D800 at character 1, which is not text"),
    ({"stop": "\ud800"}, "invalid_text", "stop[0] has U+D800 at character 0, which is not text"),
    ({"bad_words": [5]}, "invalid_type", "bad_words[0] must be text, not 5"),
    ({"bad_words": ["a" * 17]}, "invalid_value", "bad_words may have up to 16 tokens in a word, not 18"),
    ({"allowed_token_ids": []}, "invalid_value", "allowed_token_ids must not be empty"),
    ({"allowed_token_ids": [264]}, "invalid_value", "allowed_token_ids: 264 is not a token id (0 .. 263)"),
    ({"allowed_token_ids": ["a"]}, "invalid_type", "allowed_token_ids[0] must be an integer >= 0 and < 2^31, not 'a'"),
    ({"allowed_token_ids": [A], "bad_words": ["a"]}, "invalid_value",
     "no token is left to choose: allowed_token_ids and bad_words forbid all of them"),
    ({"allowed_token_ids": [0], "min_tokens": 1}, "invalid_value",
     "no token is left to choose: allowed_token_ids and min_tokens forbid all of them"),
    ({"prompt_logprobs": 21}, "invalid_value", "prompt_logprobs must be >= 0 and <= 20, not 21"),
    ({"prompt_logprobs_start": -1}, "invalid_value", "prompt_logprobs_start must be >= 0 and < 2^31, not -1"),
    ({"include_stop_str_in_output": 1}, "invalid_type", "include_stop_str_in_output must be true or false, not 1"),
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), method="ngram", kv_cache_tokens=1024, max_batch_size=4) as made:
        yield made


def batch_line(row: dict[str, Any]) -> dict[str, Any]:
    """The row as a chat of OpenAI Batch. A prompt runs as one, too."""
    fields = {name: value for name, value in row.items() if name != "prompt"}
    body = {"model": "m", "messages": [{"role": "user", "content": row["prompt"]}], **fields}
    return {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}


def test_errors_name_the_field_and_what_is_legal(llm: LLM) -> None:
    """The same in rows and in Batch lines; other rows run."""
    rows = [{**PROMPT, **fields} for fields, _, _ in ERRORS]
    for result, (_, type, message) in zip(llm.generate([*rows, PROMPT]), [*ERRORS, ({}, "", "")], strict=True):
        assert result.get("error") == ({"type": type, "message": message} if type else None)
    for result, (_, type, message) in zip(llm.generate(map(batch_line, rows)), ERRORS, strict=True):
        assert result["error"] == {"code": type, "message": message}


def test_an_error_while_it_runs_names_the_rules(llm: LLM) -> None:
    words = ["aa", "ab", "ba", "bb"]
    [result] = llm.generate([{**PROMPT, "allowed_token_ids": [A, B], "bad_words": words}])
    assert result["error"] == {
        "type": "no_token_left",
        "message": "no token is left to choose at token 2: allowed_token_ids and bad_words forbid all of them",
    }


def test_rules_of_rows_lines_and_the_configuration(llm: LLM, tiny_model: Path) -> None:
    fields = {
        "allowed_token_ids": [0, A, B, A + 2],
        "logit_bias": {"0": 50, str(A): 4.5},
        "bad_words": "aaa",
        "min_tokens": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
    }
    [row] = llm.generate([{**PROMPT, **fields}])
    assert (row["finish_reason"], row["usage"]["completion_tokens"]) == ("stop", 8)
    assert set(row["text"]) <= set("abc")
    assert len(row["text"]) == 7
    assert "aaa" not in row["text"]
    [line] = llm.generate([batch_line({**PROMPT, **fields})])
    assert line["response"]["body"]["choices"][0]["message"]["content"] == row["text"]
    with LLM(str(tiny_model), method="none", kv_cache_tokens=1024, **fields) as configured:
        assert configured.generate([PROMPT])[0]["text"] == row["text"]
    neutral = {"logit_bias": {}, "bad_words": [], "presence_penalty": 0, "repetition_penalty": 1.0, "min_tokens": 0}
    plain, same = (result["text"] for result in llm.generate([PROMPT, {**PROMPT, **neutral}]))
    assert plain == same


@pytest.mark.parametrize(("body", "prompt"), [(ChatBody, {"messages": [{"role": "user", "content": "hi"}]}),
                                               (TextBody, {"prompt": "hi"})])  # fmt: skip
def test_bodies_are_those_of_openai(body: Any, prompt: dict[str, Any]) -> None:
    fields = {"logit_bias": {"5": 3, "7": -100}, "presence_penalty": 0.5, "frequency_penalty": -2.0}
    TypeAdapter(body).validate_python({"model": "m", **prompt, **fields}, strict=True)


@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "kept"),
    [
        ("xaxbxcx", "x", 0, "|x"),
        ("xaxbxcx", "x", 1, "xa|x"),
        ("xaxbxcx", "x", 3, "xaxb|x"),
        ("abcabcabc", "bca", 0, "a|bca"),
        ("abcabcabc", "bca", 3, "a|bca"),  # its last token is the fourth
        ("abcabcabc", "bca", 4, "abca|bca"),
        ("abcabcabc", ("ca", "abcab"), 4, "|abcab"),
    ],
)
def test_stop_strings_and_min_tokens(text: str, stop: str | tuple[str, ...], min_tokens: int, kept: str) -> None:
    """A stop string that the first tokens complete ends nothing. `kept`: the text before and of the stop string."""
    stops = (stop,) if isinstance(stop, str) else stop
    texts, ids = TextProcessor(StubTokenizer(), DataSection()), [*text.encode()]
    for include in (False, True):
        params = SamplingParams(stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
        check = texts.stop_check(params)
        assert check is not None
        end = next(found for n in range(1, len(ids) + 1) if (found := check(ids[:n], 0, 1)) is not None)
        assert end == check(ids, 0, len(ids)) == len(kept) - 1
        completion = Completion(0, ids[:end], FinishReason.STOP, None, SpeculationCounts())
        assert texts.final_text(completion, params) == (kept.replace("|", "") if include else kept.split("|")[0])


def test_a_stop_token_stays_on_request(llm: LLM) -> None:
    rows = [{**PROMPT, "allowed_token_ids": [A], "stop_token_ids": [A], "include_stop_str_in_output": keep} for keep in
            (False, True)]  # fmt: skip
    assert [result["text"] for result in llm.generate(rows)] == ["", "a"]


def test_log_probabilities_of_prompt_tokens(llm: LLM) -> None:
    """In rows and in Batch lines; the rows before and after have none."""
    rows = [PROMPT, {**PROMPT, "prompt_logprobs": 2, "n": 2, "temperature": 1}, PROMPT]
    plain, scored, _ = llm.generate(rows)
    assert "prompt_logprobs" not in plain
    entries = scored["prompt_logprobs"]
    assert len(entries) == scored["usage"]["prompt_tokens"]
    assert entries[0] is None
    assert "".join(entry["token"] for entry in entries[1:]) == "ser: ab\nassistant: "
    for entry in entries[1:]:
        assert set(entry) == {"token", "token_id", "logprob", "top"}
        assert entry["logprob"] <= entry["top"][0]["logprob"] < 0
        assert len(entry["top"]) == 2
    [line] = llm.generate([batch_line(rows[1])])
    assert line["response"]["body"]["prompt_logprobs"] == entries
    [late] = llm.generate([{**rows[1], "prompt_logprobs_start": 5, "prompt_logprobs": 0}])
    assert late["prompt_logprobs"] == [{**entry, "top": []} for entry in entries[5:]]
