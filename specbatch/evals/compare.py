"""Comparison with plain decoding: the first token that differs, and the logit margin there.

Greedy texts are the same token for token if arithmetic is exact. Otherwise (bfloat16, another batch) rounding can swap
two tokens that are about equally probable: the margin between them is then small.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_BEFORE = 8  # tokens by which texts can differ later than tokens do
LOGPROBS = 5  # log-probabilities per token of rows that run again: enough if three tokens are about equally probable


@dataclass(frozen=True)
class Difference:
    """The difference of one row. `token`: the first one that differs, from 0. `margin`: the difference in nats of two
    log-probabilities in plain decoding, that of the token chosen there and that of the token that leads to the other
    text (or, if none of the known ones does, of the likeliest other one). Both are None if the row, run again, gave the
    other text."""

    index: int
    id: Any
    token: int | None
    margin: float | None
    tokens: tuple[str, ...] = ()  # the two; of equally likely ones the chosen one is not always listed first


def differing_rows(results: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[int]:
    """Rows that both have answered, and not with the same text."""
    pairs = enumerate(zip(results, others, strict=True))
    return [i for i, (a, b) in pairs if "error" not in a and "error" not in b and _texts(a) != _texts(b)]


def _texts(result: Mapping[str, Any]) -> tuple[str, str]:
    return result.get("reasoning_content", ""), result["text"]


def _as_written(result: Mapping[str, Any], plain: Mapping[str, Any], raw: str) -> str:
    """`result` as text with the marks around its reasoning, up to where it differs from `raw`, the text of `plain`."""
    (thought, text), (plain_thought, plain_text) = _texts(result), _texts(plain)
    begin = raw.find(plain_thought)
    if thought != plain_thought:
        return raw[:begin] + thought
    return raw[: raw.find(plain_text, begin + len(thought))] + text


def difference(
    index: int, result: Mapping[str, Any], plain: Mapping[str, Any], decode: Callable[[Sequence[int]], str]
) -> Difference:
    """Find the position where `result` differs from `plain`, the row's result without speculation, run with
    LOGPROBS."""
    logprobs = plain.get("logprobs", ())  # a row that failed this time has none
    ids = [entry["token_id"] for entry in logprobs]
    if _texts(plain) == _texts(result) or not ids:
        return Difference(index, plain["id"], None, None)
    text = _as_written(result, plain, decode(ids))
    # Tokens in common are a beginning: once a token differs, no longer text is the beginning of the other.
    lengths = range(1, len(ids) + 1)
    common = bisect.bisect_left(lengths, 1, key=lambda n: int(not text.startswith(decode(ids[:n]).rstrip("\ufffd"))))
    last = min(common, len(ids) - 1)  # the last one if `text` only continues after it
    # Tokens can differ earlier than texts do: " the" begins " theory". A likely token that leads past the common text
    # shows where. One that does not, such as " " where both continue with " $", can be likely for another reason.
    positions = range(last, max(last - _MAX_BEFORE, -1), -1)
    others = ((n, other) for n in positions for other in _others(logprobs[n]))
    shared = decode(ids[:last])
    found = (pair for pair in others if _leads_past(shared, text, decode([*ids[: pair[0]], pair[1]["token_id"]])))
    token, other = next(found, (last, _others(logprobs[last])[0]))
    taken = logprobs[token]
    margin = round(abs(taken["logprob"] - other["logprob"]), 6)
    return Difference(index, plain["id"], token, margin, (taken["token"], other["token"]))


def _others(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The likeliest tokens without the chosen one."""
    return [top for top in entry["top"] if top["token_id"] != entry["token_id"]]


def _leads_past(shared: str, text: str, other: str) -> bool:
    """Return whether `text` continues after `shared`, or ends, as `other` does."""
    return other == text or (len(other) > len(shared) and text.startswith(other))
