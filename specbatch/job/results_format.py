"""The native result line: its fields, in their order. Nothing in it depends on scheduling or timing.

    {"id", "index", "text", "finish_reason", "usage": {"prompt_tokens", "completion_tokens"}, "speculation": {...},
     "logprobs": [...] where asked for, "choices": [...] where n > 1, "metadata": {...} where there is some}

With n > 1, text, finish_reason and logprobs are those of choice 0; usage and speculation are sums. A failed row has
text null, finish_reason "error" and `error: {type, message}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specbatch.errors import RowError
from specbatch.types import FinishReason, SpeculationCounts, TokenLogprob

LOWEST_LOGPROB = -9999.0  # means minus infinity, which JSON lacks; the value is OpenAI's


class TokenTexts(Protocol):
    """Texts of single tokens, for logprobs."""

    def token_text(self, token_id: int) -> str: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """One completion with its final text."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    speculation: SpeculationCounts


def native_result(
    index: int,
    id: Any,
    metadata: Any,
    prompt_tokens: int,
    choices: Sequence[Choice],
    texts: TokenTexts,
    *,
    simulated: bool = False,
) -> dict[str, Any]:
    """The result line of a row that ran. `simulated`: with speculation.simulate_acceptance, its drafts were accepted by
    lot."""
    first = choices[0]
    row: dict[str, Any] = {
        "id": id,
        "index": index,
        "text": first.text,
        "finish_reason": str(first.finish_reason),
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sum(len(c.token_ids) for c in choices),
        },
        "speculation": speculation_dict(sum_speculation(choices), simulated),
    }
    if first.logprobs is not None:
        row["logprobs"] = _logprobs(first.logprobs, texts)
    if len(choices) > 1:
        row["choices"] = [_choice(i, choice, texts, simulated) for i, choice in enumerate(choices)]
    if metadata is not None:
        row["metadata"] = metadata
    return row


def native_error(index: int, id: Any, metadata: Any, error: RowError) -> dict[str, Any]:
    """The result line of a row that could not be run."""
    row: dict[str, Any] = {
        "id": id,
        "index": index,
        "text": None,
        "finish_reason": "error",
        "error": {"type": error.type, "message": error.message},
    }
    if metadata is not None:
        row["metadata"] = metadata
    return row


def sum_speculation(choices: Sequence[Choice]) -> SpeculationCounts:
    total = SpeculationCounts()
    for choice in choices:
        total.add(choice.speculation)
    return total


def speculation_dict(counts: SpeculationCounts, simulated: bool) -> dict[str, Any]:
    """acceptance_length = tokens committed per round; accept_histogram[a] = rounds that kept `a` draft tokens.
    `simulated` is there only where it is true: the text is no answer of the model then."""
    length = counts.acceptance_length
    mark = {"simulated": True} if simulated else {}
    return {
        **mark,
        "rounds": counts.rounds,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "acceptance_length": None if length is None else round(length, 4),
        "accept_histogram": list(counts.histogram),
    }


def _choice(i: int, choice: Choice, texts: TokenTexts, simulated: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "index": i,
        "text": choice.text,
        "finish_reason": str(choice.finish_reason),
        "usage": {"completion_tokens": len(choice.token_ids)},
        "speculation": speculation_dict(choice.speculation, simulated),
    }
    if choice.logprobs is not None:
        entry["logprobs"] = _logprobs(choice.logprobs, texts)
    return entry


def _logprobs(logprobs: Sequence[TokenLogprob], texts: TokenTexts) -> list[dict[str, Any]]:
    return [
        {**_logprob(lp.token_id, lp.logprob, texts), "top": [_logprob(t, value, texts) for t, value in lp.top]}
        for lp in logprobs
    ]


def _logprob(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    return {"token": texts.token_text(token_id), "token_id": token_id, "logprob": max(logprob, LOWEST_LOGPROB)}
