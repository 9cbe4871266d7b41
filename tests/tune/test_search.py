"""The search against exhaustive enumeration on a small space, and what limits do to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from specbatch.draft.schedule import ByBatch, shapes_of
from specbatch.draft.shape import DraftShape
from specbatch.errors import ConfigError, TuningError
from specbatch.models.pass_weights import ExpertCurve
from specbatch.tune.costs import CostModel, Measurement
from specbatch.tune.predict import predict
from specbatch.tune.profile import FileProfile, Limits
from specbatch.tune.replay import Replay
from specbatch.tune.search import NODES, SearchResult, _choose, _Table, batch_ladder, neural_space, ngram_space, search
from tests.tune.mixture import mixture_ms, uniform_curve

SPACE: list[DraftShape] = [DraftShape(1, 1, 2), DraftShape(3, 1, 4), DraftShape(6, 1, 7), DraftShape(3, 3, 16)]
RATES = (1.7, 2.6, 3.2, 3.6)
LADDER = (1, 4, 16, 64)
FEW_SIZES = (4, 16, 64)
LIMITS = Limits(max_running=64, kv_tokens=1_000_000, prefill_chunk=2048)


def replay_of(shape: DraftShape, rate: float, outputs: np.ndarray) -> Replay:
    rates = rate * np.random.default_rng(0).uniform(0.9, 1.1, len(outputs))
    return Replay(shape, (outputs - 1) / rates, outputs - 1, np.zeros(len(outputs)), ())


def costs(per_token: float = 0.04, draft: float = 0.3, sizes: tuple[int, ...] = LADDER) -> CostModel:
    """Verifying is free up to 100 tokens of a round, then paid by the token. A shape is chosen for each of `sizes`."""
    measured = []
    for b in (1, 2, 4, 8, 16, 32, 64):
        for w in (1, 2, 4, 8, 16):
            measured.append(Measurement("verify", b, w, 4.0 + per_token * max(0, b * w - 100)))
            measured += [
                Measurement(kind, b, w, draft + 0.001 * b * w) for kind in ("draft_start", "draft_step", "extend")
            ]
        measured.append(Measurement("plain", b, 1, 4.0 + per_token * max(0, b - 100)))
    return CostModel.fit([*measured, *(Measurement("prefill", 1, t, 3 + 0.02 * t) for t in (1, 2048))], sizes)


def profile_of(num_rows: int = 400) -> FileProfile:
    rng = np.random.default_rng(1)
    return FileProfile(rng.integers(20, 200, 50), rng.integers(5, 120, 20), num_rows, max_tokens=120)


def replays(space: list[DraftShape] = SPACE, rates: tuple[float, ...] = RATES) -> list[Replay]:
    outputs = profile_of().output_tokens_R
    return [replay_of(c, rate, outputs) for c, rate in zip(space, rates, strict=True)]


def found(model: CostModel | None = None, limits: Limits = LIMITS, max_shapes: int = 4) -> SearchResult:
    return search(replays(), model or costs(), profile_of(), limits, max_shapes=max_shapes)


def test_the_best_of_each_batch_size() -> None:
    result, model = found(), costs()
    speeds = dict(zip(SPACE, (r.tokens_per_round for r in replays()), strict=True))
    for ranking in result.rankings:
        by_hand = {c: 1e3 * ranking.batch * rate / model.round_ms(ranking.batch, c) for c, rate in speeds.items()}
        by_hand_all: dict[DraftShape | None, float] = {
            **by_hand,
            None: 1e3 * ranking.batch / model.plain_ms(ranking.batch),
        }
        assert [p.shape for p in ranking.ranked] == sorted(by_hand_all, key=lambda c: -by_hand_all[c])
        assert ranking.plain.tokens_per_second == pytest.approx(by_hand_all[None])
        for point in ranking.ranked:
            assert point.tokens_per_second == pytest.approx(by_hand_all[point.shape])
            assert point.low <= point.tokens_per_round <= point.high
    assert [r.batch for r in result.rankings] == list(LADDER)
    best = [ranking.ranked[0].shape for ranking in result.rankings]
    assert len(set(best)) >= 3, "a space in which one shape is always best shows little"


@cache
def every_assignment(per_token: float) -> list[tuple[tuple[DraftShape | None, ...], float]]:
    """Seconds of the file."""
    by_shape, times = {r.shape: r for r in replays()}, []
    model, profile = costs(per_token, sizes=FEW_SIZES), profile_of(150)
    for shapes in itertools.product([*SPACE, None], repeat=len(FEW_SIZES)):
        entries = ByBatch(FEW_SIZES, shapes)
        option = predict(profile, LIMITS, model, by_shape, entries)
        times.append((shapes, option.seconds))
    return times


@pytest.mark.parametrize("max_shapes", [1, 2, 3, 4])
@pytest.mark.parametrize("per_token", [0.0, 0.04, 0.3])
def test_the_schedule_is_the_best_of_all(max_shapes: int, per_token: float) -> None:
    """Every assignment of shapes to batch sizes, each simulated."""
    model, profile = costs(per_token, sizes=FEW_SIZES), profile_of(150)
    result = search(replays(), model, profile, LIMITS, max_shapes=max_shapes)
    assert len(set(result.best.schedule.items)) <= max_shapes
    best = min(time for shapes, time in every_assignment(per_token) if len(set(shapes)) <= max_shapes)
    # Tokens by batch size are from one simulation, so a tie or two may fall differently.
    assert result.best.prediction.seconds <= 1.003 * best
    assert result.best.prediction.seconds <= result.fixed[0].prediction.seconds
    assert result.best.prediction.seconds <= result.plain.prediction.seconds


def test_single_shapes_are_ranked_by_the_whole_file() -> None:
    result, by_shape = found(), {r.shape: r for r in replays()}
    seconds = {c: predict(profile_of(), LIMITS, costs(), by_shape, ByBatch.always(c, 64)).seconds for c in SPACE}
    assert [o.schedule.items[0] for o in result.fixed] == sorted(SPACE, key=lambda c: seconds[c])
    assert result.fixed[0].prediction.seconds == min(seconds.values())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_shapes", [1, 2, 3])
def test_narrowing_finds_the_best_set(seed: int, max_shapes: int) -> None:
    """On random tables, against all sets: dropping and exchanging may miss the best one, but not by much."""
    times = np.random.default_rng(seed).random((9, 6)) + 0.2
    total, chosen = _choose(times, max_shapes)
    assert len(set(chosen.tolist())) <= max_shapes
    assert total == pytest.approx(times[chosen, np.arange(6)].sum())
    best = min(times[list(s)].min(axis=0).sum() for s in itertools.combinations(range(9), max_shapes))
    assert best - 1e-12 <= total <= 1.03 * best


def test_nothing_pays() -> None:
    """Drafts that are never right, or that cost more than they save."""
    worthless = search(replays(rates=(1.0, 1.0, 1.0, 1.0)), costs(), profile_of(), LIMITS)
    assert not worthless.pays
    assert shapes_of(worthless.best.schedule) == []
    assert not found(costs(draft=30.0)).pays
    assert found().pays


def test_following_with_the_draft_is_paid_for() -> None:
    """Plain decoding within a schedule brings the draft network along; on its own it does not."""
    model, by_shape = costs(), {r.shape: r for r in replays()}
    mixed = ByBatch((1, 64), (SPACE[0], None))
    one = predict(profile_of(), LIMITS, model, by_shape, mixed)
    plain = predict(profile_of(), LIMITS, model, by_shape, ByBatch.always(None))
    assert one.steady_seconds > plain.steady_seconds
    group = _Table.of(replays(), model, LIMITS, LADDER).groups()[0]
    assert group.shapes[-1] is None
    assert group.cost_CB[-1].tolist() == [model.plain_ms(b, followed=True) for b in LADDER]


def test_what_does_not_fit_is_dropped_and_named() -> None:
    longest = int(profile_of().prompt_tokens.max() + profile_of().output_tokens_R.max())
    result = found(limits=replace(LIMITS, kv_tokens=longest + 6))
    assert {d.shape for d in result.dropped} == {DraftShape(3, 3, 16)}, "7 slots are left"
    assert "slots ahead" in result.dropped[0].reason
    bounded = found(limits=replace(LIMITS, max_verify_tokens=64))
    assert {(str(d.shape), d.reason.split(":")[0]) for d in bounded.dropped} == {
        ("1/1/2", "above 32 rows"), ("3/1/4", "above 16 rows"), ("6/1/7", "above 9 rows"), ("3/3/16", "above 4 rows"),
    }  # fmt: skip
    assert not bounded.fixed, "no single shape is legal for all batches"
    for batch in range(1, 65):
        shape = bounded.best.schedule.at(batch)
        assert shape is None or shape.num_draft_tokens * batch <= 64


def test_no_legal_point() -> None:
    with pytest.raises(TuningError, match="nothing is legal") as caught:
        found(limits=replace(LIMITS, kv_tokens=100))
    assert caught.value.hint is not None


def test_without_candidates_there_is_plain_decoding() -> None:
    result = search([], costs(), profile_of(), LIMITS)
    assert (result.pays, result.fixed, result.num_shapes) == (False, (), 1)


def test_match_lengths_are_not_mixed() -> None:
    space: list[DraftShape] = [
        DraftShape.ngram(4, 1, 3),
        DraftShape.ngram(9, 1, 3),
        DraftShape.ngram(4, 2, 5),
        DraftShape.ngram(9, 2, 5),
    ]
    # Each range is best at one end: small trees of the one, large trees of the other.
    outputs = profile_of().output_tokens_R
    rates = [replay_of(c, rate, outputs) for c, rate in zip(space, (2.2, 2.5, 1.9, 3.4), strict=True)]
    result = search(rates, costs(), profile_of(), LIMITS)
    used = shapes_of(result.best.schedule)
    assert used
    assert len({shape.ngram_match for shape in used}) == 1
    assert result.best.prediction.seconds <= result.fixed[0].prediction.seconds


def test_the_neural_space_is_legal_and_whole() -> None:
    space = neural_space(4, 3, max_nodes=60)
    assert len(set(space)) == len(space)
    for steps, topk, nodes in itertools.product(range(1, 5), range(1, 6), range(1, 70)):
        shape = DraftShape(steps, topk, nodes)
        try:
            shape.check()
        except ConfigError:
            assert shape not in space
            continue
        # No node of its is out of reach, and no smaller topk drafts the same tree.
        own = topk == 1 or (nodes > steps and nodes > 2 and (steps > 1 or nodes == topk + 1))
        # Trees have some of the sizes, and the largest.
        own &= topk == 1 or nodes in NODES or nodes == min(60, shape.num_candidates + 1)
        assert (shape in space) == (steps <= 3 and topk <= 4 and nodes <= 60 and own)
    ladder = neural_space(8, 8)
    assert all(shape.num_draft_tokens <= 64 for shape in ladder)
    assert DraftShape(8, 8, 64) in ladder
    assert len(ladder) < 900


def test_ngram_space_and_batch_ladders() -> None:
    space = ngram_space(16)
    for shape in [*space, *neural_space(8, 8)]:
        shape.check()
    assert max(shape.num_draft_tokens for shape in space) == 16
    assert batch_ladder(1) == [1]
    assert batch_ladder(6) == [1, 2, 3, 4, 5, 6]
    assert batch_ladder(64)[-1] == 64
    assert len(batch_ladder(256)) < 25
    assert batch_ladder(20, [1, 2, 4, 8, 16, 24]) == [1, 2, 4, 8, 16, 20]


def test_schedules() -> None:
    schedule = ByBatch((2, 4, 9), (SPACE[0], SPACE[0], None))
    assert [schedule.at(b) for b in (1, 2, 3, 4, 5, 9, 100)] == [SPACE[0]] * 4 + [None] * 3
    assert schedule.merged() == ByBatch((4, 9), (SPACE[0], None))
    assert schedule.merged().entries == ((4, SPACE[0]), (9, None))
    assert shapes_of(schedule) == [SPACE[0]]
    assert shapes_of(ByBatch.always(None)) == []
    assert [one.name for one in (schedule.merged(), ByBatch.always(None))] == ["<=4: 1/1/2, <=9: plain", "plain"]
    assert str(schedule.merged()) == "<=4: 1/1/2, <=9: plain"
    with pytest.raises(AssertionError):
        ByBatch((4, 4), (None, SPACE[0]))


CHAINS = [DraftShape(steps, 1, steps + 1) for steps in range(1, 9)]


def mixture_costs(batches: Sequence[int], widths: Sequence[int], experts: ExpertCurve | None) -> CostModel:
    """Costs of Qwen3-30B-A3B, timed at these sizes. A pass of its draft head takes 0.3 ms."""
    measured = [Measurement("plain", b, 1, mixture_ms(b, 1)) for b in batches]
    for b in batches:
        measured += [Measurement("verify", b, w, mixture_ms(b, w)) for w in widths]
        measured += [Measurement(kind, b, 1, 0.3) for kind in ("draft_start", "draft_step", "extend")]
    measured += [Measurement("prefill", 1, tokens, 3 + 0.01 * tokens) for tokens in (16, 2048)]
    return CostModel.fit(measured, experts=experts)


@pytest.mark.parametrize("batches", [(1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 4, 32, 256)])
def test_with_experts_deeper_drafts_are_for_more_rows(batches: tuple[int, ...]) -> None:
    """Few rows that verify more tokens read more experts; many rows read all in any case. A draft is accepted with a
    probability of 0.5."""
    outputs, depths = np.random.default_rng(0).integers(200, 600, 24), []
    rates = [sum(0.5**depth for depth in range(shape.num_draft_tokens)) for shape in CHAINS]
    by_shape = {shape: replay_of(shape, rate, outputs) for shape, rate in zip(CHAINS, rates, strict=True)}
    for rows in (4, 32, 256):
        profile = FileProfile(np.full(8, 1024), outputs, 4 * rows, max_tokens=600)
        limits = Limits(max_running=rows, kv_tokens=10_000_000, prefill_chunk=8192)
        model = mixture_costs([b for b in batches if b <= rows], range(1, 10), uniform_curve())
        best = search(list(by_shape.values()), model, profile, limits).best.schedule
        true = mixture_costs(range(1, rows + 1), range(1, 10), None)
        schedules = [best, *(ByBatch.always(shape, rows) for shape in (*CHAINS, None))]
        chosen, *fixed = (predict(profile, limits, true, by_shape, schedule).seconds for schedule in schedules)
        assert chosen <= 1.03 * min(fixed)
        steps = [0 if shape is None else shape.num_steps for shape in best.items]
        assert steps == sorted(steps), "in a schedule, too: at the end of a file few rows run"
        depths.append(steps[-1])
    assert depths[0] < depths[1] < depths[2], depths
