"""Wall time of a whole file under a schedule: the engine's scheduler, with a clock that the cost model moves.

Requests have predicted lengths and advance by the tokens per round of the traced row that models each. The engine's
`Scheduler` decides which requests are admitted, in which prompt chunk, and which are preempted. Between two
events (a request ends, the cache is full) nothing changes but the requests' lengths, so those rounds are taken at once.

Of a large file a few thousand rows are simulated: the time between two admissions in the middle of them, when as many
requests come as go, is what each further row takes.

Shape suffixes: R traced rows, N rows of the file (those simulated), B running requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from specbatch.cache.pages import PagePool
from specbatch.draft.schedule import Schedule
from specbatch.draft.shape import DraftShape
from specbatch.engine.prefill.admission_batching import RoundsOfRows
from specbatch.engine.scheduler import PrefillSpan, Scheduler
from specbatch.engine.sequence import Sequence
from specbatch.errors import TuningError
from specbatch.tune.costs import CostModel
from specbatch.tune.profile import FileProfile, Limits, Prediction
from specbatch.tune.replay import Replay
from specbatch.tune.trace import Trace
from specbatch.types import Request, RngKey, SamplingParams

_MIN_SIMULATED = 2000  # rows
_TURNOVERS = 8  # full batches that are simulated, where that is more rows


@dataclass(frozen=True)
class Forecast:
    """Measurements of the traced rows, which predict files of rows like them."""

    trace: Trace
    replays: Mapping[DraftShape, Replay]
    costs: CostModel
    limits: Limits
    max_tokens: int  # largest number of tokens of a row's output

    def predict(self, schedule: Schedule, count: int) -> Prediction:
        """Predict a file of `count` rows. They are the traced rows from the first on, again and again."""
        part = replace(self.trace, rows=self.trace.rows[:count])
        own = {shape: self.replays[shape].of_rows(slice(count)) for shape in schedule.items if shape is not None}
        profile = replace(FileProfile.of(part, self.max_tokens, num_rows=count), in_order=True)
        return predict(profile, self.limits, self.costs, own, schedule)

    def seconds(self, schedule: Schedule, count: int) -> float:
        """Return the seconds that `predict` gives."""
        return self.predict(schedule, count).seconds


def predict(
    profile: FileProfile,
    limits: Limits,
    costs: CostModel,
    replays: Mapping[DraftShape, Replay],
    schedule: Schedule,
    min_simulated: int = _MIN_SIMULATED,
) -> Prediction:
    """`replays` holds every shape of `schedule`, over the traced rows of `profile`.

    Raises TuningError for a row that does not fit the cache, and for a part of a round that was not measured.
    """
    return Simulation(profile, limits, costs, replays, schedule, min_simulated).run()


class _PageCount(PagePool):
    """A pool that counts its pages: which one is which does not matter here."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        super().__init__(1, page_size)
        self.num_pages = self._num_free = num_pages

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> list[int]:
        assert 0 <= count <= self._num_free, f"{count} pages wanted, {self._num_free} free"
        self._num_free -= count
        return [0] * count

    def release(self, pages: Iterable[int]) -> None:
        self._num_free += len(list(pages))


# Columns of a simulation's sums; after them, tokens by batch size.
_PREFILL_MS, _DECODE_MS, _ROUNDS, _TOKENS, _BY_BATCH = range(5)


