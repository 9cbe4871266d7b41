"""Chooses how many nodes a round verifies, where shapes are fixed and a draft method has several sizes.

A round costs all of its nodes, whether drafts are right or not. How far drafts are right depends on the text, so the
last rounds decide: of the sizes, the one is taken with the most expected tokens for its time.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specbatch.draft.method import DraftMethod
from specbatch.engine.executor import RoundBatch, RoundExecutor
from specbatch.engine.round import RoundHook, RoundKey
from specbatch.engine.verify_budget import RoundTimes
from specbatch.parallel.group import Group

# Weights of the old counts when a round is added, of positions that it verifies and of others.
_MEMORY, _MEMORY_OF_OTHERS = 0.9, 0.98
# A draft whose position no round has verified lately is taken to be right in _PRIOR of the cases, so that longer drafts
# are tried. As much as _PRIOR_WEIGHT drafts.
_PRIOR, _PRIOR_WEIGHT = 0.8, 8.0
_MIN_GAIN = 0.03  # the least gain for which the size changes
_REPEATS, _IN_A_ROW = 5, 4  # to measure a round
_ENOUGH_ROUNDS = 8  # rounds that want a graph before it is captured, which takes about 0.1 s


class RoundCosts(NamedTuple):
    """The time of a round, in microseconds."""

    least: float  # time of a round of few tokens, which reads all weights
    fixed: float
    per_token: float
    per_cached_token: float  # time to read the keys and values of a token

    def of(self, num_tokens: int, num_cached: int) -> float:
        return max(self.least, self.fixed + self.per_token * num_tokens) + self.per_cached_token * num_cached


class SizedHook(RoundHook):
    """The hook of a round whose size was chosen. `method` None: it has the size of the schedule."""

    def __init__(self, method: DraftMethod | None) -> None:
        self.method = method


class NodeChooser:
    """The numbers of right drafts of the last rounds. They depend on nothing but what rounds reported, so ranks with
    the same costs choose alike. `max_nodes`: the most nodes of a round."""

    def __init__(self, costs: RoundCosts, max_nodes: int) -> None:
        self._costs = costs
        # Drafts that were tried and drafts that were right lately, by position.
        self._tried, self._right = np.zeros(max_nodes - 1), np.zeros(max_nodes - 1)
        self._size: int | None = None  # the last choice
        self._wanted: Counter[RoundKey] = Counter()

    def saw(self, num_new: NDArray[np.int32], num_nodes: int) -> None:
        """Count a round. `num_new`: the tokens that each request got; 0: it was done."""
        reached = np.bincount(num_new[num_new > 0] - 1, minlength=num_nodes)[::-1].cumsum()[::-1]
        memory = np.where(np.arange(len(self._tried)) < num_nodes - 1, _MEMORY, _MEMORY_OF_OTHERS)
        self._tried *= memory
        self._right *= memory
        self._tried[: num_nodes - 1] += reached[: num_nodes - 1]
        self._right[: num_nodes - 1] += reached[1:num_nodes]

    def expected(self, num_nodes: int) -> float:
        """Return the tokens that a request is expected to get in a round of that number of nodes."""
        shares = (self._right + _PRIOR * _PRIOR_WEIGHT) / (self._tried + _PRIOR_WEIGHT)
        return 1.0 + float(shares[: num_nodes - 1].cumprod().sum())

    def choose(self, sizes: Sequence[int], batch_size: int, num_cached: int) -> int:
        """Choose one of `sizes` for a round of `batch_size` requests, padding included, which have `num_cached` tokens
        in the cache."""
        rates = {size: self.expected(size) / self._costs.of(batch_size * size, num_cached) for size in sizes}
        best = max(rates, key=lambda size: rates[size])
        last = rates.get(self._size) if self._size is not None else None
        if last is None or rates[best] > (1 + _MIN_GAIN) * last:
            self._size = best
        assert self._size is not None
        return self._size

    def hook(
        self,
        method: DraftMethod,
        key_of: Callable[[DraftMethod], RoundKey],
        is_captured: Callable[[RoundKey], bool],
        batch_size: int,
        num_cached: int,
    ) -> SizedHook:
        """Return the hook of the next round. `method`: that of the schedule, which has graphs. A graph of another size
        is captured when some rounds have wanted it, so not for a batch that is about to shrink."""
        size = self.choose(method.sizes, batch_size, num_cached)
        if size == method.num_nodes:
            return SizedHook(None)
        narrow = method.narrowed(size)
        key = key_of(narrow)
        if not is_captured(key):
            self._wanted[key] += 1
            if self._wanted[key] < _ENOUGH_ROUNDS:
                return SizedHook(None)
        return SizedHook(narrow)


@torch.inference_mode()
def measured_costs(
    executor: RoundExecutor, max_batch_size: int, per_cached_token: float, group: Group | None
) -> RoundCosts | None:
    """Measure rounds of the largest batch, with all nodes and with the root alone, and a round of one request. The
    executor has its graphs, and no request runs. All rows are padding. `per_cached_token`: see `RoundCosts`. `group`:
    the ranks that share the target, which get the same costs. Return None if rounds are no graphs, or have one size."""
    method = executor.rounds.at(max_batch_size).method
    if executor.runner is None or not method.sizes:
        return None
    nodes, first = max_batch_size * method.num_nodes, method.narrowed(method.sizes[0])
    least, plain, full = (
        _micros(executor, count, narrow)
        for count, narrow in ((1, None), (max_batch_size, first), (max_batch_size, None))
    )
    if group is not None:
        least, plain, full = group.of_first([least, plain, full])
    num_first = max_batch_size * first.num_nodes
    per_token = max(0.0, full - plain) / (nodes - num_first)
    fixed = max(0.0, plain - per_token * num_first)
    return RoundCosts(min(least, plain), fixed, per_token, per_cached_token)


def costs_of(times: RoundTimes, method: DraftMethod, max_batch_size: int) -> RoundCosts | None:
    """Return costs by the times of a budget, which were measured by the number of nodes. None: rounds have one size."""
    if not method.sizes:
        return None
    first, last = max_batch_size * method.sizes[0], max_batch_size * method.num_nodes
    plain, full = (1e3 * times.whole.of(nodes) for nodes in (first, last))
    per_token = (full - plain) / (last - first)
    return RoundCosts(plain, max(0.0, plain - per_token * first), per_token, 1e3 * times.ms_per_cached_token)


def _micros(executor: RoundExecutor, count: int, method: DraftMethod | None) -> float:
    """Return the median time of a round. Rounds follow each other, so that the host's time is hidden."""
    batch = RoundBatch([None] * count, hook=SizedHook(method), num_requests=count)
    times = []
    for _ in range(1 + _REPEATS):  # the first may capture a graph
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        executor.run(batch)
        first.record()
        for _ in range(_IN_A_ROW):
            executor.run(batch)
        last.record()
        last.synchronize()
        times.append(1e3 * first.elapsed_time(last) / _IN_A_ROW)
    return statistics.median(times[1:])
