"""Wall time of a whole file under a schedule: an event simulation of what the engine's scheduler does.

Prompts go before rounds while there is room; a round takes what the cost model says of the running rows; each row
advances by its own tokens per round, that of the traced row it stands for; when the cache is full the youngest row
gives its pages back and is computed again later. Between two events (a row ends, the cache is full) nothing changes but
the rows' lengths, so those rounds are taken at once.

Of a large file a few thousand rows are simulated: the time between two rows' admissions in the middle of them, when as
many come as go, is what each further row takes.

Shape suffixes: R traced rows, N rows of the file (those simulated), B running rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from specbatch.draft.shape import DraftShape
from specbatch.engine.gathering import ChunkCost
from specbatch.tune.candidates import Candidate, lookahead
from specbatch.tune.costs import CostModel
from specbatch.tune.errors import TuningError
from specbatch.tune.replay import Replay
from specbatch.tune.schedule import Schedule
from specbatch.tune.trace import Trace

MIN_SIMULATED = 2000  # rows
_TURNOVERS = 8  # or as many times the running rows, where that is more


@dataclass(frozen=True, slots=True, eq=False)
class FileProfile:
    """The file's lengths. Row i of it has prompt i, counted round and round where only a sample was measured, and
    stands for a traced row: each of them comes as often as any other, in an order drawn anew for each turn. `in_order`:
    row i stands for traced row i, round and round, as where the traced rows themselves are run."""

    prompt_tokens: NDArray[np.int64]  # of the file's first rows, or of all of them
    output_tokens_R: NDArray[np.int64]  # of the traced rows
    num_rows: int
    max_tokens: int  # of a row's output
    shared_prefix: int = 0  # tokens that all prompts begin with, computed and kept once
    in_order: bool = False

    def __post_init__(self) -> None:
        if not len(self.prompt_tokens) or not len(self.output_tokens_R) or self.num_rows < 1:
            raise TuningError("the file has no rows to predict anything for")
        assert self.shared_prefix < self.prompt_tokens.min(), "the last token of a prompt is its own"

    @staticmethod
    def of(
        trace: Trace,
        max_tokens: int,
        prompt_tokens: NDArray[np.int64] | None = None,
        num_rows: int = 0,
        shared_prefix: int = 0,
    ) -> FileProfile:
        """With the traced rows' outputs, and where no prompts of the file are known, their prompts too. `num_rows` 0:
        as many as there are prompts."""
        prompts = np.array([row.num_prompt for row in trace.rows]) if prompt_tokens is None else prompt_tokens
        outputs = np.array([row.num_output for row in trace.rows], dtype=np.int64)
        return FileProfile(prompts.astype(np.int64), outputs, num_rows or len(prompts), max_tokens, shared_prefix)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the running rows."""

    max_running: int  # rows
    kv_tokens: int  # slots of the cache
    prefill_chunk: int  # prompt tokens computed at once
    page_size: int = 1  # slots
    draft_kv_offset: int = 0  # 1 for a draft model, which has a slot of its own for the root
    max_verify_tokens: int | None = None  # rows x nodes of a round; None: no limit
    rounds_behind: int = 0  # for which a row that has ended keeps its place: 1 where the host reads a round late
    chunk_cost: ChunkCost | None = None  # for which short prompts are gathered; None: they are not


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Seconds of the file, loading and writing not counted."""

    prefill_seconds: float
    steady_seconds: float  # rounds while rows are waiting
    drain_seconds: float  # rounds behind the last admission
    steady_tokens: float  # committed up to the last admission
    output_tokens: float
    rounds: float
    num_rows: int
    num_simulated: int  # the others are extrapolated from the middle of these
    preemptions: float
    tokens_by_batch: NDArray[np.float64]  # [b]: tokens that rounds of b rows committed

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.steady_seconds + self.drain_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else math.inf

    @property
    def steady_tokens_per_second(self) -> float:
        """Of the file without its end, in which fewer and fewer rows run."""
        seconds = self.prefill_seconds + self.steady_seconds
        return self.steady_tokens / seconds if seconds else math.inf

    @property
    def mean_batch(self) -> float:
        """Running rows of a round, by the tokens they made."""
        total = self.tokens_by_batch.sum()
        return float(self.tokens_by_batch @ np.arange(len(self.tokens_by_batch)) / total) if total else 0.0


def predict(
    profile: FileProfile,
    limits: Limits,
    costs: CostModel,
    replays: Mapping[Candidate, Replay],
    schedule: Schedule,
    *,
    seed: int = 0,
    min_simulated: int = MIN_SIMULATED,
) -> Prediction:
    """`replays` holds every candidate of `schedule`, over the traced rows of `profile`.

    Raises TuningError for a row that does not fit the cache, and for a part of a round that was not measured.
    """
    simulation = Simulation(profile, limits, costs, replays, schedule, seed, min_simulated)
    simulation.run()
    return simulation.prediction()


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """The sums so far, after an admission."""

    admitted: int
    prefill: float
    decode: float
    rounds: float
    tokens: float
    preemptions: int
    tokens_by_batch: NDArray[np.float64]


class Simulation:
    """One pass over the rows. Times are milliseconds; lengths are in tokens, the shared prefix not counted."""

    def __init__(
        self,
        profile: FileProfile,
        limits: Limits,
        costs: CostModel,
        replays: Mapping[Candidate, Replay],
        schedule: Schedule,
        seed: int,
        min_simulated: int,
    ) -> None:
        self._profile, self._limits, self._costs, self._schedule = profile, limits, costs, schedule
        self._rates_of = {
            c: np.ones(len(profile.output_tokens_R)) if c is None else replays[c].rates() for c in schedule.candidates
        }
        for rates in self._rates_of.values():
            assert len(rates) == len(profile.output_tokens_R), "other rows were replayed"
        often = schedule.at(limits.max_running)
        # The first token comes with the prompt. The engine's own mean moves with the rows that have ended; this is
        # where it settles, if most rounds are full.
        rounds_R = (np.clip(profile.output_tokens_R, 1, profile.max_tokens) - 1) / self._rates_of[often]
        self._gather = 1 if limits.chunk_cost is None else limits.chunk_cost.places(limits.max_running, rounds_R.mean())
        self._followed = any(isinstance(c, DraftShape) for c in schedule.candidates)
        self._round_ms: dict[int, float] = {}
        self._count = min(profile.num_rows, max(min_simulated, _TURNOVERS * limits.max_running))
        rows_N = np.arange(self._count)
        rng, kinds = np.random.default_rng(seed), len(profile.output_tokens_R)
        turns = -(-self._count // kinds)
        order = [np.arange(kinds) if profile.in_order else rng.permutation(kinds) for _ in range(turns)]
        self._kind_N = np.concatenate(order)[: self._count]
        prompts_N = profile.prompt_tokens[rows_N % len(profile.prompt_tokens)]
        self._prompt_N = (prompts_N - profile.shared_prefix).astype(np.float64)
        outputs_N = np.minimum(profile.output_tokens_R[self._kind_N], profile.max_tokens)
        self._output_N = np.maximum(outputs_N, 1).astype(np.float64)
        # Slots behind a row's own tokens, in every round, whatever the batch: the engine's scheduler has one figure.
        self._ahead = max(lookahead(c, limits.draft_kv_offset if self._followed else 0) for c in schedule.candidates)
        self._pages = (limits.kv_tokens - profile.shared_prefix) // limits.page_size
        self._waiting = deque(range(self._count))
        self._made_N = np.zeros(self._count)  # tokens generated
        self._idle_N = np.full(self._count, limits.rounds_behind)  # rounds that a row stays for when it has ended
        self._running_B = np.zeros(0, dtype=np.int64)  # in order of admission
        self._prefill = self._decode = self._rounds = self._tokens = 0.0
        self._preemptions = 0
        self._tokens_by_batch = np.zeros(limits.max_running + 1)
        self._marks: list[_Mark] = []
        self._admitted = 0

    def run(self) -> None:
        if self._profile.shared_prefix:
            self._prefill += self._chunks_ms(self._profile.shared_prefix)
        while self._waiting or len(self._running_B):
            if not self._admit():
                self._advance()

    def _admit(self) -> bool:
        """Compute all prompts that there is room for now; False if there are none."""
        limits, tokens = self._limits, 0.0
        if not self._is_worth_a_chunk():
            return False
        new: list[int] = []
        used = self._pages_of(self._running_B)
        while self._waiting and len(self._running_B) + len(new) < limits.max_running:
            row = self._waiting[0]
            length = self._to_compute(row)
            pages = math.ceil((length + self._ahead) / limits.page_size)
            # A page for each running row stays free, as in the engine.
            if used + pages + len(self._running_B) + len(new) > self._pages:
                if not len(self._running_B) and not new:
                    length += self._profile.shared_prefix
                    raise TuningError(
                        f"a row of {length:.0f} tokens and {self._ahead} slots ahead of it do not fit a cache of"
                        f" {limits.kv_tokens} tokens",
                        hint="raise engine.kv_cache_tokens, or tune for smaller drafts",
                    )
                break
            self._waiting.popleft()
            used += pages
            tokens += length
            new.append(row)
        if not new:
            return False
        self._prefill += self._chunks_ms(tokens)
        self._admitted = max(self._admitted, max(new) + 1)
        added = np.array(new)
        self._tokens += float((self._made_N[added] == 0).sum())
        self._made_N[added] = np.maximum(self._made_N[added], 1.0)
        self._running_B = np.concatenate((self._running_B, added))
        self._leave()
        self._marks.append(
            _Mark(
                self._admitted, self._prefill, self._decode, self._rounds, self._tokens, self._preemptions,
                self._tokens_by_batch.copy(),
            )
        )  # fmt: skip
        return True

    def _is_worth_a_chunk(self) -> bool:
        """As the engine's scheduler decides it."""
        free, cost = self._limits.max_running - len(self._running_B), self._limits.chunk_cost
        if cost is None or free >= min(self._gather, len(self._waiting)):
            return True
        return free > 0 and sum(self._to_compute(row) for row in islice(self._waiting, free)) >= cost.tokens

    def _to_compute(self, row: int) -> float:
        """Tokens of a waiting row: its prompt, and of one that was preempted what it had written."""
        return float(self._prompt_N[row] + max(0.0, self._made_N[row] - 1))

    def _chunks_ms(self, tokens: float) -> float:
        """Of prompts computed one behind the other: full chunks and the rest."""
        whole, rest = divmod(round(tokens), self._limits.prefill_chunk)
        followed = self._followed
        full = whole * self._costs.prefill_ms(self._limits.prefill_chunk, followed=followed) if whole else 0.0
        return full + (self._costs.prefill_ms(rest, followed=followed) if rest else 0.0)

    def _lengths(self, req_idx_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """Slots that the next round may write up to; the last token made is the root, and in no slot yet."""
        return self._prompt_N[req_idx_B] + self._made_N[req_idx_B] - 1 + self._ahead

    def _pages_of(self, req_idx_B: NDArray[np.int64]) -> float:
        return float(np.ceil(self._lengths(req_idx_B) / self._limits.page_size).sum())

    def _advance(self) -> None:
        """Rounds up to the next event."""
        while len(self._running_B) > 1 and self._pages_of(self._running_B) > self._pages:
            self._waiting.appendleft(int(self._running_B[-1]))
            self._running_B = self._running_B[:-1]
            self._preemptions += 1
        req_idx_B = self._running_B
        batch = len(req_idx_B)
        rates_B = self._rates_of[self._schedule.at(batch)][self._kind_N[req_idx_B]]
        left_B = self._output_N[req_idx_B] - self._made_N[req_idx_B]
        # A row's own number of rounds, but for rounding, when it is replayed with one shape from end to end.
        wanted_B = np.ceil(left_B / rates_B - 1e-9).astype(np.int64)
        rounds = int((wanted_B + self._idle_N[req_idx_B]).min())
        free = self._pages - (self._lengths(req_idx_B) / self._limits.page_size + 1).sum()
        if rounds > 1:
            rounds = max(1, min(rounds, int(free * self._limits.page_size / rates_B.sum())))
        made_B = np.minimum(left_B, rounds * rates_B)
        self._made_N[req_idx_B] += made_B
        self._idle_N[req_idx_B] -= np.maximum(rounds - wanted_B, 0)
        made = float(made_B.sum())
        self._tokens += made
        self._tokens_by_batch[batch] += made
        self._rounds += rounds
        self._decode += rounds * self._ms(batch)
        self._leave()

    def _leave(self) -> None:
        """Rows that have ended, and are known to have, make room."""
        req_idx_B = self._running_B
        stays_B = (self._output_N[req_idx_B] - self._made_N[req_idx_B] > 1e-9) | (self._idle_N[req_idx_B] > 0)
        self._running_B = req_idx_B[stays_B]

    def _ms(self, batch: int) -> float:
        if batch not in self._round_ms:
            candidate = self._schedule.at(batch)
            if candidate is None:
                self._round_ms[batch] = self._costs.plain_ms(batch, followed=self._followed)
            else:
                self._round_ms[batch] = self._costs.round_ms(batch, candidate)
        return self._round_ms[batch]

    def prediction(self) -> Prediction:
        """Of the whole file, once `run` has returned."""
        last = self._marks[-1]
        extra = self._profile.num_rows - self._count
        prefill, steady, drain = self._prefill, last.decode, self._decode - last.decode
        rounds, tokens, preemptions = self._rounds, self._tokens, float(self._preemptions)
        steady_tokens = last.tokens
        by_batch = self._tokens_by_batch.copy()
        if extra:
            # Behind the first two turnovers, and in front of the admission that empties the queue.
            before = [mark for mark in self._marks if mark.admitted < self._count]
            begin = next(m for m in self._marks if m.admitted >= min(2 * self._limits.max_running, self._count // 4))
            end = before[-1]
            assert end.admitted > begin.admitted, "too few rows were simulated"
            times = extra / (end.admitted - begin.admitted)
            prefill += times * (end.prefill - begin.prefill)
            steady += times * (end.decode - begin.decode)
            rounds += times * (end.rounds - begin.rounds)
            tokens += times * (end.tokens - begin.tokens)
            steady_tokens += times * (end.tokens - begin.tokens)
            preemptions += times * (end.preemptions - begin.preemptions)
            by_batch += times * (end.tokens_by_batch - begin.tokens_by_batch)
        return Prediction(
            prefill / 1e3, steady / 1e3, drain / 1e3, steady_tokens, tokens, rounds, self._profile.num_rows,
            self._count, preemptions, by_batch,
        )  # fmt: skip