class Simulation:
    """One pass over the rows. Lengths are in tokens, the shared prefix not counted."""

    def __init__(
        self,
        profile: FileProfile,
        limits: Limits,
        costs: CostModel,
        replays: Mapping[DraftShape, Replay],
        schedule: Schedule,
        min_simulated: int,
    ) -> None:
        self._profile, self._limits, self._costs, self._schedule = profile, limits, costs, schedule
        kinds = len(profile.output_tokens_R)
        self._rates_of = {c: np.ones(kinds) if c is None else replays[c].rates() for c in schedule.items}
        assert all(len(rates) == kinds for rates in self._rates_of.values()), "other rows were replayed"
        self._is_followed = any(shape is not None and shape.ngram_match is None for shape in schedule.items)
        self._count = count = min(profile.num_rows, max(min_simulated, _TURNOVERS * limits.max_running))
        rng, passes = np.random.default_rng(0), -(-count // kinds)
        order = [np.arange(kinds) if profile.in_order else rng.permutation(kinds) for _ in range(passes)]
        self._kind_N = np.concatenate(order)[:count]
        self._prompt_N = profile.prompt_tokens[np.arange(count) % len(profile.prompt_tokens)] - profile.shared_prefix
        num_pages = (limits.kv_tokens - profile.shared_prefix) // limits.page_size
        self._lookahead = limits.lookahead(schedule)
        max_length = num_pages * limits.page_size - self._lookahead + 1  # the last token is never written
        if (longest := int(self._prompt_N.max())) >= max_length:
            raise TuningError(
                f"a row of {longest + profile.shared_prefix} tokens and {self._lookahead} slots ahead of it do not fit "
                f"a cache of {limits.kv_tokens} tokens",
                hint="raise engine.kv_cache_tokens, or tune for smaller drafts",
            )
        outputs_N = np.clip(profile.output_tokens_R[self._kind_N], 1, profile.max_tokens)
        self._output_N = np.minimum(outputs_N, max_length - self._prompt_N).astype(np.float64)
        self._made_N = np.zeros(count)  # tokens generated
        self._rounds_N = np.zeros(count)
        self._idle_N = np.full(count, limits.async_depth)  # rounds for which a request stays when it has ended
        self._scheduler = _scheduler(limits, num_pages, self._lookahead)
        params, key = SamplingParams(max_tokens=profile.max_tokens), RngKey(0, 0, 0)
        for row, prompt in enumerate(self._prompt_N.tolist()):
            request = Request(row, range(prompt), params, key)
            self._scheduler.waiting.append(Sequence(request, _tokens(prompt), max_length))
        # Where the cache holds any batch at its longest, pages never run short: they need not be counted.
        pages = -(-int((self._prompt_N + self._output_N).max() + self._lookahead) // limits.page_size)
        self._is_tight = limits.max_running * (pages + 1) > num_pages
        self._running_B = np.zeros(0, dtype=np.int64)  # request indices in the scheduler's order
        self._has_part = False  # a later chunk computes the rest of a prompt
        self._rounds_of_rows = RoundsOfRows()
        self._round_ms: dict[int, float] = {}
        self._sums = np.zeros(_BY_BATCH + limits.max_running + 1)
        self._marks: list[tuple[int, NDArray[np.float64], int]] = []  # after each chunk: rows admitted, sums, preempted
        if profile.shared_prefix:
            self._prefill(profile.shared_prefix)

    def run(self) -> Prediction:
        scheduler = self._scheduler
        while scheduler.waiting or scheduler.running:
            spans = scheduler.plan_prefill() if scheduler.waiting or self._has_part else []
            if spans:
                self._compute(spans)
            else:
                self._run_rounds()
        return self._prediction()

    def _compute(self, spans: list[PrefillSpan]) -> None:
        self._prefill(sum(span.end - span.start for span in spans))
        for span in spans:
            row, seq = span.seq.request.request_id, span.seq
            seq.num_computed_tokens = span.end
            if span.end == seq.num_prefill_tokens and not self._made_N[row]:  # the first token comes with the prompt
                self._made_N[row] = 1.0
                self._sums[_TOKENS] += 1.0
                seq.tokens = _tokens(span.end + 1)
        self._has_part = spans[-1].end < spans[-1].seq.num_prefill_tokens
        self._running_B = np.array([seq.request.request_id for seq in self._scheduler.running], dtype=np.int64)
        self._finish_ended()
        admitted = max(self._marks[-1][0] if self._marks else 0, *(span.seq.request.request_id + 1 for span in spans))
        self._marks.append((admitted, self._sums.copy(), self._scheduler.num_preemptions))

    def _prefill(self, tokens: int) -> None:
        """Full chunks and the rest."""
        whole, rest = divmod(tokens, self._limits.prefill_chunk)
        for size in [self._limits.prefill_chunk] * whole + [rest] * bool(rest):
            self._sums[_PREFILL_MS] += self._costs.prefill_ms(size, followed=self._is_followed)

    def _run_rounds(self) -> None:
        """Rounds up to the next event."""
        if self._is_tight:
            self._plan_round()
        req_idx_B = self._running_B
        batch = len(req_idx_B)
        rates_B = self._rates_of[self._schedule.at(batch)][self._kind_N[req_idx_B]]
        left_B = self._output_N[req_idx_B] - self._made_N[req_idx_B]
        # A row's own number of rounds, but for rounding, when it is replayed with one shape from end to end.
        wanted_B = np.ceil(left_B / rates_B - 1e-9)
        rounds = int((wanted_B + self._idle_N[req_idx_B]).min())
        if self._is_tight and rounds > 1:
            lengths_B = self._prompt_N[req_idx_B] + self._made_N[req_idx_B] + self._lookahead
            free = self._scheduler.num_pages * self._limits.page_size - (lengths_B + self._limits.page_size).sum()
            rounds = max(1, min(rounds, int(free / rates_B.sum())))
            if rounds > 1:  # prompts are admitted by the pages that the last round was planned with
                self._advance(rounds - 1, rates_B)
                self._plan_round()
                rounds = 1
        self._advance(rounds, rates_B)
        self._finish_ended()

    def _plan_round(self) -> None:
        """The pages of the next round, for which requests may be preempted."""
        before = list(self._scheduler.running)
        lengths = (self._prompt_N + np.ceil(self._made_N))[self._running_B].astype(np.int64).tolist()
        for seq, length in zip(before, lengths, strict=True):
            seq.num_computed_tokens = length - 1  # all but the root
        if preempted := len(before) - len(self._scheduler.plan_round()):
            for seq, length in zip(before[-preempted:], lengths[-preempted:], strict=True):
                seq.tokens = _tokens(length)
            self._running_B = self._running_B[:-preempted]

    def _advance(self, rounds: int, rates_B: NDArray[np.float64]) -> None:
        req_idx_B = self._running_B
        batch = len(req_idx_B)
        left_B = self._output_N[req_idx_B] - self._made_N[req_idx_B]
        own_B = np.minimum(np.ceil(left_B / rates_B - 1e-9), rounds)
        made_B = np.minimum(left_B, rounds * rates_B)
        self._made_N[req_idx_B] += made_B
        self._rounds_N[req_idx_B] += own_B
        self._idle_N[req_idx_B] -= (rounds - own_B).astype(np.int64)
        made = float(made_B.sum())
        self._sums[_TOKENS] += made
        self._sums[_BY_BATCH + batch] += made
        self._sums[_ROUNDS] += rounds
        self._sums[_DECODE_MS] += rounds * self._ms(batch)

    def _finish_ended(self) -> None:
        """Remove requests that have ended, once the host has read their end."""
        req_idx_B = self._running_B
        ended_B = (self._output_N[req_idx_B] - self._made_N[req_idx_B] <= 1e-9) & (self._idle_N[req_idx_B] <= 0)
        if not ended_B.any():
            return
        ended = [self._scheduler.running[b] for b in np.flatnonzero(ended_B)]
        for seq in ended:
            self._scheduler.finish(seq)
            self._rounds_of_rows.add(int(self._rounds_N[seq.request.request_id]))
        if self._limits.chunk_cost is not None:
            mean = self._rounds_of_rows.mean
            self._scheduler.min_free_requests = self._limits.chunk_cost.min_free_requests(
                self._limits.max_running, mean
            )
        self._running_B = req_idx_B[~ended_B]

    def _ms(self, batch: int) -> float:
        if batch not in self._round_ms:
            shape = self._schedule.at(batch)
            if shape is None:
                self._round_ms[batch] = self._costs.plain_ms(batch, followed=self._is_followed)
            else:
                self._round_ms[batch] = self._costs.round_ms(batch, shape)
        return self._round_ms[batch]

    def _prediction(self) -> Prediction:
        """Return the prediction for the whole file. All simulated rows have ended."""
        _, last, _ = self._marks[-1]
        more, preemptions = np.zeros_like(last), float(self._scheduler.num_preemptions)
        if extra := self._profile.num_rows - self._count:
            # After the first two turnovers, and before the admission that empties the queue.
            first = min(2 * self._limits.max_running, self._count // 4)
            admitted, begin, preempted = next(mark for mark in self._marks if mark[0] >= first)
            end_admitted, end, end_preempted = [mark for mark in self._marks if mark[0] < self._count][-1]
            assert end_admitted > admitted, "too few rows were simulated"
            times = extra / (end_admitted - admitted)
            more = times * (end - begin)
            preemptions += times * (end_preempted - preempted)
        total, steady = self._sums + more, last + more
        return Prediction(
            prefill_seconds=total[_PREFILL_MS] / 1e3,
            steady_seconds=steady[_DECODE_MS] / 1e3,
            drain_seconds=(total - steady)[_DECODE_MS] / 1e3,
            steady_tokens=steady[_TOKENS],
            output_tokens=total[_TOKENS],
            rounds=total[_ROUNDS],
            num_rows=self._profile.num_rows,
            num_simulated=self._count,
            preemptions=preemptions,
            tokens_by_batch=total[_BY_BATCH:],
        )


def _tokens(count: int) -> list[int]:
    """Return placeholders for tokens. Without a prefix cache, the scheduler reads only their number."""
    return cast(list[int], range(count))


def _scheduler(limits: Limits, num_pages: int, lookahead: int) -> Scheduler:
    """Return the engine's scheduler, without the prefix cache: the tokens that prompts share were subtracted."""
    cost = limits.chunk_cost
    return Scheduler(
        _PageCount(num_pages, limits.page_size),
        None,
        lookahead,
        lambda seq: None,
        limits.max_running,
        limits.prefill_chunk,
        1 if cost is None else max(1, limits.max_running // 16),
        1 if cost is None else cost.tokens,
    )
