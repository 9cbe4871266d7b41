"""The choice: the best draft shape at each batch size, and the schedule that the whole file is predicted to be fastest
with.

How the tokens of a file spread over batch sizes hardly depends on what is drafted, so they are taken from one
simulation; a set of shapes then costs, at each size, what its best one costs. The set of the best of each size is
narrowed by dropping the shape that is missed least, and improved by exchanging one at a time. The result is simulated
itself, and so are the best single shapes and plain decoding.

Shape suffixes: C draft shapes (the last is plain decoding), B batch sizes of the ladder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbatch.draft.schedule import ByBatch, Schedule, shapes_of
from specbatch.draft.shape import DraftShape
from specbatch.errors import TuningError
from specbatch.tune.costs import CostModel
from specbatch.tune.predict import predict
from specbatch.tune.profile import FileProfile, Limits, Prediction
from specbatch.tune.replay import Replay

Floats = NDArray[np.float64]
_FIXED_SIMULATED = 6  # single shapes that are simulated
_NUM_RANKED = 5  # shapes of a batch size that are reported
_GROUPS_SIMULATED = 3  # schedules of different match lengths
MAX_NODES = 64  # nodes of a tree
NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
NGRAM_NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
NGRAM_MATCHES = ((1, 3), (1, 5), (2, 3), (2, 5), (2, 8), (3, 5), (3, 8), (4, 8))  # shortest and longest


@dataclass(frozen=True, slots=True)
class ShapeSpeed:
    """A draft shape at a batch size."""

    shape: DraftShape | None
    batch: int
    round_ms: float
    tokens_per_round: float  # tokens per round of one request
    low: float  # lower end of the 90% interval of tokens_per_round over rows
    high: float

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.batch * self.tokens_per_round / self.round_ms


@dataclass(frozen=True, slots=True)
class BatchRanking:
    """The best draft shapes at a batch size, fastest first (plain decoding among them where it is), and plain
    decoding."""

    batch: int
    ranked: tuple[ShapeSpeed, ...]
    plain: ShapeSpeed


@dataclass(frozen=True, slots=True)
class Dropped:
    """A shape that the limits forbid, at all or for larger batches."""

    shape: DraftShape
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule with its prediction."""

    schedule: Schedule
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class SearchResult:
    rankings: tuple[BatchRanking, ...]  # rankings by rising batch size
    best: Plan
    entries: tuple[ShapeSpeed, ...]  # entries of the best schedule, each at the largest batch that it is for
    fixed: tuple[Plan, ...]  # single shapes without plain decoding, fastest first
    plain: Plan
    dropped: tuple[Dropped, ...]
    num_shapes: int  # shapes that were compared, plain decoding among them

    @property
    def pays(self) -> bool:
        """Return whether any draft shape is predicted to be faster than plain decoding."""
        return bool(shapes_of(self.best.schedule))


def neural_space(topk: int, depth: int, max_nodes: int = MAX_NODES) -> list[DraftShape]:
    """The shapes of a draft network that are worth replaying, of at most that many branches and steps. Chains have
    num_steps + 1 nodes; trees 2 to topk + (num_steps - 1) * topk^2 + 1, and of those the sizes in `NODES`, with the
    largest that is allowed.

    A tree of fewer nodes than a path of num_steps has is left out: none of its nodes is as deep as the last steps, so
    the same tree costs fewer steps. So are trees that another shape drafts in fewer steps: of one draft (the chain
    1/1/2), and of one step with fewer drafts than branches.
    """
    shapes = [DraftShape(steps, 1, steps + 1) for steps in range(1, depth + 1) if steps < max_nodes]
    for k in range(2, topk + 1):
        for steps in range(1, depth + 1):
            most = min(max_nodes, DraftShape(steps, k, 2).num_candidates + 1)
            sizes = sorted({n for n in NODES if n < most} | {most})
            shapes += [DraftShape(steps, k, n) for n in sizes if n > max(steps, 2, k if steps == 1 else 0)]
    return shapes


def ngram_space(max_nodes: int = MAX_NODES) -> list[DraftShape]:
    """Every size with every pair of match lengths."""
    return [DraftShape.ngram(n, *match) for match in NGRAM_MATCHES for n in NGRAM_NODES if n <= max_nodes]


