"""Rows that score choices: the sums of the log-probabilities of each choice's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbatch import LLM
from specbatch.rows.choice_scoring import ChoiceTokens, tokens_of_ids, tokens_of_text

CHOICES = [" yes", " no", "!"]
ERRORS: list[tuple[dict[str, Any], str, str]] = [
    ({"score_choices": "a"}, "invalid_type", "score_choices must be a list of texts, not text"),
    ({"score_choices": []}, "invalid_value", "score_choices must have 1 to 1024 texts, not 0"),
    ({"score_choices": ["a", 5]}, "invalid_type", "score_choices[1] must be a text, not a number"),
    ({"score_choices": [""]}, "invalid_value", "score_choices[0] must be a text that is not empty"),
    ({"score_choices": ["a"], "n": 2}, "invalid_value",
     "n, logprobs and prompt_logprobs have no effect on a row with score_choices"),
    ({"score_choices": ["x" * 3000]}, "prompt_too_long",
     "score_choices[0]: the prompt has 3020 tokens, more than the 1017 that fit"),
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model), method="ngram", kv_cache_tokens=1024, max_batch_size=3, page_size=4) as made:
        yield made


def test_the_sum_over_the_tokens_of_each_choice(llm: LLM) -> None:
    """As a row with the whole text says it. The others of the file generate."""
    rows = [{"prompt": "is it?", "id": 7, "score_choices": CHOICES, "note": 1}, {"prompt": "x", "max_tokens": 3}]
    scored, generated = llm.generate(rows)
    assert "choice_scores" not in generated
    assert generated["usage"]["completion_tokens"] == 3
    assert (scored["id"], scored["metadata"], scored["finish_reason"]) == (7, {"note": 1}, "stop")
    assert scored["usage"]["completion_tokens"] == 0
    # The prompt runs as a chat, which ends with a space: that is part of the choice.
    context = "user: is it?\nassistant:"
    whole = [{"prompt_token_ids": [*(context + " " + c).encode("utf-8")], "max_tokens": 1} for c in CHOICES]
    for row in whole:
        row["prompt_token_ids"] = [byte + 1 for byte in row["prompt_token_ids"]]  # token 0 ends a text
    expected = [
        r["prompt_logprobs"][len(context) :] for r in llm.generate([{**r, "prompt_logprobs": 0} for r in whole])
    ]
    for score, choice, entries in zip(scored["choice_scores"], CHOICES, expected, strict=True):
        assert score["text"] == choice
        assert score["num_tokens"] == len(entries) == len(choice) + 1
        assert score["logprob"] == pytest.approx(sum(entry["logprob"] for entry in entries), abs=1e-4)
    best = max(scored["choice_scores"], key=lambda score: score["logprob"])
    assert scored["text"] == best["text"]
    ids = [byte + 1 for byte in (context + " ").encode()]
    [by_ids] = llm.generate([{"prompt_token_ids": ids, "score_choices": CHOICES}])
    assert [score["num_tokens"] for score in by_ids["choice_scores"]] == [len(choice) for choice in CHOICES]


def test_errors(llm: LLM) -> None:
    for result, (_, type, message) in zip(
        llm.generate([{"prompt": "ab", **fields} for fields, _, _ in ERRORS]), ERRORS, strict=True
    ):
        assert result["error"] == {"type": type, "message": message}


def words(texts: list[str]) -> list[list[int]]:
    """A token for each word with the space before it."""
    return [[len(word) for word in text.replace(" ", "| ").split("|") if word] for text in texts]


def test_white_space_at_the_end_of_a_prompt_belongs_to_the_choice() -> None:
    assert tokens_of_text("a bb ", ["ccc", "d e"], words) == [
        ChoiceTokens([1, 3, 4], 2),
        ChoiceTokens([1, 3, 2, 2], 2),
    ]
    assert tokens_of_ids([9, 9], [" ccc"], words) == [ChoiceTokens([9, 9, 4], 2)]
    assert [one.is_scored for one in tokens_of_text("a", [" b", "b"], words)] == [True, False]


def test_a_choice_without_a_score_leaves_the_others_theirs(llm: LLM) -> None:
    """The row counts as failed, and has no likeliest choice."""
    bad = {"": "invalid_value", "x" * 3000: "prompt_too_long", "\ud800": "invalid_text"}
    mixed: dict[str, Any] = {"prompt": "is it?", "score_choices": [" yes", *bad, " no"], "note": 1}
    found, expected = llm.generate([mixed, {"prompt": "is it?", "score_choices": [" yes", " no"]}])
    first, *failed, last = found["choice_scores"]
    assert [first, last] == expected["choice_scores"]
    assert [(one["logprob"], one["num_tokens"], one["error"]["type"]) for one in failed] == [
        (None, 0, type) for type in bad.values()
    ]
    assert [one["error"]["message"][:16] for one in failed] == [f"score_choices[{i}]" for i in (1, 2, 3)]
    assert (found["text"], found["finish_reason"], found["error"]) == (None, "error", failed[0]["error"])
    assert found["metadata"] == {"note": 1}
