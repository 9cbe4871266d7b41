"""The completions of one row: samples of their own, and each with its own end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbatch import LLM

A, B = 98, 99  # token ids of "a" and "b" in the tiny model
ENGINE: dict[str, Any] = {"method": "ngram", "kv_cache_tokens": 1024, "max_batch_size": 4}
SAMPLED = {"prompt": "ab", "max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
# After "a" comes nothing: a completion ends well if it is all "b".
SOME_FAIL = {
    **{"prompt": "ab", "max_tokens": 2, "temperature": 1.0, "n": 6, "seed": 1, "logprobs": 0, "prompt_logprobs": 0},
    **{"allowed_token_ids": [A, B], "bad_words": ["aa", "ab"]},
}
ERROR = {
    "type": "no_token_left",
    "message": "no token is left to choose at token 2 of completion {} of 6: allowed_token_ids and bad_words forbid "
    "all of them",
}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), **ENGINE) as made:
        yield made


def texts_of(line: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in line.get("choices", [line])]


@pytest.mark.parametrize("seed", [{"seed": 7}, {}])
def test_each_completion_is_a_sample_of_its_own(llm: LLM, seed: dict[str, int]) -> None:
    """The first one is that of a row with n = 1. A row with its own seed has the same ones at any place."""
    several = {**SAMPLED, **seed, "n": 5}
    first, again, other = llm.generate([several, several, {**several, "seed": 8}])
    assert len(set(texts_of(first))) == 5
    assert (texts_of(first) == texts_of(again)) is bool(seed)
    assert not set(texts_of(first)) & set(texts_of(other))
    [single] = llm.generate([{**several, "n": 1}])
    assert texts_of(single) == texts_of(first)[:1]
    [fewer] = llm.generate([{**several, "n": 3}])
    assert texts_of(fewer) == texts_of(first)[:3]


def test_completions_that_finished_are_kept(llm: LLM) -> None:
    """The row counts as failed, and each completion that failed has its error."""
    [line] = llm.generate([{**SOME_FAIL, "note": 1}])
    finished = [i for i, choice in enumerate(line["choices"]) if "error" not in choice]
    failed = [i for i in range(6) if i not in finished]
    assert finished
    assert failed
    for i, choice in enumerate(line["choices"]):
        assert choice["index"] == i
        if i in finished:
            assert (choice["text"][0], choice["finish_reason"]) == ("b", "length")
            assert len(choice["logprobs"]) == 2
        else:
            assert (choice["text"], choice["finish_reason"]) == (None, "error")
            assert choice["error"] == {**ERROR, "message": ERROR["message"].format(i + 1)}
    assert (line["text"], line["finish_reason"], line["metadata"]) == (None, "error", {"note": 1})
    assert line["error"] == line["choices"][failed[0]]["error"]
    assert "logprobs" not in line
    assert line["usage"]["completion_tokens"] == 2 * len(finished)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_completions_of_batch_lines_that_finished_are_kept(llm: LLM, api: str) -> None:
    chat = api == "chat"
    body = {**SOME_FAIL, "model": "m", "logprobs": True if chat else 0}
    body |= {"messages": [{"role": "user", "content": body.pop("prompt")}]} if chat else {}
    url = "/v1/chat/completions" if chat else "/v1/completions"
    [line] = llm.generate([{"custom_id": "c", "method": "POST", "url": url, "body": body}])
    choices = line["response"]["body"]["choices"]
    texts = [choice["message"]["content"] if chat else choice["text"] for choice in choices]
    failed = [i for i, text in enumerate(texts) if text is None]
    assert 0 < len(failed) < 6
    for i, choice in enumerate(choices):
        assert (choice["finish_reason"] == "error") is (i in failed) is (choice["logprobs"] is None)
        code = {"code": ERROR["type"], "message": ERROR["message"].format(i + 1)}
        assert choice.get("error") == (code if i in failed else None)
    assert line["error"] == choices[failed[0]]["error"]
