"""The corpus of tokens that all rows share: the words of its table, and the estimates that they lead to.

The table predicts a token from the tokens before it. Each word is one prediction: after a *context*, which is the last
12, 6, 3 or 2 tokens of a text, comes this token. A hash of the context says where its word is. A word that another
context needs is overwritten, so the size of the table is bounded, and old texts leave it by and by.

A word has a score, which rises each time its token comes after the context, and falls each time another one does. The
token is replaced when the score is 0. So a word predicts what came mostly, and lately (Boyer and Moore 1981).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SIZES = (2, 3, 6, 12)  # the sizes of contexts, in tokens; the largest one that has a word predicts
MAX_SIZE = SIZES[-1]
# Bits of a word, from the lowest: whether it comes from a file, the token, the score, and the rest of the context's
# hash, which differs for other contexts of the same place. An empty word is 0.
LOADED = 1
TOKEN_SHIFT, TOKEN_BITS = 1, 20
SCORE_SHIFT, SCORE_BITS = 21, 3
CHECK_SHIFT, CHECK_BITS = 24, 38
HASH_SHIFT = 26  # the check is the hash without its lowest bits
MAX_SCORE = (1 << SCORE_BITS) - 1
FACTOR, MIXER = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd numbers with random bits
_DOUBT = 0.7  # share of predictions that hold although another token has just come after the context


@cache
def _estimates() -> tuple[tuple[float, ...], ...]:
    def estimate(size: int, score: int) -> float:
        after_match = size / (size + 1)
        if score == 0:
            return _DOUBT * after_match
        return (score - 1 + 2 * after_match) / (score + 1)

    return tuple(tuple(estimate(size, score) for score in range(MAX_SCORE + 1)) for size in SIZES)


def word_estimates(device: torch.device) -> Tensor:
    """(sizes, scores) float32: the estimated probability that a prediction is right, by the size of its context and the
    score. It is m / (m + 1) after m tokens that were seen once, and higher the more often it was right."""
    return torch.tensor(_estimates(), dtype=torch.float32, device=device)


def match_estimates(max_match: int, max_drafts: int, device: torch.device) -> Tensor:
    """(max_match + 1, max_drafts) float32: the estimated probability that all of the first d drafts are right that
    follow an earlier occurrence of the last m tokens: m / (m + d). It is the product of the estimates for matches of m,
    m + 1, ... tokens that were seen once."""
    matched = torch.arange(max_match + 1, dtype=torch.float32, device=device)[:, None]
    return matched / (matched + torch.arange(1, max_drafts + 1, dtype=torch.float32, device=device))
