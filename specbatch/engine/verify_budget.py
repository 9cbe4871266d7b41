"""The number of nodes that a round verifies, if its chains share a budget.

A draft is worth verifying if the probability that it is accepted is larger than the number of tokens that could be made
in the time that its verification takes. This is the *threshold*: the time of a node, by what was measured at the start,
times the tokens that rounds make now in the time that they take. Few nodes cost nearly nothing, because a GPU reads its
weights in any case; of many, each costs as much as the others.

Rounds report how many nodes were likely enough, whether they were verified or not. Their mean is the budget, which
`budget_graphs` rounds to what CUDA graphs there are. All of this follows from what rounds report and from times that
ranks agree on, so all ranks decide alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specbatch.batch import Output

_REMEMBERED = 2048  # requests' rounds of which means are taken
_LEAST = 1e-30  # the least threshold
_DUE = 8  # rounds after which thresholds are computed anew


@dataclass(frozen=True)
class RoundTimes:
    """The times of rounds by the number of their nodes, both ascending. They were measured without cached tokens. A
    round whose chains share a budget takes `ms_of_sharing` more for each request. Shape suffix: S sizes of batches."""

    num_nodes: Sequence[int]
    milliseconds: Sequence[float]
    ms_per_cached_token: float
    ms_of_sharing: float = 0.0

    @staticmethod
    def measured(measured: Sequence[tuple[int, int, float]], ms_per_cached_token: float) -> RoundTimes:
        """Make them of rounds that verify all nodes: size of the batch, nodes, milliseconds."""
        by_nodes = sorted((nodes, ms) for _, nodes, ms in measured)
        rising = np.maximum.accumulate([ms for _, ms in by_nodes])  # more nodes take no less time
        return RoundTimes([count for count, _ in by_nodes], rising.tolist(), ms_per_cached_token)

    def with_sharing(self, measured: Sequence[tuple[int, int, float]]) -> RoundTimes:
        """Take note of rounds whose chains share a budget: size of the batch, nodes, milliseconds."""
        more = [(ms - self.of(size, nodes)) / size for size, nodes, ms in measured]
        return replace(self, ms_of_sharing=max(0.0, statistics.median(more)) if more else 0.0)

    def of(self, size: int, num_nodes: int, *, shares: bool = False) -> float:
        """Return the milliseconds of a round. `size`: that of its batch. `shares`: its chains share a budget."""
        return float(np.interp(num_nodes, self.num_nodes, self.milliseconds)) + shares * self.ms_of_sharing * size

    def at(self, num_nodes_S: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.interp(num_nodes_S, self.num_nodes, self.milliseconds)
        return found

    def of_node(self, num_nodes_S: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the milliseconds that each further node takes in rounds of about these numbers."""
        low, high = np.maximum(num_nodes_S / 1.5, self.num_nodes[0]), np.minimum(1.5 * num_nodes_S, self.num_nodes[-1])
        difference = np.maximum(high - low, 1e-9)
        return np.where(high > low, (self.at(high) - self.at(low)) / difference, 0.0)


@dataclass
class VerifyBudget:
    """The budget of rounds. `nodes`: nodes for each request on average, the root included; None: the mean number of
    likely nodes, as far as it is known. `times`: what thresholds are computed from, if the budget changes."""

    nodes: float | None
    times: RoundTimes | None = None
    _count: float = 0.0
    _likely: float = 0.0  # means of a request's round: likely nodes, nodes and new tokens
    _verified: float = 2.0
    _tokens: float = 1.5
    _rounds: int = 0

    @property
    def changes(self) -> bool:
        return self.nodes is None

    def record(self, output_BZ: NDArray[np.int32]) -> bool:
        """Take note of the output of a round (see `Output`). Return whether thresholds are due."""
        known = output_BZ[(output_BZ[:, Output.NUM_NEW] > 0) & (output_BZ[:, Output.NUM_LIKELY] > 0)]
        if not len(known):
            return False
        self._count = min(_REMEMBERED, self._count + len(known))
        share = len(known) / self._count
        tokens, drafts, likely = known[:, [Output.NUM_NEW, Output.NUM_DRAFTED, Output.NUM_LIKELY]].mean(axis=0)
        self._tokens += share * (float(tokens) - self._tokens)
        self._verified += share * (1.0 + float(drafts) - self._verified)
        self._likely += share * (float(likely) - self._likely)
        self._rounds += 1
        return self._rounds % _DUE == 0

    def num_verified(self, size: int, num_nodes: int) -> int | None:
        """Return the number of nodes that a round of `size` requests, padding included, verifies; None: all, which are
        `num_nodes` for each request, or as many as `likely` says."""
        if self.nodes is None or self.nodes > num_nodes - 0.25:
            return None
        return math.ceil(self.nodes * size)

    @property
    def likely(self) -> float:
        """Return the mean number of a request's nodes that are likely enough. Infinite: nothing is known yet."""
        return self._likely if self._count else math.inf

    def thresholds(self, num_sizes: int, cached_tokens: float) -> NDArray[np.float32]:
        """Return the logarithm of the least probability that is worth verifying for batches of 0 .. num_sizes - 1
        requests. `cached_tokens`: the mean of a request."""
        assert self.times is not None
        size_S = np.arange(num_sizes, dtype=np.float64)
        ms_S = self.times.at(self._verified * size_S) + self.times.ms_per_cached_token * cached_tokens * size_S
        probability_S = self.times.of_node(self._verified * size_S) * self._tokens * size_S / ms_S
        # Where nodes cost nothing, all drafts are worth it, but not the nodes past a chain's end: these have -inf.
        return np.log(np.clip(probability_S, _LEAST, 1.0)).astype(np.float32)
