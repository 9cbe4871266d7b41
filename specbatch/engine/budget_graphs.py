"""The graphs of rounds whose chains share a budget: which of them a round takes, and which are captured.

Such a graph has a size of the batch and a number of nodes. There are too many pairs for a graph of each, because a
capture takes as long as tens of rounds. So a round takes the graph with which most tokens are expected for its time. If
it has room for more requests, these are padding, with one node each. The start captures and times those of the largest
batch, and of others what is clearly faster than all that could take its place. Another graph is captured when rounds
without it have lost as much time as a capture takes: a job loses little more than twice the time that it must lose.

All of this follows from the times of rounds, on which ranks agree, and from what rounds report.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specbatch.engine.verify_budget import Numbers, VerifyBudget

# Nodes for each request.
_STEPS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0)
_MIN_CUT = 0.25  # nodes for each request by which a step must be smaller than whole chains
# A graph of a smaller batch is captured at the start if its round saves this share of the time for each node of a
# request: few nodes for each request are wanted more often than many.
_MIN_GAIN = 0.02
MAX_AT_START = 40  # graphs of each draft shape that are captured at the start
_CAPTURE_MS = 100.0  # milliseconds that rounds must have lost before a capture; it takes 40 to 80


class RoundSize(NamedTuple):
    """The size of a round's batch, padding included, and the nodes that it verifies."""

    size: int
    nodes: int


class Choice(NamedTuple):
    """What a round is. `taken`: the captured graph with most tokens for its time. `best`: the same among all rounds of
    its size, captured or not. `lost`: milliseconds that it loses without the latter. `is_due`: rounds have lost enough
    time to capture it."""

    taken: RoundSize
    best: RoundSize
    lost: float
    is_due: bool = False


def steps(size: int, num_nodes: int) -> list[RoundSize]:
    """List the rounds of batches of this size that verify fewer nodes than all. `num_nodes`: those of a chain."""
    counts = dict.fromkeys(math.ceil(step * size) for step in _STEPS if step <= num_nodes - _MIN_CUT)
    return [RoundSize(size, count) for count in counts if count < size * num_nodes]


class BudgetGraphs:
    """The captured graphs of one kind of round that verify fewer nodes than all. `num_nodes`: the nodes of a chain."""

    def __init__(self, budget: VerifyBudget, num_nodes: int) -> None:
        assert budget.times is not None
        self._budget, self._times, self._num_nodes = budget, budget.times, num_nodes
        self._captured: list[RoundSize] = []
        self._lost: defaultdict[RoundSize, float] = defaultdict(float)  # milliseconds that rounds lost without a graph
        self._choices: dict[tuple[int, int], Choice] = {}  # The keys are a size and a number of requests.
        self._version = budget.version

    def add(self, captured: RoundSize) -> None:
        if captured not in self._captured:
            self._captured.append(captured)
            self._choices.clear()

    def choose(self, size: int, count: int) -> Choice:
        """Choose a round for `count` requests, and count the time that it loses. `size`: the padded size for them, at
        which whole chains can be verified in any case."""
        choice = self._choice(size, count)
        self._lost[choice.best] += choice.lost
        is_due = self._lost[choice.best] > _CAPTURE_MS and choice.best not in self._captured
        return choice._replace(is_due=is_due)

    def at_start(self, sizes: Sequence[int]) -> list[RoundSize]:
        """Choose the graphs to capture at the start. `sizes`: those of batches."""
        chosen, gain = self._saving(sizes, _MIN_GAIN), _MIN_GAIN
        while len(chosen) > MAX_AT_START:
            gain *= 1.25
            chosen = self._saving(sizes, gain)
        return chosen

    def _saving(self, sizes: Sequence[int], gain: float) -> list[RoundSize]:
        """Return all graphs of the largest batch, because most rounds are of it, and those of others of which each
        saves time against larger ones, by the share `gain` for each node of a request."""
        largest = max(sizes)
        chosen = [*steps(largest, self._num_nodes)]
        for size in sorted({*sizes} - {largest}, reverse=True):
            for one in reversed(steps(size, self._num_nodes)):
                room = one.nodes - size
                others = [self._whole(size), *(other for other in chosen if other.nodes - other.size >= room)]
                least = self._milliseconds(others).min()
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
        """Return the round with most tokens for its time, the tokens of a request in a millisecond, and the
        milliseconds of the round."""
        drafts_S = np.array([(one.nodes - one.size) / count for one in found])
        ms_S = self._milliseconds(found) + self._budget.cached_ms(count)
        rates_S = self._budget.tokens(drafts_S) / ms_S
        best = int(rates_S.argmax())
        return found[best], float(rates_S[best]), float(ms_S[best])

    def _whole(self, size: int) -> RoundSize:
        return RoundSize(size, size * self._num_nodes)

    def _milliseconds(self, found: list[RoundSize]) -> Numbers:
        nodes_S = np.array([one.nodes for one in found], dtype=np.float64)
        is_whole_S = [one == self._whole(one.size) for one in found]
        return np.where(is_whole_S, self._times.whole.at(nodes_S), self._times.shared.at(nodes_S))
