"""The cost model: monotone, close to what was measured, and straight in between."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.draft.shape import DraftShape
from specbatch.errors import TuningError
from specbatch.models.pass_weights import measured_curve
from specbatch.tune.costs import CostModel, Measurement, filled
from tests.tune.mixture import mixture_ms, mixture_of_experts, uniform_curve

BATCHES, WIDTHS = (1, 2, 4, 8, 32), (1, 2, 6, 16)


def grid_of(kind: str, values: np.ndarray) -> list[Measurement]:
    return [
        Measurement(kind, batch, width, float(values[i, j]))
        for i, batch in enumerate(BATCHES)
        for j, width in enumerate(WIDTHS)
    ]


def test_what_falls_is_half_way_between_what_contradicts_it() -> None:
    def fitted(*values: float) -> list[float]:
        model = CostModel.fit([Measurement("verify", 1, width, ms) for width, ms in enumerate(values, 1)])
        return [model.part_ms("verify", 1, width) for width in range(1, len(values) + 1)]

    assert fitted(1, 2, 3, 4) == [1, 2, 3, 4]
    assert fitted(4, 3, 2, 1) == [2.5] * 4
    assert fitted(1, 3, 2, 4) == [1, 2.5, 2.5, 4]
    assert fitted(3, 0) == [1.5, 1.5]
    assert fitted(1, 5, 2, 4) == [1, 3.5, 3.5, 4.5]


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_fits_never_fall(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.random((len(BATCHES), len(WIDTHS))) * rng.choice([0.1, 10.0, 1000.0])
    kept = rng.random(values.shape) < 0.6  # not all of the grid is measured
    kept[0, 0] = True
    largest = rng.integers(1, len(BATCHES) + 1), rng.integers(1, len(WIDTHS) + 1)
    kept[largest[0] :], kept[:, largest[1] :] = False, False
    measured = [m for m, keep in zip(grid_of("verify", values), kept.ravel(), strict=True) if keep]
    surface = CostModel.fit(measured).surfaces["verify"]
    inside = np.array([[surface.at(b, w) for w in (*range(1, 18), 40)] for b in (*range(1, 20), 32, 33, 100)])
    assert np.diff(inside, axis=0).min() >= -1e-9 * inside.max()
    assert np.diff(inside, axis=1).min() >= -1e-9 * inside.max()


def test_a_rising_measurement_is_kept_and_straight_in_between() -> None:
    values = np.array([[1.0 + 0.5 * b + 0.1 * w + 0.01 * b * w for w in WIDTHS] for b in BATCHES])
    model = CostModel.fit(grid_of("verify", values))
    assert all(abs(r.percent) < 1e-6 for r in model.residuals)
    for b, w in itertools.product((1, 3, 5, 20, 32, 48), (1, 3, 4, 11, 16, 20)):
        assert model.part_ms("verify", b, w) == pytest.approx(1 + 0.5 * b + 0.1 * w + 0.01 * b * w)


def test_cells_that_were_not_measured() -> None:
    whole = np.array([[1.0 + b + 2 * w for w in WIDTHS] for b in BATCHES])
    holes = whole.copy()
    holes[3:, 2:] = holes[1, 1] = np.nan
    assert filled(holes, BATCHES, WIDTHS) == pytest.approx(whole)
    one = np.full((2, 3), np.nan)
    one[0, 1] = 5.0
    assert (filled(one, (1, 2), (1, 2, 3)) == 5.0).all(), "with nothing else known, the same"


def test_repeated_measurements_are_averaged_and_outliers_show() -> None:
    model = CostModel.fit(
        [Measurement("plain", 1, 1, 2.0), Measurement("plain", 1, 1, 4.0), Measurement("plain", 2, 1, 1.0)]
    )
    assert model.plain_ms(1) == model.plain_ms(2) == 2.0
    assert [(r.batch, r.measured_ms) for r in model.residuals] == [(1, 3.0), (2, 1.0)]
    assert [round(r.percent) for r in model.residuals] == [-33, 100]


def test_a_fall_beyond_the_noise_is_there() -> None:
    """A library multiplies 16 rows in less time than 12, which every repetition says; by 1% the 24 are noise."""
    times = {8: 1.0, 12: 2.4, 16: 2.0, 20: 2.5, 24: 2.48}
    found = [Measurement("verify", 1, width, ms, 0.02) for width, ms in times.items()]
    surface = CostModel.fit([*found, Measurement("draft_step", 1, 1, 2.0), Measurement("draft_step", 1, 2, 1.0)])
    assert [surface.part_ms("verify", 1, width) for width in (8, 12, 16)] == [1.0, 2.4, 2.0]
    assert surface.part_ms("verify", 1, 14) == pytest.approx(2.2)
    assert surface.part_ms("verify", 1, 20) == surface.part_ms("verify", 1, 24) == pytest.approx(2.49)
    assert surface.part_ms("draft_step", 1, 1) == surface.part_ms("draft_step", 1, 2) == 1.5, "of unknown noise"
    assert [r.percent for r in surface.residuals if r.width in (12, 16)] == [0, 0]


@pytest.mark.parametrize("batch", [33, 64, 256, 4096])
def test_a_fall_that_was_measured_last_does_not_go_on(batch: int) -> None:
    """The library takes 32 rows in less time than 16, and the cache holds no more: 256 are not done in no time."""
    found = [Measurement("plain", b, 1, ms, 0.02) for b, ms in ((1, 1.0), (16, 2.4), (32, 2.0))]
    times = {(1, 2): 1.0, (1, 4): 1.2, (16, 2): 2.6, (16, 4): 3.0, (32, 2): 2.4, (32, 4): 2.2}
    found += [Measurement("verify", *place, ms, 0.02) for place, ms in times.items()]
    model = CostModel.fit(found)
    assert model.plain_ms(batch) == 2.0
    assert model.part_ms("verify", batch, 4) >= model.part_ms("verify", 32, 4) == 2.2
    assert model.part_ms("verify", 1, 64) == pytest.approx(1.2 + 0.1 * 60)
    assert model.part_ms("verify", batch, 64) >= model.part_ms("verify", batch, 4)
    # What was measured is as it was, and so is a fall between.
    assert [model.plain_ms(b) for b in (16, 24, 32)] == [2.4, 2.2, 2.0]


def test_repetitions_are_as_noisy_as_the_noisiest_in_any_order() -> None:
    fall = [Measurement("draft_step", 1, 1, 2.0, 0.02), Measurement("draft_step", 1, 2, 1.8, 0.02)]
    for noises, expected in (((0.02, 0.02), 1.8), ((0.02, 0.3), 1.9), ((0.3, 0.02), 1.9), ((math.inf, 0.02), 1.9)):
        again = [Measurement("draft_step", 1, 2, 1.8, rng) for rng in noises]
        model = CostModel.fit([fall[0], fall[0], *again])
        assert model.part_ms("draft_step", 1, 2) == pytest.approx(expected), noises


def test_verification_between_two_sizes_follows_plain_rounds() -> None:
    """Plain rounds leap from 1 to 2 rows; wider ones, timed at 1 and 16 rows only, are taken to do so as well, and to
    take more than that only where their own work shows: from 1 ms more to 9 at 16 rows, 4.5 at 8."""
    plain = {1: 10.0, 2: 20.0, 8: 21.0, 16: 22.0, 32: 23.0}
    measured = [Measurement("plain", batch, 1, ms) for batch, ms in plain.items()]
    for kind, beyond in (("verify", 0.0), ("verify_tree", 3.0)):
        measured += [Measurement(kind, 1, 4, 11.0 + beyond), Measurement(kind, 16, 4, 31.0 + beyond)]
    measured.append(Measurement("verify", 8, 6, 34.0))  # of a width timed at one size alone, others are filled in
    model = CostModel.fit(measured)
    for batch, more, tree in ((1, 1.0, 4.0), (2, 9 * 2 / 16, 4.0), (8, 9 * 8 / 16, 12 * 8 / 16), (16, 9.0, 12.0)):
        assert model.part_ms("verify", batch, 4) == pytest.approx(plain[batch] + more, rel=1e-3)
        assert model.part_ms("verify_tree", batch, 4) == pytest.approx(plain[batch] + tree, rel=1e-3)
    assert model.surfaces["verify_tree"].batches == (1, 2, 8, 16)  # beyond what was measured nothing is made up
    late = CostModel.fit([*measured[:5], Measurement("verify", 2, 5, 20.5), Measurement("verify", 16, 5, 31.0)])
    assert late.part_ms("verify", 8, 5) == pytest.approx(21 + 0.5 + 8.5 * 6 / 14, rel=1e-3), "no more than on the line"
    assert late.surfaces["verify"].batches == (2, 8, 16), "nor below the first"
    timed = {1: [11.0], 8: [26.0, 28.0], 32: [31.0]}  # on average 1, 6 and 8 ms more
    measured = measured[:5] + [Measurement("verify", batch, 5, ms) for batch, times in timed.items() for ms in times]
    between = CostModel.fit(measured)
    assert between.part_ms("verify", 2, 5) == pytest.approx(20 + 6 * 2 / 8, rel=1e-3), "by the sizes next to it"
    assert between.part_ms("verify", 16, 5) == pytest.approx(22 + 6, rel=1e-3)
    assert {(r.kind, r.batch) for r in model.residuals if r.kind != "plain"} == {
        ("verify", 1), ("verify", 8), ("verify", 16), ("verify_tree", 1), ("verify_tree", 16)
    }  # fmt: skip


def test_draft_extend_between_two_sizes_follows_that_of_plain_rounds() -> None:
    one = {1: 0.25, 2: 0.5, 4: 0.5, 16: 0.75}
    measured = [Measurement("extend", batch, 1, ms) for batch, ms in one.items()]
    measured += [
        Measurement("extend", batch, width, one[batch] + 0.125 * width) for batch in (1, 16) for width in (2, 6)
    ]
    model = CostModel.fit([*measured, *(Measurement("plain", batch, 1, 99.0) for batch in one)])
    for batch, width in itertools.product(one, (2, 6)):
        assert model.part_ms("extend", batch, width) == pytest.approx(one[batch] + 0.125 * width, rel=1e-3)


def test_verification_that_seems_to_take_less_than_plain_rounds() -> None:
    """Noise, and no reason for times below 0."""
    measured = [Measurement("plain", batch, 1, ms) for batch, ms in ((1, 10.0), (2, 1.0), (4, 10.0))]
    model = CostModel.fit([*measured, Measurement("verify", 1, 2, 2.0), Measurement("verify", 4, 2, 8.0)])
    assert [model.part_ms("verify", batch, 2) for batch in (1, 2, 4)] == pytest.approx([2, 2, 8], rel=1e-3)


def constant(**parts: float) -> CostModel:
    return CostModel.fit([Measurement(kind, 1, 1, ms) for kind, ms in parts.items()])


def test_a_round_is_the_sum_of_its_parts() -> None:
    model = constant(verify=100, draft_start=10, draft_step=3, extend=0.5, plain=50, prefill=7)
    assert model.round_ms(4, DraftShape(5, 1, 6)) == 100 + 10 + 4 * 3 + 0.5
    assert model.round_ms(4, None) == model.plain_ms(4) == 50
    assert model.plain_ms(4, followed=True) == 50.5
    assert model.round_ms(4, DraftShape.ngram(6, 2, 5)) == 100
    assert constant(verify=100, overhead=1).round_ms(4, DraftShape.ngram(6, 2, 5)) == 101
    steep = CostModel.fit([Measurement("verify", 4, width, 10.0 * width) for width in (1, 2, 6)])
    assert steep.round_ms(4, DraftShape.ngram(6, 2, 5)) == 60
    assert replace(steep, nodes={DraftShape.ngram(6, 2, 5): 1.5}).round_ms(
        4, DraftShape.ngram(6, 2, 5)
    ) == pytest.approx(15)
    # Trees have a surface of their own, where it was measured.
    apart = constant(verify=100, verify_tree=300, draft_start=10, extend=0.5)
    assert apart.round_ms(4, DraftShape(1, 1, 2)) == 110.5
    assert apart.round_ms(4, DraftShape(1, 2, 3)) == 310.5
    # A GPU's round takes what its graph and the copies around it do, and no less than the host needs for it.
    live = constant(verify=100, draft_start=10, extend=0.5, plain=50, copies=2, host=60)
    assert live.round_ms(4, DraftShape(1, 1, 2)) == 112.5
    assert live.plain_ms(4) == 60
    assert live.plain_ms(4, followed=True) == 60, "the draft network runs while the host does"
    assert constant(verify=100, copies=2, host=60).round_ms(4, DraftShape.ngram(6, 2, 5)) == 102
    assert constant(verify=10, host=60).round_ms(4, DraftShape.ngram(6, 2, 5)) == 60
    # Only one step: nothing of later ones is asked for.
    assert constant(verify=1, draft_start=2, extend=3).round_ms(1, DraftShape(1, 4, 4)) == 6


def test_widths_are_those_of_the_shape() -> None:
    points = [(kind, w) for kind in ("verify", "draft_start", "draft_step", "extend") for w in (1, 64)]
    model = CostModel.fit([Measurement(kind, 1, w, float(w)) for kind, w in points])
    assert model.round_ms(1, DraftShape(3, 4, 20)) == 20 + 4 + 2 * 4 + 4
    assert model.round_ms(1, DraftShape(5, 2, 4)) == 4 + 2 + 4 * 2 + 4, "a path is never longer than the tree"


def test_batches_are_padded_to_graphs() -> None:
    measured = [Measurement("plain", b, 1, float(b)) for b in (1, 8, 16)]
    padded = CostModel.fit(measured, graph_sizes=(8, 1, 4, 16))
    assert [padded.plain_ms(b) for b in (1, 2, 4, 5, 8, 9, 16, 24)] == [1, 4, 4, 8, 8, 16, 16, 24]
    assert CostModel.fit(measured).plain_ms(5) == 5
    # The host has nothing to do for padding.
    hosted = [*measured, *(Measurement("host", b, 1, 2.0 * b) for b in (1, 8, 16))]
    assert CostModel.fit(hosted, graph_sizes=(1, 8, 16)).plain_ms(6) == 12


@pytest.mark.parametrize(
    ("measurement", "message"),
    [
        (Measurement("verfy", 1, 1, 1.0), "no kind of measurement"),
        (Measurement("verify", 0, 1, 1.0), "not a measurement"),
        (Measurement("verify", 1, 1, float("nan")), "not a measurement"),
        (Measurement("verify", 1, 1, -1.0), "not a measurement"),
    ],
)
def test_bad_measurements(measurement: Measurement, message: str) -> None:
    with pytest.raises(TuningError, match=message):
        CostModel.fit([measurement])


@pytest.mark.parametrize("missing", ["verify", "draft_start", "draft_step", "extend"])
def test_what_was_not_measured_is_named(missing: str) -> None:
    parts = {"verify": 1.0, "draft_start": 1.0, "draft_step": 1.0, "extend": 1.0, "plain": 1.0}
    del parts[missing]
    with pytest.raises(TuningError, match=f"no measurement of {missing}") as caught:
        constant(**parts).round_ms(1, DraftShape(2, 1, 3))
    assert caught.value.hint is not None
    assert "plain" in caught.value.hint
    with pytest.raises(TuningError, match="prefill"):
        constant(**parts).prefill_ms(10)


@pytest.mark.parametrize(
    ("sizes", "error", "straight_error"),
    [((1, 256), 0.13, 0.7), ((1, 16, 256), 0.04, 0.35), ((1, 4, 16, 64, 256), 0.02, 0.15)],
)
def test_experts_between_the_measurements(sizes: tuple[int, ...], error: float, straight_error: float) -> None:
    """Few batch sizes are measured, and the rounds between them are known by the experts that they read. Straight lines
    between the measurements give far too little."""
    measured = [Measurement("verify", b, w, mixture_ms(b, w)) for b in sizes for w in (1, 2, 5, 8)]
    models = CostModel.fit(measured, experts=uniform_curve()), CostModel.fit(measured)
    cells = [(b, w) for b in (1, 2, 4, 8, 16, 32, 64, 100, 200, 256) for w in (1, 2, 3, 4, 6, 8)]
    found, straight = (
        max(abs(model.part_ms("verify", *cell) / mixture_ms(*cell) - 1) for cell in cells) for model in models
    )
    assert found < error
    assert straight > straight_error
    for model in models:
        assert all(abs(residual.percent) < 0.1 for residual in model.residuals), "measurements are kept"


def test_experts_above_the_measurements() -> None:
    """More tokens read the experts that are left. There are no more than all."""
    measured = [Measurement("verify", b, w, mixture_ms(b, w)) for b in (1, 2, 4) for w in (1, 2, 4)]
    model = CostModel.fit(measured, experts=uniform_curve())
    for cell in ((8, 4), (16, 4), (4, 16), (64, 2)):
        assert model.part_ms("verify", *cell) == pytest.approx(mixture_ms(*cell), rel=0.15)
    found = [model.part_ms("verify", b, 4) for b in range(1, 300)]
    assert np.diff(found).min() >= -1e-9


def test_plain_rounds_show_where_drafting_ones_rise() -> None:
    """At sizes at which only plain rounds were timed, verification takes longer by the experts that it reads."""
    sizes = (1, 2, 4, 8, 16, 32, 64, 256)
    measured = [Measurement("plain", b, 1, mixture_ms(b, 1)) for b in sizes]
    measured += [Measurement("verify", b, w, mixture_ms(b, w)) for b in (1, 256) for w in (1, 2, 4)]
    model = CostModel.fit(measured, experts=uniform_curve())
    for batch in sizes:
        assert model.part_ms("verify", batch, 4) == pytest.approx(mixture_ms(batch, 4), rel=0.08)


def test_a_measured_curve_is_used() -> None:
    """With a skewed router, rounds read fewer experts."""
    moe = mixture_of_experts()
    curve = measured_curve(moe, {4.0: 18.3, 16.0: 34.4, 64.0: 58.2, 2048.0: 110.0})
    measured = [Measurement("verify", b, w, mixture_ms(b, w, curve)) for b in (1, 256) for w in (1, 2, 5, 8)]
    good, uniform = (CostModel.fit(measured, experts=experts) for experts in (curve, uniform_curve()))
    cells = [(b, w) for b in (4, 16, 32, 64) for w in (1, 4)]
    errors = [max(abs(m.part_ms("verify", *c) / mixture_ms(*c, curve) - 1) for c in cells) for m in (good, uniform)]
    assert errors[0] < 0.2 < 0.3 < errors[1]
