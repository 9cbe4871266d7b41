"""The number of nodes that a round verifies, if its chains share a budget.

A draft is worth verifying if it is accepted with a probability of more than the tokens that could be made in the time
that its verification takes. This is the *threshold*. It depends on the size of the batch alone: few tokens are verified
in the time in which a GPU reads its weights, and cost nearly nothing; of many tokens, each costs as much as the others.

Rounds report how many nodes were likely enough, whether they were verified or not. Their mean is the budget. It is
rounded to one of a few steps, because each needs CUDA graphs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Nodes for each request.
_STEPS = (1.125, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0)
_REMEMBERED = 4096  # requests' rounds of which the mean is taken
_TYPICAL = 2.2  # nodes, and also tokens, of a request's round, for the threshold


@dataclass
class VerifyBudget:
    """The budget of rounds. `nodes`: nodes for each request on average, the root included; None: the mean number of
    likely nodes, as far as it is known."""

    nodes: float | None
    _mean: float = 0.0
    _count: float = 0.0

    @property
    def changes(self) -> bool:
        return self.nodes is None

    def record(self, num_likely: np.ndarray) -> None:
        """Take note of the likely nodes of the requests of a round; 0: it was not found out."""
        known = num_likely[num_likely > 0]
        if len(known):
            self._count = min(_REMEMBERED, self._count + len(known))
            self._mean += len(known) / self._count * (float(known.mean()) - self._mean)

    def num_verified(self, size: int, num_nodes: int) -> int | None:
        """Return the number of nodes that a round of `size` requests, padding included, verifies; None: all, which are
        `num_nodes` for each request."""
        nodes = self.nodes
        if nodes is None:
            if not self._count:
                return None
            nodes = next((step for step in _STEPS if step >= self._mean), math.inf)
        return math.ceil(nodes * size) if nodes <= num_nodes - 0.25 else None


def thresholds(measured: Sequence[tuple[int, int, float]]) -> dict[int, float]:
    """Return the least probability of a draft that is worth verifying, by size of a batch. `measured`: the size, the
    nodes of each chain, and milliseconds of rounds that verify all nodes."""
    by_tokens = sorted((size * nodes, ms) for size, nodes, ms in measured)
    tokens, times = np.array([count for count, _ in by_tokens]), np.array([ms for _, ms in by_tokens])
    times = np.maximum.accumulate(times)  # more tokens take no less time
    found = {}
    for size, _, _ in measured:
        typical = _TYPICAL * size
        low, high = max(typical / 1.5, tokens[0]), min(1.5 * typical, tokens[-1])
        slope = np.diff(np.interp([low, high], tokens, times))[0] / (high - low) if high > low else 0.0
        found[size] = min(1.0, float(slope * typical / np.interp(typical, tokens, times)))
    return found
