"""The time that a GPU saves if it reads the pages that sequences share once for all of them.

The model is fitted to `scripts/bench/bench_cascade.py` on an H200, 28 cases at the sizes of Llama-3-8B
(docs/bench/2026-11-23-h200-cascade.json). Its error for the gain of a layer is 5% of the time without cascade on
average, and 21% at most. With the margin, it chooses no case that is slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_CACHED_BYTES_PER_US = 9.6e6  # keys and values that are read again, from the second-level cache
_UNCACHED_BYTES_PER_US = 4.7e6  # the same, if the shared keys and values of all groups do not fit into this cache
_CACHE_BYTES = 40e6
_FLOP_PER_US = 4.6e8  # operations of the shared part
_ELEMENTS_PER_US = 1.9e5  # elements of sums, which are stored and merged
_FIXED_US, _MARGIN_US = 12.6, 7.4


@dataclass(frozen=True, slots=True)
class CascadeCosts:
    """The costs of one layer. `token_bytes`: the bytes of a token's keys and values in it."""

    num_heads: int
    head_dim: int
    token_bytes: int

    def gains_us(self, sizes: NDArray[np.int64], tokens: NDArray[np.int64], num_queries: int) -> NDArray[np.float64]:
        """Compute the time that each group saves, without the cost of a launch. Group i has `sizes[i]` sequences, which
        share `tokens[i]` tokens and have `num_queries` new tokens each."""
        shared_bytes = float(tokens.sum()) * self.token_bytes
        rate = _CACHED_BYTES_PER_US if shared_bytes <= _CACHE_BYTES else _UNCACHED_BYTES_PER_US
        elements = sizes * (num_queries * self.num_heads * self.head_dim)
        saved = (sizes - 1) * tokens * (self.token_bytes / rate)
        gains: NDArray[np.float64] = saved - 4 * elements * tokens / _FLOP_PER_US - elements / _ELEMENTS_PER_US
        return gains

    def chosen(self, sizes: Sequence[int], tokens: Sequence[int], num_queries: int) -> NDArray[np.bool_]:
        """Choose the groups of a batch whose shared pages are read once. No group is chosen if together they gain less
        than a launch costs."""
        gains = self.gains_us(np.array(sizes, np.int64), np.array(tokens, np.int64), num_queries)
        pays: NDArray[np.bool_] = gains > 0
        return pays if gains[pays].sum() > _FIXED_US + _MARGIN_US else np.zeros_like(pays)

    def min_batch(self, shared_tokens: int, num_queries: int, sizes: Sequence[int]) -> int | None:
        """Return the first batch size of `sizes` (ascending) that gains if all its sequences share `shared_tokens`
        tokens. Return None if no size gains."""
        return next((size for size in sizes if self.chosen([size], [shared_tokens], num_queries).any()), None)
