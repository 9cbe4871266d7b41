"""The choice: the best candidate at each batch size, and the schedule that the whole file is predicted to be fastest
with.

How the rows of a file spread over batch sizes hardly depends on what is drafted, so the tokens that are made at each
size are taken from one simulation; a set of shapes then costs, at each size, what its best one costs. The set of the
best of each size is narrowed by dropping the shape that is missed least, and improved by exchanging one at a time. What
comes out is simulated for itself, beside the best single shapes and plain decoding.

Shape suffixes: C candidates (the last is plain decoding), B batch sizes of the ladder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbatch.draft.shape import DraftShape
from specbatch.tune.candidates import Candidate, NgramShape, lookahead, num_nodes
from specbatch.tune.costs import CostModel
from specbatch.tune.errors import TuningError
from specbatch.tune.predict import MIN_SIMULATED, FileProfile, Limits, Prediction, predict
from specbatch.tune.replay import Replay
from specbatch.tune.schedule import Schedule, ScheduleEntry
from specbatch.tune.space import batch_ladder

Floats = NDArray[np.float64]
_FIXED_SIMULATED = 6  # single shapes that are simulated
_GROUPS_SIMULATED = 3  # schedules of different match lengths


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate at a batch size."""

    candidate: Candidate | None
    batch: int
    round_ms: float
    tokens_per_round: float  # of a row
    low: float  # of tokens_per_round, 90% interval over rows
    high: float

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.batch * self.tokens_per_round / self.round_ms


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """A batch size: its best candidates, fastest first (plain decoding among them where it is), and plain decoding."""

    batch: int
    ranked: tuple[Point, ...]
    plain: Point


