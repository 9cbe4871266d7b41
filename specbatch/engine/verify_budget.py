"""The number of nodes that a round verifies, if its chains share a budget.

Few nodes cost nearly nothing, because a GPU reads its weights in any case; of many, each costs as much as the others.
In between, times rise in steps, where kernels take another tile. So rounds of several numbers of nodes are timed at the
start, and a round takes the number with which most tokens are expected for its time (`budget_graphs.py`).

The tokens that are expected follow from what rounds report: how many drafts were how probable, verified or not. Of each
range of probabilities it is counted how many of the verified drafts were accepted. A budget is shared by probability,
so the most probable drafts of all requests come first.

All of this follows from what rounds report and from times that ranks agree on, so all ranks decide alike.

Shape suffixes: B requests, K ranges of probabilities, S numbers of nodes.
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

_REMEMBERED = 2048  # requests' rounds of which means are taken
_DUE = 8  # rounds after which the expected tokens are computed anew
_MEMORY = 0.98  # share of the counts of verified and accepted drafts that a round leaves
_PRIOR_WEIGHT = 32.0  # drafts of each range, accepted as often as their probability says, that are always counted
# The logarithm of a probability in the middle of each range.
_LOG_MIDDLES_K = (LOG_BOUNDS_K + np.concatenate(([0.0], LOG_BOUNDS_K[:-1]))) / 2
_SHIFTS = LIKELY_BITS * np.arange(LIKELY_PER_COLUMN)
_MEAN_AT_FIRST = 2.0  # drafts of a request before anything is known


class TimeCurve(NamedTuple):
    """The milliseconds of rounds by the number of nodes that they verify, both ascending."""

    num_nodes: Sequence[float]
    milliseconds: Sequence[float]

    @staticmethod
    def of_points(points: Sequence[tuple[float, float]]) -> TimeCurve:
        """Make a curve of numbers of nodes and milliseconds in any order. More nodes take no less time."""
        points = sorted(points)
        rising = np.maximum.accumulate([ms for _, ms in points])
        return TimeCurve([count for count, _ in points], rising.tolist())

    def with_sharing(self, points: Sequence[tuple[float, float]]) -> TimeCurve:
        """Return the curve of rounds whose chains share a budget. This one is of rounds that verify all nodes.
        `points`: measured rounds of the largest batch that share. Rounds of fewer nodes than these take longer than
        without sharing, too, by as many milliseconds as the smallest of these does."""
        if not points:
            return self
        least, ms = min(points)
        more = max(0.0, ms - self.of(least))
        before = [(count, whole_ms + more) for count, whole_ms in zip(*self, strict=True) if count < least]
        return TimeCurve.of_points([*before, *points])

    def at(self, num_nodes_S: Numbers) -> Numbers:
        """Return the milliseconds of rounds, interpolated."""
        found: Numbers = np.interp(num_nodes_S, self.num_nodes, self.milliseconds)
        return found

    def of(self, num_nodes: float) -> float:
        """Return the milliseconds of one round, interpolated."""
        return float(np.interp(num_nodes, self.num_nodes, self.milliseconds))


class RoundTimes(NamedTuple):
    """The times of rounds. `whole`: rounds that verify all nodes. `shared`: rounds whose chains share a budget. Both
    are measured without cached tokens."""

    whole: TimeCurve
    shared: TimeCurve
    ms_per_cached_token: float


@dataclass
class VerifyBudget:
    """The budget of rounds. `nodes`: nodes for each request on average, the root included; None: it changes. `times`:
    what a budget that changes is computed from. `cached_tokens`: the mean of a request."""

    nodes: float | None
    times: RoundTimes | None = None
    cached_tokens: float = 0.0
    version: int = 0  # It changes when the expected tokens do.
    _rounds: int = 0
    _count: float = 0.0  # requests' rounds of which the means are
    _drafts_K: Numbers = field(default_factory=lambda: np.full(NUM_BOUNDS, _MEAN_AT_FIRST / NUM_BOUNDS))  # means
    _verified_K: Numbers = field(default_factory=lambda: np.zeros(NUM_BOUNDS))
    _accepted_K: Numbers = field(default_factory=lambda: np.zeros(NUM_BOUNDS))

    @property
    def changes(self) -> bool:
        return self.nodes is None

    def record(self, output_BZ: NDArray[np.int32]) -> bool:
        """Take note of the output of a round (see `Output`). Return whether the expected tokens change."""
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
        is_due = self._rounds % _DUE == 0
        self.version += is_due
        self._rounds += 1
        return is_due

    def tokens(self, num_drafts_S: Numbers) -> Numbers:
        """Return the tokens that a request is expected to get in a round. `num_drafts_S`: the mean number of drafts
        that rounds verify of a request."""
        prior_K = _PRIOR_WEIGHT * np.exp(_LOG_MIDDLES_K)
        rates_K = (self._accepted_K + prior_K) / (self._verified_K + _PRIOR_WEIGHT)
        drafts, right = (np.concatenate(([0.0], x_K.cumsum())) for x_K in (self._drafts_K, self._drafts_K * rates_K))
        found: Numbers = 1.0 + np.interp(num_drafts_S, drafts, right)
        return found

    def cached_ms(self, count: int) -> float:
        """Return the milliseconds in which a round of `count` requests reads cached keys and values."""
        assert self.times is not None
        return self.times.ms_per_cached_token * self.cached_tokens * count

    def num_verified(self, size: int, num_nodes: int) -> int | None:
        """Return the number of nodes that a round of `size` requests, padding included, verifies by a budget that does
        not change; None: all, which are `num_nodes` for each request."""
        if self.nodes is None or self.nodes > num_nodes - 0.25:
            return None
        return math.ceil(self.nodes * size)


def _in_each(at_least_BK: NDArray[np.int32]) -> Numbers:
    """Return the number of drafts in each range of probabilities, of all requests."""
    found: Numbers = np.diff(at_least_BK.sum(axis=0), prepend=0).astype(np.float64)
    return found
