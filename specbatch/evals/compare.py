"""With and without speculation: where the texts part, and by how little.

Greedy texts are the same token for token where arithmetic is exact. Elsewhere (bfloat16, another batch) two tokens that
are about equally probable may change places; how much closer than any accident they were is what `margin` tells.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_BEFORE = 8  # tokens by which texts can differ later than tokens do
LOGPROBS = 5  # of the rows that are run again: where three tokens are about equally probable, the third is one of them


@dataclass(frozen=True)
class Difference:
    """Of one row. `token`: the first one that differs, from 0; `margin`: between the logarithms of the probabilities,
    without speculation, of the token that was taken there and of the one that leads to the other text (or where none
    of those known does, the likeliest that was not taken). None where running the row again gave the other text."""

    index: int
    id: Any
    token: int | None
    margin: float | None
    tokens: tuple[str, ...] = ()  # the two; of equals the one that was taken need not be the first of the likeliest


def differing_rows(results: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[int]:
    """Rows that both have answered, and not with the same text."""
    pairs = enumerate(zip(results, others, strict=True))
    return [i for i, (a, b) in pairs if "error" not in a and "error" not in b and a["text"] != b["text"]]


def difference(index: int, text: str, plain: Mapping[str, Any], decode: Callable[[Sequence[int]], str]) -> Difference:
    """Where `text` leaves `plain`, the row's result without speculation, run with LOGPROBS."""
    logprobs = plain.get("logprobs", ())  # none of a row that failed this time
    ids = [entry["token_id"] for entry in logprobs]
    if plain["text"] == text or not ids:
        return Difference(index, plain["id"], None, None)
    # Tokens in common are a beginning: once a token differs, no longer text is the beginning of the other.
    lengths = range(1, len(ids) + 1)
    common = bisect.bisect_left(lengths, 1, key=lambda n: int(not text.startswith(decode(ids[:n]).rstrip("\ufffd"))))
    last = min(common, len(ids) - 1)  # the last one if `text` only continues after it
    # Or tokens part before texts do: " the" begins " theory". A likely token that leads past what the texts have in
    # common tells where that was; one that does not, " " where both go on with " $", may be likely for itself.
    places = range(last, max(last - _MOST_BEFORE, -1), -1)
    others = ((n, other) for n in places for other in _others(logprobs[n]))
    shared = decode(ids[:last])
    found = (pair for pair in others if _leads_past(shared, text, decode([*ids[: pair[0]], pair[1]["token_id"]])))
    token, other = next(found, (last, _others(logprobs[last])[0]))
    taken = logprobs[token]
    margin = round(abs(taken["logprob"] - other["logprob"]), 6)
    return Difference(index, plain["id"], token, margin, (taken["token"], other["token"]))


def _others(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Of the likeliest tokens those that were not taken."""
    return [top for top in entry["top"] if top["token_id"] != entry["token_id"]]


def _leads_past(shared: str, text: str, other: str) -> bool:
    """Whether `text` continues after `shared`, or ends, as `other` does."""
    return other == text or (len(other) > len(shared) and text.startswith(other))
