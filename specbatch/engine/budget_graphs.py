"""The CUDA graphs of rounds whose chains share a budget: which are captured, and which of them a round takes.

Chains are whole where a round verifies all their nodes. Any other graph has a batch size and a smaller number of nodes.
There are too many pairs to capture them all, because one capture takes as long as tens of rounds. So a round takes the
captured graph with most expected tokens for its time. If a graph has room for more requests, the rest is padding with
one node for each.

The start of a job captures and times the graphs of the largest batch, and some of a batch of about an eighth of its
size. By these times, it also captures graphs of smaller batches that are clearly faster than all that could take their
place. Another graph is captured when rounds have lost as much time without it as a capture takes. So a job loses little
more than twice the time that it must lose.

All of this follows from the times of rounds, on which ranks agree, and from what rounds report.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specbatch.engine.verify_budget import Numbers, VerifyBudget

# Graphs of a size have these numbers of nodes for each request, on average.
_STEPS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0)
_MIN_CUT = 0.25  # A step has at least this number of nodes for each request less than whole chains.
# The start also times a batch of at least an eighth of the largest one. It times every fourth of its steps, because the
# cost of sharing hardly depends on the number of nodes.
_SMALL, _OF_SMALL = 8, 4
# The start captures a graph of a smaller batch if it saves this share of a round's time for each node of a request: 4%
# with two nodes. Graphs of many nodes must save more, because rounds need them less often.
_MIN_GAIN = 0.02
MAX_AT_START = 40  # The start captures at most this number of graphs for each draft shape.
# A graph is captured when rounds have lost this number of milliseconds without it. A capture takes 40 to 80.
_CAPTURE_MS = 100.0


class RoundSize(NamedTuple):
    """The size of a round's batch, padding included, and the nodes that it verifies."""

    size: int
    nodes: int


class Choice(NamedTuple):
    """The graph that a round takes, and the one that it should have. `taken`: the captured graph with most expected
    tokens for its time. `best`: the graph of the round's own size with most, captured or not. `lost`: milliseconds that
    the round loses if it takes the former. `is_due`: `best` should be captured now."""

    taken: RoundSize
    best: RoundSize
    lost: float
    is_due: bool = False


def steps(size: int, num_nodes: int) -> list[RoundSize]:
    """List the rounds of a batch of this size that can have graphs of fewer nodes than all. `num_nodes`: the nodes of a
    chain."""
    counts = dict.fromkeys(math.ceil(step * size) for step in _STEPS if step <= num_nodes - _MIN_CUT)
    return [RoundSize(size, count) for count in counts if count < size * num_nodes]


def timed_rounds(sizes: Sequence[int], num_nodes: int) -> list[RoundSize]:
    """List the rounds that share a budget and are timed at the start of a job: all steps of the largest batch, and some
    of a small one. `sizes`: the sizes of batches. `num_nodes`: the nodes of a chain."""
    largest = max(sizes)
    small = min(size for size in sizes if _SMALL * size >= largest)
    return list(dict.fromkeys([*steps(small, num_nodes)[::_OF_SMALL], *steps(largest, num_nodes)]))


class BudgetGraphs:
    """The captured graphs of one kind of round that verify fewer nodes than all. `num_nodes`: the nodes of a chain."""

    def __init__(self, budget: VerifyBudget, num_nodes: int) -> None:
        assert budget.times is not None
        self._budget, self._times, self._num_nodes = budget, budget.times, num_nodes
        self._captured: list[RoundSize] = []
        # The milliseconds that rounds have lost without a graph.
        self._lost: defaultdict[RoundSize, float] = defaultdict(float)
        # The choices of this version of the budget, by size and number of requests.
        self._choices: dict[tuple[int, int], Choice] = {}
        self._version = budget.version

    def add(self, captured: RoundSize) -> None:
        """Take note of a graph that was captured. Rounds may take it from now on."""
        if captured not in self._captured:
            self._captured.append(captured)
            self._choices.clear()

    def choose(self, size: int, count: int) -> Choice:
        """Choose the graph of a round of `count` requests, and count the time that it loses. `size`: the padded size of
        their batch, of which whole chains are always allowed."""
        choice = self._choice(size, count)
        self._lost[choice.best] += choice.lost
        is_due = self._lost[choice.best] > _CAPTURE_MS and choice.best not in self._captured
        return choice._replace(is_due=is_due)

    def at_start(self, sizes: Sequence[int]) -> list[RoundSize]:
        """Choose the graphs to capture at the start of a job. `sizes`: the sizes of its batches."""
        chosen, gain = self._saving(sizes, _MIN_GAIN), _MIN_GAIN
        while len(chosen) > MAX_AT_START:
            gain *= 1.25
            chosen = self._saving(sizes, gain)
        return chosen

    def _saving(self, sizes: Sequence[int], gain: float) -> list[RoundSize]:
        """Return the graphs that were captured to be timed, and others of smaller batches. The former include all of
        the largest batch, of which most rounds are. Each of the latter saves the share `gain`, for each node of a
        request, of the time of any graph that could take its place: one of whole chains, or one that was chosen before
        and has room for as many requests and drafts."""
        chosen = timed_rounds(sizes, self._num_nodes)
        for size in sorted({*sizes} - {max(sizes)}, reverse=True):
            for one in reversed(steps(size, self._num_nodes)):
                room = one.nodes - size
                others = [other for other in chosen if other.size >= size and other.nodes - other.size >= room]
                least = self._milliseconds([self._whole(size), *others]).min()
                if self._milliseconds([one])[0] < (1 - gain * one.nodes / size) * least:
                    chosen.append(one)
        return chosen

    def _choice(self, size: int, count: int) -> Choice:
        if self._version != self._budget.version:
            self._version = self._budget.version
            self._choices.clear()
        if (size, count) not in self._choices:
            whole, some = self._whole(size), steps(size, self._num_nodes)
            taken, rate, _ = self._best_of([whole, *(one for one in self._captured if one.size >= size)], count)
            best, best_rate, ms = self._best_of([whole, *some], count)
            # With the rate of the round that is taken, the tokens of the best one would take this much longer.
            self._choices[size, count] = Choice(taken, best, max(0.0, ms * (best_rate / rate - 1.0)))
        return self._choices[size, count]

    def _best_of(self, found: list[RoundSize], count: int) -> tuple[RoundSize, float, float]:
        """Return the round of `count` requests with most expected tokens for its time, the tokens that each request
        gets in a millisecond of it, and its milliseconds."""
        drafts_S = np.array([(one.nodes - one.size) / count for one in found])
        ms_S = self._milliseconds(found) + self._budget.cached_ms(count)
        rates_S = self._budget.tokens(drafts_S) / ms_S
        best = int(rates_S.argmax())
        return found[best], float(rates_S[best]), float(ms_S[best])

    def _whole(self, size: int) -> RoundSize:
        return RoundSize(size, size * self._num_nodes)

    def _milliseconds(self, found: list[RoundSize]) -> Numbers:
        sizes_S, nodes_S = np.array(found, dtype=np.float64).T
        is_whole_S = [one == self._whole(one.size) for one in found]
        return np.where(is_whole_S, self._times.whole.at(nodes_S), self._times.shared.at(sizes_S, nodes_S))