@dataclass(frozen=True, slots=True)
class Dropped:
    """A candidate that the limits forbid, at all or for larger batches."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True, slots=True)
class Option:
    """A schedule with its prediction."""

    schedule: Schedule
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class SearchResult:
    choices: tuple[BatchChoice, ...]  # by rising batch size
    best: Option
    entries: tuple[Point, ...]  # of the best schedule, each at the largest batch that it is for
    fixed: tuple[Option, ...]  # single candidates without plain decoding, fastest first
    plain: Option
    dropped: tuple[Dropped, ...]
    num_candidates: int  # that were compared

    @property
    def pays(self) -> bool:
        """Whether anything is predicted to be faster than plain decoding."""
        return not self.best.schedule.is_plain


def search(
    replays: Sequence[Replay],
    costs: CostModel,
    profile: FileProfile,
    limits: Limits,
    *,
    batches: Sequence[int] = (),
    max_shapes: int = 4,
    seed: int = 0,
    min_simulated: int = MIN_SIMULATED,
    num_ranked: int = 5,
) -> SearchResult:
    """`batches`: sizes to choose for, ascending, the largest of which is limits.max_running; (): those of captured
    graphs, or a ladder. `max_shapes`: most different entries of the schedule, plain decoding counted.

    Prompt lookup has one min_match and max_match for all entries. Raises TuningError where nothing fits the limits, and
    for costs that were not measured.
    """
    assert max_shapes >= 1, max_shapes
    kept, dropped = _fitting(replays, profile, limits)
    ladder = list(batches) or batch_ladder(limits.max_running, costs.graph_sizes)
    table = _Table.of(kept, costs, limits, ladder)
    by_candidate = {replay.candidate: replay for replay in kept}

    def option(schedule: Schedule) -> Option:
        found = predict(profile, limits, costs, by_candidate, schedule, seed=seed, min_simulated=min_simulated)
        return Option(schedule, found)

    plain = option(Schedule.always(None, ladder[-1]))
    # Where the tokens are made depends a little on how fast, so: with the best of each size.
    reference = option(table.best_of_each_size()).prediction.tokens_by_batch
    weights_B, typical_B = _weights(reference, ladder)
    schedules: list[tuple[float, Schedule]] = []
    singles: list[tuple[float, Schedule]] = []
    for group in _Table.of(kept, costs, limits, ladder, typical_B).groups():
        total, chosen_B = _choose(group.cost_CB * weights_B, max_shapes)
        schedules.append((total, group.schedule(chosen_B)))
        totals_C = (group.cost_CB[:-1] * weights_B).sum(axis=1).tolist()
        whole = zip(totals_C, group.candidates, strict=False)
        singles += [(total, Schedule.always(c, ladder[-1])) for total, c in whole if total < np.inf]
    fixed = [option(schedule) for schedule in _least(singles, _FIXED_SIMULATED)]
    options = [plain, *(option(schedule) for schedule in _least(schedules, _GROUPS_SIMULATED))]
    fixed.sort(key=lambda o: o.prediction.seconds)
    # Of equals the simplest: plain, a single shape, a schedule.
    options[1:1] = fixed[:1]
    best = min(options, key=lambda o: o.prediction.seconds)
    points = _Points(kept, table)
    places = [(table.candidates.index(e.candidate), ladder.index(e.max_batch)) for e in best.schedule.entries]
    return SearchResult(
        points.choices(num_ranked),
        best,
        tuple(points.at(c, b) for c, b in places),
        tuple(fixed),
        plain,
        tuple(dropped),
        len(table.candidates),
    )


def _fitting(replays: Sequence[Replay], profile: FileProfile, limits: Limits) -> tuple[list[Replay], list[Dropped]]:
    """Those whose rounds fit the cache and the verification's memory, and what is wrong with the others: a row as long
    as the traced ones must not end earlier because of what is drafted. Raises TuningError where not even plain decoding
    fits."""
    room = limits.kv_tokens // limits.page_size * limits.page_size
    prompt = int(profile.prompt_tokens.max())
    if prompt + lookahead(None, 0) > room:
        raise TuningError(
            f"no legal point: a prompt of {prompt} tokens does not fit a cache of {limits.kv_tokens}",
            hint="raise engine.kv_cache_tokens or engine.memory_fraction",
        )
    longest = prompt + min(profile.max_tokens, int(profile.output_tokens_R.max()))
    room -= longest - 1  # the last token is never written to the cache
    kept, dropped = [], []
    for replay in replays:
        candidate, nodes = replay.candidate, replay.candidate.num_draft_tokens
        ahead = lookahead(candidate, limits.draft_kv_offset)
        if ahead > room:
            reason = (
                f"a row of {longest} tokens and {ahead} slots ahead do not fit a cache of {limits.kv_tokens} tokens"
            )
            dropped.append(Dropped(candidate, reason))
        elif limits.max_verify_tokens is not None and nodes > limits.max_verify_tokens:
            reason = f"{nodes} nodes are more than the {limits.max_verify_tokens} tokens that a round may verify"
            dropped.append(Dropped(candidate, reason))
        else:
            kept.append(replay)
            if limits.max_verify_tokens is not None and nodes * limits.max_running > limits.max_verify_tokens:
                most = limits.max_verify_tokens // nodes
                dropped.append(Dropped(candidate, f"above {most} rows: {limits.max_verify_tokens} tokens to verify"))
    return kept, dropped


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    candidates: tuple[Candidate | None, ...]  # the last is None
    ladder: tuple[int, ...]
    round_CB: Floats  # milliseconds of a round; infinite where that is not legal
    tokens_C: Floats  # tokens per round and row
    follow_B: Floats  # milliseconds that following with the draft network adds to a plain round

    @staticmethod
    def of(
        replays: Sequence[Replay],
        costs: CostModel,
        limits: Limits,
        ladder: Sequence[int],
        typical_B: Sequence[int] | None = None,
    ) -> _Table:
        """`typical_B`: the sizes to take the costs of; None: those of the ladder, for which it must be legal anyway."""
        candidates = (*(replay.candidate for replay in replays), None)
        most, sizes = limits.max_verify_tokens, list(zip(ladder, typical_B or ladder, strict=True))
        round_CB = np.array(
            [
                [
                    np.inf
                    if most is not None and c is not None and b * num_nodes(c) > most
                    else costs.round_ms(typical, c)
                    for b, typical in sizes
                ]
                for c in candidates
            ]
        )
        neural = any(isinstance(c, DraftShape) for c in candidates)
        follow_B = [costs.plain_ms(b, followed=neural) - costs.plain_ms(b) for _, b in sizes]
        tokens_C = np.array([*(replay.tokens_per_round for replay in replays), 1.0])
        return _Table(candidates, tuple(ladder), round_CB, tokens_C, np.array(follow_B))

    def best_of_each_size(self) -> Schedule:
        """Of all candidates, whether one schedule may mix them or not."""
        best_B = (self.round_CB / self.tokens_C[:, None]).argmin(axis=0)
        return _Group(self.candidates, self.ladder, self.round_CB).schedule(best_B)

    def groups(self) -> list[_Group]:
        """Candidates that one schedule may mix, each group with plain decoding at its end."""
        matches = dict.fromkeys(
            (c.min_match, c.max_match) if isinstance(c, NgramShape) else None for c in self.candidates[:-1]
        )
        groups = []
        for match in matches:
            rows = [
                i
                for i, c in enumerate(self.candidates[:-1])
                if match == ((c.min_match, c.max_match) if isinstance(c, NgramShape) else None)
            ]
            rows.append(len(self.candidates) - 1)
            cost_CB = self.round_CB[rows] / self.tokens_C[rows, None]
            cost_CB[-1] += self.follow_B
            groups.append(_Group(tuple(self.candidates[i] for i in rows), self.ladder, cost_CB))
        return groups


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    candidates: tuple[Candidate | None, ...]
    ladder: tuple[int, ...]
    cost_CB: Floats  # milliseconds for a token of each row

    def schedule(self, chosen_B: NDArray[np.intp]) -> Schedule:
        entries = zip(self.ladder, chosen_B.tolist(), strict=True)
        return Schedule(tuple(ScheduleEntry(batch, self.candidates[c]) for batch, c in entries)).merged()


def _weights(tokens_by_batch: Floats, ladder: Sequence[int]) -> tuple[Floats, list[int]]:
    """Of each size of the ladder, which stands for those up from the one below it: tokens that each row makes there,
    and the size at which they are made on average. A size that nothing is made at counts a little, so that there too
    the best of the chosen shapes is taken."""
    batches = np.arange(len(tokens_by_batch))
    places = np.minimum(np.searchsorted(np.array(ladder), batches), len(ladder) - 1)
    totals_B = np.bincount(places, weights=tokens_by_batch, minlength=len(ladder))
    each_B = np.bincount(places, weights=tokens_by_batch / np.maximum(batches, 1), minlength=len(ladder))
    typical = np.where(each_B > 0, totals_B / np.maximum(each_B, 1e-300), ladder)
    return np.maximum(each_B, 1e-9 * each_B.sum() + 1e-300), [round(batch) for batch in typical.tolist()]


def _least(schedules: list[tuple[float, Schedule]], count: int) -> list[Schedule]:
    return [schedule for _, schedule in sorted(schedules, key=lambda pair: pair[0])[:count]]


def _choose(time_CB: Floats, max_shapes: int) -> tuple[float, NDArray[np.intp]]:
    """The least sum of times over all sizes with at most `max_shapes` different candidates, and (B,) the candidate of
    each size."""
    shapes = list(dict.fromkeys(time_CB.argmin(axis=0).tolist()))
    while len(shapes) > max_shapes:
        losses = [time_CB[[s for s in shapes if s != out]].min(axis=0).sum() for out in shapes]
        del shapes[int(np.argmin(losses))]
    total = time_CB[shapes].min(axis=0).sum()
    while True:
        # (C, shapes): the time with one shape exchanged for a candidate.
        others = [[s for s in shapes if s != out] for out in shapes]
        kept = [time_CB[rest].min(axis=0) if rest else np.full(time_CB.shape[1], np.inf) for rest in others]
        times = np.stack([np.minimum(time_CB, best_B).sum(axis=1) for best_B in kept], axis=1)
        into, out = np.unravel_index(int(times.argmin()), times.shape)
        if not times[into, out] < total * (1 - 1e-12):
            break
        shapes, total = [*others[int(out)], int(into)], times[into, out]
    chosen: NDArray[np.intp] = np.array(shapes, dtype=np.intp)[time_CB[shapes].argmin(axis=0)]
    return float(total), chosen


class _Points:
    """Points of the table, with intervals, which are computed for those that are looked at only."""

    def __init__(self, replays: Sequence[Replay], table: _Table) -> None:
        self._replays, self._table = replays, table
        self._intervals: dict[int, tuple[float, float]] = {len(replays): (1.0, 1.0)}  # plain decoding is certain

    def at(self, c: int, b: int) -> Point:
        if c not in self._intervals:
            self._intervals[c] = self._replays[c].interval()
        ms, tokens = float(self._table.round_CB[c, b]), float(self._table.tokens_C[c])
        return Point(self._table.candidates[c], self._table.ladder[b], ms, tokens, *self._intervals[c])

    def choices(self, num_ranked: int) -> tuple[BatchChoice, ...]:
        choices = []
        for b, batch in enumerate(self._table.ladder):
            ms_C = self._table.round_CB[:, b]
            order = np.argsort(ms_C / self._table.tokens_C, kind="stable")[:num_ranked].tolist()
            ranked = tuple(self.at(c, b) for c in order if np.isfinite(ms_C[c]))
            choices.append(BatchChoice(batch, ranked, self.at(len(self._replays), b)))
        return tuple(choices)