def batch_ladder(max_running: int, graph_sizes: Sequence[int] = ()) -> list[int]:
    """Batch sizes to choose a shape for, up to `max_running` and with it: the sizes of captured graphs, between which a
    round costs the same; without any, every size up to 4 and about three to each doubling from there."""
    if graph_sizes:
        return sorted({size for size in graph_sizes if size < max_running} | {max_running})
    sizes, size = {max_running}, 1
    while size < max_running:
        sizes.add(size)
        size += max(1, size // 4 if size < 8 else size // 3)
    return sorted(sizes)


def search(
    replays: Sequence[Replay],
    costs: CostModel,
    profile: FileProfile,
    limits: Limits,
    *,
    max_shapes: int = 4,
) -> SearchResult:
    """Search the fastest schedule. `max_shapes`: the most different entries of the schedule, plain decoding included.

    N-gram drafts have one min_match and max_match for all entries. It raises TuningError if nothing fits the limits,
    and for costs that were not measured.
    """
    assert max_shapes >= 1, max_shapes
    kept, dropped = _fitting(replays, profile, limits)
    ladder = batch_ladder(limits.max_running, costs.graph_sizes)
    table = _Table.of(kept, costs, limits, ladder)
    by_shape = {replay.shape: replay for replay in kept}

    def plan(schedule: Schedule) -> Plan:
        return Plan(schedule, predict(profile, limits, costs, by_shape, schedule))

    plain = plan(ByBatch.always(None, ladder[-1]))
    # Where the tokens are made depends a little on how fast, so: with the best of each size.
    reference = plan(table.best_of_each_size()).prediction.tokens_by_batch
    weights_B, typical_B = _weights(reference, ladder)
    schedules: list[tuple[float, Schedule]] = []
    singles: list[tuple[float, Schedule]] = []
    for group in _Table.of(kept, costs, limits, ladder, typical_B).groups():
        total, chosen_B = _choose(group.cost_CB * weights_B, max_shapes)
        schedules.append((total, _schedule(ladder, group.shapes, chosen_B)))
        totals_C = (group.cost_CB[:-1] * weights_B).sum(axis=1).tolist()
        whole = zip(totals_C, group.shapes, strict=False)
        singles += [(total, ByBatch.always(shape, ladder[-1])) for total, shape in whole if total < np.inf]
    fixed = [plan(schedule) for schedule in _least(singles, _FIXED_SIMULATED)]
    plans = [plain, *(plan(schedule) for schedule in _least(schedules, _GROUPS_SIMULATED))]
    fixed.sort(key=lambda one: one.prediction.seconds)
    # Of equals the simplest: plain, a single shape, a schedule.
    plans[1:1] = fixed[:1]
    best = min(plans, key=lambda one: one.prediction.seconds)
    entries = [table.speed(table.shapes.index(shape), ladder.index(batch)) for batch, shape in best.schedule.entries]
    return SearchResult(table.rankings(), best, tuple(entries), tuple(fixed), plain, tuple(dropped), len(table.shapes))


def _fitting(replays: Sequence[Replay], profile: FileProfile, limits: Limits) -> tuple[list[Replay], list[Dropped]]:
    """Return the replays whose rounds fit the cache and the verification's memory, and the reasons against the others.
    Drafts must not end a row earlier that is as long as the traced ones. It raises TuningError if even plain decoding
    does not fit."""
    room = limits.kv_tokens // limits.page_size * limits.page_size
    prompt = int(profile.prompt_tokens.max())
    if prompt + 1 > room:
        raise TuningError(
            f"nothing is legal: a prompt of {prompt} tokens does not fit a cache of {limits.kv_tokens}",
            hint="raise engine.kv_cache_tokens or engine.memory_fraction",
        )
    longest = prompt + min(profile.max_tokens, int(profile.output_tokens_R.max()))
    room -= longest - 1  # the last token is never written to the cache
    kept, dropped, most = [], [], limits.max_verify_tokens
    for replay in replays:
        shape, nodes = replay.shape, replay.shape.num_draft_tokens
        ahead = limits.lookahead_of(shape)
        max_batch = limits.max_running if most is None else most // nodes
        reason = None
        if ahead > room:
            reason = (
                f"a row of {longest} tokens and {ahead} slots ahead do not fit a cache of {limits.kv_tokens} tokens"
            )
        elif not max_batch:
            reason = f"{nodes} nodes are more than the {most} tokens that a round may verify"
        elif max_batch < limits.max_running:
            reason = f"above {max_batch} rows: {most} tokens to verify"
        if reason is not None:
            dropped.append(Dropped(shape, reason))
        if ahead <= room and max_batch:
            kept.append(replay)
    return kept, dropped


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    replays: Sequence[Replay]
    shapes: tuple[DraftShape | None, ...]  # shapes of the replays, then None
    ladder: tuple[int, ...]
    round_CB: Floats  # milliseconds of a round; infinite where that is not legal
    tokens_C: Floats  # tokens per round and request
    follow_B: Floats  # milliseconds that following with the draft network adds to a plain round

    @staticmethod
    def of(
        replays: Sequence[Replay],
        costs: CostModel,
        limits: Limits,
        ladder: Sequence[int],
        typical_B: Sequence[int] | None = None,
    ) -> _Table:
        """Make the table. `typical_B`: the batch sizes whose costs are taken; None: those of the ladder. A shape must
        be legal for the sizes of the ladder."""
        shapes = (*(replay.shape for replay in replays), None)
        most, sizes = limits.max_verify_tokens, list(zip(ladder, typical_B or ladder, strict=True))
        round_CB = np.array(
            [
                [
                    costs.round_ms(typical, shape)
                    if most is None or shape is None or batch * shape.num_draft_tokens <= most
                    else np.inf
                    for batch, typical in sizes
                ]
                for shape in shapes
            ]
        )
        neural = any(shape is not None and shape.ngram_match is None for shape in shapes)
        follow_B = [costs.plain_ms(b, followed=neural) - costs.plain_ms(b) for _, b in sizes]
        tokens_C = np.array([*(replay.tokens_per_round for replay in replays), 1.0])
        return _Table(replays, shapes, tuple(ladder), round_CB, tokens_C, np.array(follow_B))

    def best_of_each_size(self) -> Schedule:
        """Return the best shape of each size, whether one schedule may mix the shapes or not."""
        best_B = (self.round_CB / self.tokens_C[:, None]).argmin(axis=0)
        return _schedule(self.ladder, self.shapes, best_B)

    def speed(self, c: int, b: int) -> ShapeSpeed:
        low, high = self.replays[c].interval if c < len(self.replays) else (1.0, 1.0)  # plain decoding is certain
        ms, tokens = float(self.round_CB[c, b]), float(self.tokens_C[c])
        return ShapeSpeed(self.shapes[c], self.ladder[b], ms, tokens, low, high)

    def rankings(self) -> tuple[BatchRanking, ...]:
        found = []
        for b, batch in enumerate(self.ladder):
            ms_C = self.round_CB[:, b]
            order = np.argsort(ms_C / self.tokens_C, kind="stable")[:_NUM_RANKED].tolist()
            ranked = tuple(self.speed(c, b) for c in order if np.isfinite(ms_C[c]))
            found.append(BatchRanking(batch, ranked, self.speed(len(self.replays), b)))
        return tuple(found)

    def groups(self) -> list[_Group]:
        """Shapes that one schedule may mix, each group with plain decoding at its end."""
        members: dict[tuple[int, int] | None, list[int]] = {}
        for i, shape in enumerate(self.shapes):
            if shape is not None:
                members.setdefault(shape.ngram_match, []).append(i)
        groups = []
        for group in members.values():
            group = [*group, len(self.shapes) - 1]
            cost_CB = self.round_CB[group] / self.tokens_C[group, None]
            cost_CB[-1] += self.follow_B
            groups.append(_Group(tuple(self.shapes[i] for i in group), cost_CB))
        return groups


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    shapes: tuple[DraftShape | None, ...]
    cost_CB: Floats  # milliseconds for a token of each request


def _schedule(ladder: Sequence[int], shapes: Sequence[DraftShape | None], chosen_B: NDArray[np.intp]) -> Schedule:
    return ByBatch(tuple(ladder), tuple(shapes[c] for c in chosen_B.tolist())).merged()


def _weights(tokens_by_batch: Floats, ladder: Sequence[int]) -> tuple[Floats, list[int]]:
    """Return, for each size of the ladder, the tokens that each request gets there, and their mean size. A size covers
    those above the size before it. A size without tokens counts a little, so that it gets the best of the chosen
    shapes, too."""
    batches = np.arange(len(tokens_by_batch))
    index_B = np.minimum(np.searchsorted(np.array(ladder), batches), len(ladder) - 1)
    totals_B = np.bincount(index_B, weights=tokens_by_batch, minlength=len(ladder))
    each_B = np.bincount(index_B, weights=tokens_by_batch / np.maximum(batches, 1), minlength=len(ladder))
    typical = np.where(each_B > 0, totals_B / np.maximum(each_B, 1e-300), ladder)
    return np.maximum(each_B, 1e-9 * each_B.sum() + 1e-300), [round(batch) for batch in typical.tolist()]


def _least(schedules: list[tuple[float, Schedule]], count: int) -> list[Schedule]:
    return [schedule for _, schedule in sorted(schedules, key=lambda pair: pair[0])[:count]]


def _choose(time_CB: Floats, max_shapes: int) -> tuple[float, NDArray[np.intp]]:
    """The least sum of times over all sizes with at most `max_shapes` different shapes, and (B,) the shape of each
    size."""
    shapes = list(dict.fromkeys(time_CB.argmin(axis=0).tolist()))
    while len(shapes) > max_shapes:
        losses = [time_CB[[s for s in shapes if s != out]].min(axis=0).sum() for out in shapes]
        del shapes[int(np.argmin(losses))]
    total = time_CB[shapes].min(axis=0).sum()
    while True:
        # (C, chosen): the time with one of the chosen shapes exchanged for another.
        others = [[s for s in shapes if s != out] for out in shapes]
        kept = [time_CB[rest].min(axis=0) if rest else np.full(time_CB.shape[1], np.inf) for rest in others]
        times = np.stack([np.minimum(time_CB, best_B).sum(axis=1) for best_B in kept], axis=1)
        into, out = np.unravel_index(int(times.argmin()), times.shape)
        if not times[into, out] < total * (1 - 1e-12):
            break
        shapes, total = [*others[int(out)], int(into)], times[into, out]
    chosen: NDArray[np.intp] = np.array(shapes, dtype=np.intp)[time_CB[shapes].argmin(axis=0)]
    return float(total), chosen
