"""The number of nodes that a round verifies where the chains of its requests share a budget.

The time of a round depends on this number. A round of few nodes hardly takes longer with one more, because a GPU reads
all weights in any case. In a round of many nodes, each takes the same time. In between, times rise in steps, where
kernels take another tile. So the start of a job times rounds of several numbers of nodes, and each round takes the
number with most expected tokens for its time (`budget_graphs.py`).

The expected tokens follow from earlier rounds. Drafts are counted by ranges of their estimated probability. Rounds
report how many drafts of each range there were, verified or not, and how many of the verified ones were accepted. The
most probable drafts of all requests are verified first. So the number of drafts that a round verifies says how many of
each range they will be.

Ranks that share a model read the same reports, and agree on the times. So all of them decide alike.

Shape suffixes: B requests, C columns, K ranges of probabilities, S numbers of nodes, Z words of an output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbatch.batch import (
    LIKELY_BITS,
    LIKELY_COLUMNS,
    LIKELY_KNOWN,
    LIKELY_PER_COLUMN,
    LOG_BOUNDS_K,
    NUM_BOUNDS,
    Output,
)

Numbers = NDArray[np.float64]

# A report is what a round says of one request. The mean number of drafts is that of about the last 2048 reports.
_REMEMBERED = 2048
_ROUNDS_OF_VERSION = 8  # The version of a budget changes once in 8 rounds.
_MEMORY = 0.98  # Each round multiplies the old counts of verified and accepted drafts by this number.
# In each range, 32 drafts are added to those that were verified, accepted as often as their probability says.
_PRIOR_WEIGHT = 32.0
# The middle of each range, as the logarithm of a probability.
_LOG_MIDDLES_K = (LOG_BOUNDS_K + np.concatenate(([0.0], LOG_BOUNDS_K[:-1]))) / 2
_SHIFTS = LIKELY_BITS * np.arange(LIKELY_PER_COLUMN)  # The numbers of a packed column begin at these bits.
_MEAN_AT_FIRST = 2.0  # Before the first report, a request is expected to have 2 drafts.


class TimeCurve(NamedTuple):
    """The milliseconds of rounds by the number of nodes that they verify. Both ascend from point to point."""

    num_nodes: Sequence[float]
    milliseconds: Sequence[float]

    @staticmethod
    def of_points(points: Sequence[tuple[float, float]]) -> TimeCurve:
        """Make a curve of measured points in any order. A point gets the time of one with fewer nodes if that took
        longer."""
        points = sorted(points)
        rising = np.maximum.accumulate([ms for _, ms in points])
        return TimeCurve([count for count, _ in points], rising.tolist())

    def with_sharing(self, points: Sequence[tuple[float, float]]) -> TimeCurve:
        """Return the curve of rounds of one batch size whose chains share a budget. This curve is that of rounds that
        verify all nodes. `points`: measured rounds of that batch size whose chains share a budget. With fewer nodes
        than they have, or more, sharing costs as many milliseconds as at the nearest of them."""
        (least, of_least), (most, of_most) = min(points), max(points)
        fewer, more = (max(0.0, ms - self.of(count)) for count, ms in ((least, of_least), (most, of_most)))
        whole = list(zip(*self, strict=True))
        before = [(count, ms + fewer) for count, ms in whole if count < least]
        return TimeCurve.of_points([*before, *points, *((count, ms + more) for count, ms in whole if count > most)])

    def at(self, num_nodes_S: Numbers) -> Numbers:
        """Return the milliseconds of rounds, interpolated."""
        found: Numbers = np.interp(num_nodes_S, self.num_nodes, self.milliseconds)
        return found

    def of(self, num_nodes: float) -> float:
        """Return the milliseconds of one round, interpolated."""
        return float(np.interp(num_nodes, self.num_nodes, self.milliseconds))


class SharedTimes(NamedTuple):
    """The milliseconds of rounds whose chains share a budget. `sizes`: batch sizes, which ascend. `curves`: the curves
    of these sizes. Of two rounds with the same number of nodes, that of more requests takes longer, because each
    request needs drafts."""

    sizes: Sequence[int]
    curves: Sequence[TimeCurve]

    @staticmethod
    def of_points(points: Sequence[tuple[int, float, float]], whole: TimeCurve) -> SharedTimes:
        """Make curves of measured rounds: batch size, nodes, milliseconds. `whole`: the curve of rounds that verify all
        nodes. If no round was measured, sharing costs nothing."""
        sizes = sorted({size for size, _, _ in points})
        of_sizes = ([(nodes, ms) for other, nodes, ms in points if other == size] for size in sizes)
        return SharedTimes(sizes or [1], [whole.with_sharing(some) for some in of_sizes] or [whole])

    def at(self, sizes_S: Numbers, num_nodes_S: Numbers) -> Numbers:
        """Return the milliseconds of rounds, interpolated between the two nearest batch sizes."""
        of_sizes = [curve.at(num_nodes_S) for curve in self.curves]
        found = of_sizes[0]
        for i in range(1, len(self.sizes)):
            before, size = self.sizes[i - 1 : i + 1]
            share_S = np.clip((sizes_S - before) / (size - before), 0.0, 1.0)
            found = found + share_S * (of_sizes[i] - of_sizes[i - 1])
        return found


class RoundTimes(NamedTuple):
    """The times of rounds. `whole`: rounds that verify all nodes. `shared`: rounds whose chains share a budget. Both
    are measured without cached tokens."""

    whole: TimeCurve
    shared: SharedTimes
    ms_per_cached_token: float


@dataclass
class VerifyBudget:
    """The budget of rounds. `nodes`: nodes for each request on average, the root included; None: it changes. `times`:
    the times of rounds, if it changes. `cached_tokens`: those of a request, on average. `version`: a number that rises
    when graphs should be chosen anew, because the expected tokens have changed."""

    nodes: float | None
    times: RoundTimes | None = None
    cached_tokens: float = 0.0
    version: int = 0
    _rounds: int = 0
    _count: float = 0.0  # The means below are those of this number of reports.
    # The mean number of drafts that a request has in each range.
    _drafts_K: Numbers = field(default_factory=lambda: np.full(NUM_BOUNDS, _MEAN_AT_FIRST / NUM_BOUNDS))
    # The counts of drafts that were verified, and of those that were accepted. Old rounds count less.
    _verified_K: Numbers = field(default_factory=lambda: np.zeros(NUM_BOUNDS))
    _accepted_K: Numbers = field(default_factory=lambda: np.zeros(NUM_BOUNDS))

    @property
    def changes(self) -> bool:
        return self.nodes is None

    def record(self, output_BZ: NDArray[np.int32]) -> bool:
        """Take note of the output of a round (see `Output`). Return whether the version has changed."""
        packed_BC = output_BZ[:, Output.LIKELY : Output.LIKELY + LIKELY_COLUMNS]
        is_known_B = (output_BZ[:, Output.NUM_NEW] > 0) & ((packed_BC[:, 0] & LIKELY_KNOWN) > 0)
        if not is_known_B.any():
            return False
        packed_BC, known = packed_BC[is_known_B], output_BZ[is_known_B]
        at_least_BK = (packed_BC[:, :, None] >> _SHIFTS & ((1 << LIKELY_BITS) - 1)).reshape(len(known), -1)
        self._count = min(_REMEMBERED, self._count + len(known))
        share = min(1.0, len(known) / self._count)
        self._drafts_K += share * (_in_each(at_least_BK) / len(known) - self._drafts_K)
        self._verified_K *= _MEMORY
        self._accepted_K *= _MEMORY
        self._verified_K += _in_each(np.minimum(at_least_BK, known[:, Output.NUM_DRAFTED, None]))
        self._accepted_K += _in_each(np.minimum(at_least_BK, known[:, Output.NUM_NEW, None] - 1))
        is_new = self._rounds % _ROUNDS_OF_VERSION == 0
        self.version += is_new
        self._rounds += 1
        return is_new

    def tokens(self, num_drafts_S: Numbers) -> Numbers:
        """Return the mean number of tokens that a request is expected to get in a round. `num_drafts_S`: the mean
        number of its drafts that the round verifies."""
        prior_K = _PRIOR_WEIGHT * np.exp(_LOG_MIDDLES_K)
        rates_K = (self._accepted_K + prior_K) / (self._verified_K + _PRIOR_WEIGHT)
        drafts, right = (np.concatenate(([0.0], x_K.cumsum())) for x_K in (self._drafts_K, self._drafts_K * rates_K))
        found: Numbers = 1.0 + np.interp(num_drafts_S, drafts, right)
        return found

    def cached_ms(self, count: int) -> float:
        """Return the milliseconds that a round of `count` requests needs to read cached keys and values."""
        assert self.times is not None
        return self.times.ms_per_cached_token * self.cached_tokens * count

    def num_verified(self, size: int, num_nodes: int) -> int | None:
        """Return the number of nodes that a round verifies; None: all, or the budget changes. `size`: the number of its
        requests, padding included. `num_nodes`: the nodes of each chain."""
        if self.nodes is None or self.nodes > num_nodes - 0.25:
            return None
        return math.ceil(self.nodes * size)


def _in_each(at_least_BK: NDArray[np.int32]) -> Numbers:
    """Return the number of drafts in each range, of all requests. `at_least_BK`: how many drafts of a request have at
    least the probability of a bound."""
    found: Numbers = np.diff(at_least_BK.sum(axis=0), prepend=0).astype(np.float64)
    return found
