"""The graphs of rounds whose chains share a budget: which of them a round takes, and which are captured.

Such a graph has a size of the batch and a number of nodes. There are too many pairs for a graph of each, because a
capture takes as long as tens of rounds. So a round takes the cheapest graph that has room for its requests and for most
of the nodes that are likely enough. If it has room for more requests, these are padding, with one node each. The start
captures what is clearly cheaper than all that could take its place. Another graph is captured when rounds without it
have lost as much time as a capture takes: a job loses little more than twice the time that it must lose.

All of this follows from the times of rounds, on which ranks agree, and from the rounds that were launched.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from specbatch.engine.verify_budget import RoundTimes

# Nodes for each request.
_STEPS = (1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 20.0, 24.0, 32.0)
_MIN_CUT = 0.25  # nodes for each request by which a step must be smaller than whole chains
_ENOUGH = 0.8  # share of the likely drafts that a round verifies at least; the last ones are hardly worth their time
# A graph is captured at the start if its round saves this share of the time for each node of a request: few nodes for
# each request are wanted more often than many.
_MIN_GAIN = 0.02
MAX_AT_START = 32  # graphs of each draft shape that are captured at the start
_CAPTURE_MS = 100.0  # milliseconds that rounds must have lost before a capture; it takes 40 to 80


class RoundSize(NamedTuple):
    """The size of a round's batch, padding included, and the nodes that it verifies."""

    size: int
    nodes: int


class BudgetGraphs:
    """The captured graphs of one kind of round that verify fewer nodes than all. `num_nodes`: the nodes of a chain."""

    def __init__(self, times: RoundTimes, num_nodes: int) -> None:
        self._times, self._num_nodes = times, num_nodes
        self._captured: dict[RoundSize, float] = {}  # with milliseconds
        self._lost: defaultdict[RoundSize, float] = defaultdict(float)  # milliseconds that rounds lost without a graph

    def add(self, captured: RoundSize) -> None:
        self._captured[captured] = self._milliseconds(captured)

    def cheapest(self, size: int, count: int, likely: float) -> RoundSize:
        """Return the cheapest graph for `count` requests with `likely` likely nodes. `size` is the padded size for
        them, at which whole chains can be verified in any case."""
        return self._cheapest(size, count, _enough(count, likely))

    def best(self, size: int, count: int, likely: float) -> RoundSize:
        """Return the smallest round of this size with room for these nodes, captured or not."""
        least = _enough(count, likely) + size - count
        return next((one for one in self._steps(size) if one.nodes >= least), self._whole(size))

    def due(self, size: int, count: int, likely: float) -> RoundSize | None:
        """Count the time that such a round loses. Return the graph that should be captured now; None: none."""
        best = self.best(size, count, likely)
        self._lost[best] += self._milliseconds(self.cheapest(size, count, likely)) - self._milliseconds(best)
        return best if self._lost[best] > _CAPTURE_MS and best not in self._captured else None

    def at_start(self, sizes: Sequence[int]) -> list[RoundSize]:
        """Choose the graphs to capture at the start. `sizes`: those of batches."""
        chosen, gain = self._saving(sizes, _MIN_GAIN), _MIN_GAIN
        while len(chosen) > MAX_AT_START:
            gain *= 1.25
            chosen = self._saving(sizes, gain)
        return chosen

    def _saving(self, sizes: Sequence[int], gain: float) -> list[RoundSize]:
        """Return graphs of which each saves time against larger ones, by the share `gain` for each node of a request.
        The largest batch has all of them, because most rounds are of it."""
        chosen = BudgetGraphs(self._times, self._num_nodes)
        for size in sorted(sizes, reverse=True):
            for one in reversed(self._steps(size)):
                other = chosen._milliseconds(chosen._cheapest(size, size, one.nodes))
                share = _MIN_GAIN if size == max(sizes) else gain
                if self._milliseconds(one) < (1 - share * one.nodes / size) * other:
                    chosen.add(one)
        return list(chosen._captured)

    def _cheapest(self, size: int, count: int, nodes: float) -> RoundSize:
        found = self._whole(size)
        least = self._milliseconds(found)
        for one, ms in self._captured.items():
            if ms < least and one.size >= size and one.nodes >= nodes + one.size - count:
                found, least = one, ms
        return found

    def _whole(self, size: int) -> RoundSize:
        return RoundSize(size, size * self._num_nodes)

    def _steps(self, size: int) -> list[RoundSize]:
        steps = [step for step in _STEPS if step <= self._num_nodes - _MIN_CUT]
        return [RoundSize(size, math.ceil(step * size)) for step in steps]

    def _milliseconds(self, one: RoundSize) -> float:
        return self._times.of(one.size, one.nodes, shares=one != self._whole(one.size))


def _enough(count: int, likely: float) -> float:
    """Return the nodes that a round of `count` requests verifies at least."""
    return count + _ENOUGH * max(0.0, likely - count)
