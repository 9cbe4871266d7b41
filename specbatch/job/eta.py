"""Estimate of the time that a job still takes: the remaining tokens, at the speed of the last seconds.

Short completions finish first, so the mean length of finished ones is too low for the others. Running requests are
counted too, as completions of at least their present length (the Kaplan-Meier estimate).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW_SECONDS = 30.0
_MIN_SECONDS = 1.0  # seconds of decoding before its speed is used
# Bounds of ranges of lengths, in tokens. The probability that a completion ends is constant within a range.
_EDGES = np.unique(np.concatenate([[0], np.round(1.25 ** np.arange(64))])).astype(np.float64)
_WIDTHS = np.append(np.diff(_EDGES), np.inf)
_PRIOR_WEIGHT = 0.5  # weight of the expectation for a range, as a number of completions that ended there
_GOLDEN = (5**0.5 - 1) / 2
_DRAWS = 2048  # lengths drawn for one estimate, about


@dataclass(frozen=True, slots=True)
class Work:
    """The work that a job has done, and the work that remains."""

    tokens: int  # generated in this session
    prefill_seconds: float  # prefill seconds in this session
    admitted: int  # requests that the engine has started in this session
    finished: Mapping[tuple[int, bool], int]  # (tokens, whether it ended before its limit) -> completions, all sessions
    running: Sequence[tuple[int, int]]  # (tokens so far, limit) of each request that was started
    waiting: Sequence[int]  # limits of requests that wait
    unread: float | None  # estimated number of other requests to come; None: unknown


@dataclass(frozen=True, slots=True)
class _Moment:
    seconds: float
    decode_seconds: float  # wall time without prefill
    tokens: int
    running: int
    running_seconds: float  # running requests, integrated over decode_seconds


class Forecast:
    """Updated about every second. `seconds_left` and `tokens_per_second` are None until they can be estimated."""

    def __init__(self) -> None:
        self.seconds_left: float | None = None
        self._moments: deque[_Moment] = deque()

    def update(self, seconds: float, work: Work) -> None:
        """Estimate again. `seconds`: the time of a monotonic clock."""
        decoding, running = seconds - work.prefill_seconds, len(work.running)
        area = 0.0
        if self._moments:
            last = self._moments[-1]
            area = last.running_seconds + max(decoding - last.decode_seconds, 0) * (last.running + running) / 2
        self._moments.append(_Moment(seconds, decoding, work.tokens, running, area))
        while len(self._moments) > 2 and seconds - self._moments[1].seconds >= WINDOW_SECONDS:
            self._moments.popleft()
        self.seconds_left = self._estimate(work)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens per second of wall time, prefill included."""
        if len(self._moments) < 2 or self._moments[-1].seconds <= self._moments[0].seconds:
            return None
        first, last = self._moments[0], self._moments[-1]
        return (last.tokens - first.tokens) / (last.seconds - first.seconds)

    def _estimate(self, work: Work) -> float | None:
        first, last = self._moments[0], self._moments[-1]
        batch = max(moment.running for moment in self._moments)
        tokens = last.tokens - first.tokens
        decoding, area = last.decode_seconds - first.decode_seconds, last.running_seconds - first.running_seconds
        if work.unread is None or not batch or decoding < _MIN_SECONDS or tokens < 2 * batch or area <= 0:
            return None
        tokens_left, longest = _tokens_left(work, batch)
        # With fewer running requests a round takes less time, but not in proportion. So this is the mean of two
        # extremes: all remaining rounds take as long as now, or all remaining tokens do. Only at the end of a job do
        # they differ.
        rounds_seconds = longest * area / tokens
        tokens_seconds = tokens_left * decoding / tokens
        prompts_seconds = (len(work.waiting) + work.unread) * work.prefill_seconds / max(work.admitted, 1)
        return (rounds_seconds + tokens_seconds) / 2 + prompts_seconds


