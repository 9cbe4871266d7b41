"""The time that a GPU saves if it reads what sequences share once for all of them.

Fitted to `scripts/bench/bench_cascade.py` on an H200, 28 cases at the sizes of Llama-3-8B
(docs/bench/2026-11-23-h200-cascade.json): the gain of a layer is off by 5% of the time without cascade on average, by
21% at most. With the margin, no case is taken that loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_CACHED_BYTES_PER_US = 9.6e6  # of keys and values that are read again, from the second-level cache
_UNCACHED_BYTES_PER_US = 4.7e6  # where what all groups share does not fit into this cache
_CACHE_BYTES = 40e6
_FLOP_PER_US = 4.6e8  # of the shared part
_ELEMENTS_PER_US = 1.9e5  # of sums, which are stored and merged
_FIXED_US, _MARGIN_US = 12.6, 7.4


@dataclass(frozen=True, slots=True)
class CascadeCosts:
    """Of a layer. `token_bytes`: of its keys and values."""

    num_heads: int
    head_dim: int
    token_bytes: int

    def gains_us(self, sizes: NDArray[np.int64], tokens: NDArray[np.int64], num_queries: int) -> NDArray[np.float64]:
        """Of groups of `sizes` sequences with `num_queries` new tokens each, without what a launch costs."""
        shared_bytes = float(tokens.sum()) * self.token_bytes
        rate = _CACHED_BYTES_PER_US if shared_bytes <= _CACHE_BYTES else _UNCACHED_BYTES_PER_US
        elements = sizes * (num_queries * self.num_heads * self.head_dim)
        saved = (sizes - 1) * tokens * (self.token_bytes / rate)
        gains: NDArray[np.float64] = saved - 4 * elements * tokens / _FLOP_PER_US - elements / _ELEMENTS_PER_US
        return gains

    def chosen(self, sizes: Sequence[int], tokens: Sequence[int], num_queries: int) -> NDArray[np.bool_]:
        """Which groups of a batch to read once; none, where all of them gain less than a launch costs."""
        gains = self.gains_us(np.array(sizes, np.int64), np.array(tokens, np.int64), num_queries)
        pays: NDArray[np.bool_] = gains > 0
        return pays if gains[pays].sum() > _FIXED_US + _MARGIN_US else np.zeros_like(pays)

    def min_batch(self, shared_tokens: int, num_queries: int, sizes: Sequence[int]) -> int | None:
        """The first of these sizes (ascending) of a batch that gains where all of it shares as many tokens; None: none
        does."""
        return next((size for size in sizes if self.chosen([size], [shared_tokens], num_queries).any()), None)