def _tokens_left(work: Work, batch: int) -> tuple[float, float]:
    """Return the tokens that all requests will still write, and the tokens that are written one after the other until
    the end of the job, with `batch` requests at a time."""
    assert work.unread is not None
    limits = [*(limit for _, limit in work.running), *work.waiting] or [1]
    to_come = len(work.waiting) + work.unread
    # The end of the job is simulated. Before it, the batch is full and only the mean counts.
    simulated = min(round(to_come), 2 * batch)
    so_far = np.array([tokens for tokens, _ in work.running] + [0] * simulated, dtype=np.float64)
    new_limits = work.waiting or limits
    spread = max(len(new_limits) / max(simulated, 1), 1)  # they can be sorted by their limits
    limit = np.array(
        [most for _, most in work.running] + [new_limits[int(i * spread) % len(new_limits)] for i in range(simulated)]
    )
    if not len(so_far):
        return 0.0, 0.0
    hazard, last_rate = _fit(work.finished, so_far[: len(work.running)], float(np.mean(limits)))
    # Evenly spread quantiles, not random numbers, so that the display is steady.
    repeats = int(np.clip(_DRAWS // len(so_far), 4, 64))
    quantiles = (np.arange(1, 1 + repeats * len(so_far)) * _GOLDEN % 1.0).reshape(repeats, -1)
    wanted = np.interp(so_far, _EDGES, hazard) - np.log1p(-quantiles)
    lengths = np.interp(wanted, hazard, _EDGES) + np.maximum(wanted - hazard[-1], 0) / last_rate
    left = np.clip(lengths, so_far + 1, np.maximum(limit, so_far + 1)) - so_far
    rest = (to_come - simulated) * (left[:, len(work.running) :].mean() if simulated else 0.0)
    longest = np.mean([_last_end(lengths, batch) for lengths in left.tolist()])
    return float(left.sum(axis=1).mean() + rest), float(longest + rest / batch)


def _fit(finished: Mapping[tuple[int, bool], int], running: np.ndarray, mean_limit: float) -> tuple[np.ndarray, float]:
    """Fit the lengths of completions as if there were no limits. Returns -log of the share of completions that are
    longer than each edge, and the same per token after the last edge."""
    lengths = np.array([*(tokens for tokens, _ in finished), *running], dtype=np.float64)
    counts = np.array([*finished.values(), *[1] * len(running)], dtype=np.float64)
    ended = np.array([*(by_itself for _, by_itself in finished), *[False] * len(running)]) * counts
    bins = np.searchsorted(_EDGES, lengths, side="right") - 1
    here = np.bincount(bins, counts, minlength=len(_EDGES))
    beyond = counts.sum() - np.cumsum(here)  # completions that are longer than the whole range
    tokens = np.bincount(bins, counts * (lengths - _EDGES[bins]), minlength=len(_EDGES)).astype(np.float64)
    tokens[:-1] += beyond[:-1] * _WIDTHS[:-1]
    ends = np.bincount(bins, ended, minlength=len(_EDGES))
    # Very long limits are rarely reached: a first guess for ranges without data.
    typical = min(mean_limit, 12 * mean_limit**0.5)
    rates, rate = [], 0.0
    for edge, ends_here, tokens_here in zip(_EDGES.tolist(), ends.tolist(), tokens.tolist(), strict=True):
        # A range with little data is like the one before. That few short completions end does not mean that none will.
        expected = max(rate, 1 / max(typical, edge))
        rate = (ends_here + _PRIOR_WEIGHT) / (tokens_here + _PRIOR_WEIGHT / expected)
        rates.append(rate)
    return np.concatenate([[0.0], np.cumsum(np.array(rates[:-1]) * _WIDTHS[:-1])]), rate


def _last_end(lengths: list[float], batch: int) -> float:
    """Return the end of the last request, if `batch` requests run at a time and start in their order."""
    ends = lengths[:batch]
    heapq.heapify(ends)
    for length in lengths[batch:]:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends, default=0.0)
