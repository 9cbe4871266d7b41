"""Traces through both engines, and replays of them against live runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from specbatch.draft import DraftMethod, DraftParts, NoDraft, make_method
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.build import Built
from specbatch.engine.device_engine import DeviceEngine
from specbatch.engine.executor import GraphMode, RoundExecutor
from specbatch.errors import ModelError
from specbatch.kernels import ops_for
from specbatch.tune import measure
from specbatch.tune.candidates import NgramShape
from specbatch.tune.costs import CostModel, Measurement
from specbatch.tune.measure import probes, time_batch, time_plain, time_prompts
from specbatch.tune.replay import replay
from specbatch.tune.session import Finished, OutOfTime, Session
from specbatch.tune.timing import time_methods, time_steps
from specbatch.tune.trace import Trace
from specbatch.types import Request, RngKey, SamplingParams, SpeculationCounts
from tests.engine.test_nonfinite import all_nan
from tests.engine.test_out_of_memory import Replays
from tests.tiny_models import CPU, random_prompts, tiny_device_engine, tiny_engine

TOPK, DEPTH = 3, 3
OPS = ops_for(CPU, torch.float64)
CUDA = torch.device("cuda")
WIDE = DraftShape(DEPTH, TOPK, 1 + TOPK + (DEPTH - 1) * TOPK**2)
SHAPES = [DraftShape(1, 1, 2), DraftShape(3, 1, 4), DraftShape(2, 3, 6), DraftShape(3, 3, 10)]


def gpu_session(method: str, graphs: GraphMode) -> Session:
    """In float64, in which a GPU writes the texts that a CPU does."""
    engine = tiny_device_engine(method, WIDE, num_pages=512, prefix_cache=False, device=CUDA)
    parts = DraftParts(CUDA, ops_for(CUDA, torch.float64), engine._round.method.net, (1, 3))
    return Session(Built(engine, method, parts), graphs)


def session(method: str, on_device: bool, num_pages: int = 512) -> Session:
    """Over a tiny engine that was built for the widest shape."""
    engine: Any = (tiny_device_engine if on_device else tiny_engine)(
        method, WIDE, num_pages=num_pages, prefix_cache=False
    )
    net = engine._round.method.net if on_device else getattr(engine._proposer, "_net", None)
    return Session(Built(engine, method, DraftParts(CPU, OPS, net, (1, 3))), "none")


def requests(temperature: float = 0.0) -> list[Request]:
    return [
        Request(i, prompt, SamplingParams(max_tokens=6 + 5 * i, temperature=temperature), RngKey(7, i, 0))
        for i, prompt in enumerate(random_prompts(6))
    ]


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_both_engines_record_the_same(method: str) -> None:
    assert_same(*(session(method, on_device).trace(requests(), TOPK, DEPTH) for on_device in (False, True)))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_what_captures_in_the_middle_of_a_run_leave_of_the_record(
    method: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drafts for padding, between the rounds of rows. What a GPU does beyond that is tested there."""

    class Captures(RoundExecutor):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.mode, self.runner = "round", cast(Any, Replays(lambda key: False))

    monkeypatch.setattr("specbatch.engine.device_engine.RoundExecutor", Captures)
    tuned = session(method, on_device=True)
    # Padding has stream 0: of no row here, so that what is recorded of it shows.
    rows = [replace(row, rng=RngKey(7, 64 + row.request_id, 0)) for row in requests(temperature)]
    traced = tuned.trace(rows, TOPK, DEPTH)
    assert tuned.engine.executor.num_graphs > 1  # type: ignore[union-attr]
    assert_same(session(method, on_device=False).trace(rows, TOPK, DEPTH), traced)


def test_waves_share_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows traced in two waves, and again after another use, are those traced at once."""
    tuned = session("draft_model", on_device=True)
    expected = tuned.trace(requests(), TOPK, DEPTH).rows
    redrafted: list[object] = []
    set_methods = tuned.engine.set_methods

    def counted(methods: Any, *args: Any, **rest: Any) -> None:
        redrafted.append(methods)
        set_methods(methods, *args, **rest)

    monkeypatch.setattr(tuned.engine, "set_methods", counted)
    for _ in range(2):
        tuned.use(ByBatch.always(SHAPES[0]))
        redrafted.clear()
        waves = [tuned.trace(wave, TOPK, DEPTH) for wave in (requests()[:2], requests()[2:])]
        assert len(redrafted) == 1
        rows = [row for wave in waves for row in wave.rows]
        assert_same(Trace(tuple(rows), TOPK, DEPTH, False), Trace(expected, TOPK, DEPTH, False))
    tuned.trace(requests()[:1], TOPK, DEPTH - 1)
    assert len(redrafted) == 2, "of another depth"


@pytest.mark.parametrize("on_device", [False, True])
def test_what_was_in_use_before_a_trace_is_used_again(on_device: bool) -> None:
    tuned = session("draft_model", on_device)
    tuned.use(ByBatch.always(SHAPES[0]))
    before = tuned.run(requests()).counts
    tuned.trace(requests(), TOPK, DEPTH)
    tuned.use(ByBatch.always(SHAPES[0]))
    assert tuned.run(requests()).counts == before


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_graphs_record_the_same(method: str, temperature: float) -> None:
    """Graphs are captured when the first batch of a size comes up, in the middle of a run."""
    expected = session(method, on_device=False).trace(requests(temperature), TOPK, DEPTH)
    modes: list[GraphMode] = ["none", "round"]
    for graphs in modes:
        tuned = gpu_session(method, graphs)
        assert_same(expected, tuned.trace(requests(temperature), TOPK, DEPTH))
        captured = tuned.engine.executor.num_graphs  # type: ignore[union-attr]
        assert captured > 1 if graphs == "round" else not captured


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram"])
def test_parts_of_a_round_add_up(method: str) -> None:
    tuned = gpu_session(method, "round")
    assert isinstance(tuned.engine, DeviceEngine)
    shape = DraftShape(3, 1, 4)
    methods = [NoDraft(), make_method(method, shape, tuned.parts)]
    plain, drafting = time_methods(tuned.engine, 2, 20, methods, repeats=5)
    for times in (plain, drafting):
        assert sum(times[part] for part in ("draft", "verify", "extend")) == pytest.approx(times["round"], rel=0.2)
    assert plain["extend"] < plain["verify"], "nothing follows"
    assert method == "ngram" or drafting["draft"] > plain["draft"]


def assert_same(one: Trace, other: Trace) -> None:
    for mine, theirs in zip(one.rows, other.rows, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        rounds = slice(0, len(mine.tokens) - mine.num_prompt - 1)  # the last token is the root of no round
        for name in ("chain_PS", "tokens_PC", "parents_PC"):
            assert getattr(mine, name)[rounds].tolist() == getattr(theirs, name)[rounds].tolist(), name
        np.testing.assert_allclose(mine.scores_PC[rounds], theirs.scores_PC[rounds], atol=1e-5)


@pytest.mark.parametrize("on_device", [False, True], ids=["oracle", "device"])
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram"])
def test_replay_is_what_a_run_does(method: str, on_device: bool) -> None:
    tuned = session(method, on_device)
    trace = tuned.trace(requests(), TOPK, DEPTH)
    for shape in SHAPES:
        tuned.use(ByBatch.always(shape))
        if method == "ngram" and not shape.is_chain:
            continue
        live = tuned.run(requests())
        candidate: Any = shape
        if method == "ngram":
            candidate = NgramShape(shape.num_draft_tokens, 1, 3)
        replayed = replay(trace, candidate)
        assert replayed.rounds_R.tolist() == [c.speculation.rounds for c in live.completions]
        assert replayed.tokens_R.tolist() == [c.speculation.committed for c in live.completions]


def test_plain_again_and_sampled_trees() -> None:
    """After all of that, plain decoding gives the same text, and sampled trees are replayed exactly, too."""
    tuned = session("draft_model", on_device=False)
    tuned.use(ByBatch.always(None))
    expected = [c.token_ids for c in tuned.run(requests(0.9)).completions]
    trace = tuned.trace(requests(0.9), TOPK, DEPTH)
    assert trace.sampled
    assert [row.tokens[row.num_prompt :].tolist() for row in trace.rows] == expected
    tuned.use(ByBatch.always(SHAPES[-1]))
    live = tuned.run(requests(0.9))
    assert [c.token_ids for c in live.completions] == expected
    assert replay(trace, SHAPES[-1]).rounds_R.tolist() == [c.speculation.rounds for c in live.completions]


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram"])
def test_costs_are_measured_for_every_part(method: str) -> None:
    tuned = session(method, on_device=False)
    found = costs_of(tuned, [1, 3])
    assert tuned.engine.num_running == 0
    tuned.engine.check_integrity()
    model = CostModel.fit(found)
    lookup = NgramShape(5, 1, 3)
    # Chains and trees apart; of lookups, the root alone too.
    widths = {(m.kind, m.width) for m in found}
    assert {("verify", 1)} <= widths if method == "ngram" else {("verify", 2), ("verify_tree", 3)} <= widths
    for batch in (1, 2, 3):
        candidates: list[Any] = [lookup] if method == "ngram" else list(SHAPES)
        for candidate in candidates:
            assert 0 < model.round_ms(batch, candidate) < 10_000
        assert 0 < model.plain_ms(batch) < 10_000
    assert 0 < model.prefill_ms(7) <= model.prefill_ms(32)
    # The engine is as good as new.
    tuned.use(ByBatch.always(None))
    plain = [c.token_ids for c in tuned.run(requests()).completions]
    tuned.use(ByBatch.always(SHAPES[1]))
    assert [c.token_ids for c in tuned.run(requests()).completions] == plain


def test_only_batches_that_fit_are_timed() -> None:
    """A cache that holds two of the rows must not say what three of them cost."""
    tuned = session("ngram", on_device=False, num_pages=200)
    assert time_batch(tuned, 1, 20, DEPTH, TOPK, 512)
    assert not time_batch(tuned, 3, 20, DEPTH, TOPK, 512)
    tuned = session("ngram", on_device=False)
    assert time_batch(tuned, 3, 20, DEPTH, TOPK, 512)
    assert not time_batch(tuned, 300, 20, DEPTH, TOPK, 512), "no width for so many rows"
    assert tuned.engine.num_running == 0


def test_steps_are_timed_and_leave_nothing_behind() -> None:
    tuned = session("draft_model", on_device=True)
    assert isinstance(tuned.engine, DeviceEngine)
    tuned.use(ByBatch.always(None))
    expected = [c.token_ids for c in tuned.run(requests()).completions]
    for batch in (1, 4):
        whole, host = time_steps(tuned.engine, batch, 50, steps=5)
        assert whole / 2 < host <= whole < 10_000, "on a CPU there is next to nothing to wait for"
        assert (tuned.engine.num_running, tuned.engine.num_waiting) == (0, 0)
        assert not tuned.engine._reports
        tuned.engine.check_integrity()
    assert [c.token_ids for c in tuned.run(requests()).completions] == expected
    tuned.use(ByBatch.always(SHAPES[1]))
    assert [c.token_ids for c in tuned.run(requests()).completions] == expected


@pytest.mark.parametrize("topk", [1, 3, 8, 16])
def test_shapes_that_are_timed(topk: int) -> None:
    for depth in (2, 3, 8):
        few, every = probes(depth, topk), probes(depth, topk, every=True)
        assert len(set(every)) == len(every)
        assert set(few) <= set(every)
        for shape in every:
            shape.check()
        assert [s.num_steps for s in every if s.is_chain] == list(range(1, depth + 1))
        # What a later step costs is told by what the first one does.
        assert {s.topk for s in every} == {s.topk for s in every if s.num_steps == 1}
    sizes = [s.num_draft_tokens for s in every if (s.num_steps, s.topk) == (2, topk)]
    assert sorted(sizes) == {1: [3], 3: [], 8: [12, 24, 32, 48, 64], 16: [24, 48, 64]}[topk]


def test_what_a_later_step_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chains of every length on a device, each beyond the first step."""
    tuned = session("draft_model", on_device=True)

    def time_methods(engine: Any, batch: int, context: int, methods: list[DraftMethod]) -> list[dict[str, float]]:
        drafts = [1.0 + 0.25 * (method.max_path - 2) for method in methods]
        return [{"draft": draft, "verify": 2.0, "extend": 1.0, "round": 3.0 + draft} for draft in drafts]

    monkeypatch.setattr(measure, "time_methods", time_methods)
    found = time_batch(tuned, 2, 20, 6, TOPK, 512)
    assert {m.width for m in found if m.kind == "verify"} == set(range(2, 8))
    assert {m.milliseconds for m in found if m.kind == "draft_start"} == {1.0}
    assert {m.milliseconds for m in found if m.kind == "draft_step"} == {0.25}
    # A difference is noisier than what it is taken of: 2% of 1.25 and of 1.0 are 13% of 0.25.
    rng = max(m.rng for m in found if m.kind == "draft_step")
    assert rng == pytest.approx(0.128, abs=1e-3)
    assert {m.rng for m in found if m.kind in ("draft_start", "verify", "extend")} == {0.02}


def test_later_steps_that_take_no_time_are_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = session("draft_model", on_device=True)

    def time_methods(engine: Any, batch: int, context: int, methods: list[DraftMethod]) -> list[dict[str, float]]:
        return [{"draft": 1.0, "verify": 2.0, "extend": 1.0, "round": 4.0} for _ in methods]

    monkeypatch.setattr(measure, "time_methods", time_methods)
    steps = [m for m in time_batch(tuned, 2, 20, 2, 1, 512) if m.kind == "draft_step"]
    assert [(m.milliseconds, m.rng) for m in steps] == [(0.0, math.inf)]


@pytest.mark.parametrize(("slow", "turns"), [(0.25, 4), (0.75, 2)])
def test_prompts_are_timed_by_turns(slow: float, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first ones load and compile is not what they cost; long ones are timed twice."""
    tuned = session("ngram", on_device=False)
    ran: list[int] = []

    def run(requests: list[Request]) -> Finished:
        (tokens,) = (len(request.prompt_token_ids) for request in requests)
        ran.append(tokens)
        seconds = (slow if tokens == 32 else 0.125) + (9.0 if len(ran) <= 3 else 0.0) + 0.0625 * (len(ran) > 6)
        return Finished([], seconds, SpeculationCounts(), 0)

    monkeypatch.setattr(tuned, "run", run)
    found = [(m.width, m.milliseconds) for m in time_prompts(tuned, 32)]
    assert found == [(16, 125.0), (24, 125.0), (32, 1e3 * slow)]
    assert ran[:6] == [16, 32, 24, 16, 32, 24]
    assert (ran.count(16), ran.count(24), ran.count(32)) == (4, 4, turns)


@pytest.mark.parametrize(
    ("whole", "host", "copies"),
    [(1.3, 0.25, 0.3), (3.0, 3.0, None), (0.9, 0.5, 0.0)],
    ids=["the GPU is busy", "the host is busy", "noise"],
)
def test_what_is_timed_on_a_device(
    whole: float, host: float, copies: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With made-up times: those of the device engine's graphs are of CUDA alone."""
    tuned = session("draft_model", on_device=True)
    parts = {"draft": 0.5, "verify": 0.75, "extend": 0.25}

    def time_methods(engine: Any, batch: int, context: int, methods: list[Any]) -> list[dict[str, float]]:
        return [parts | {"round": 1.0} for _ in methods]

    monkeypatch.setattr(measure, "time_methods", time_methods)
    monkeypatch.setattr(measure, "time_steps", lambda engine, batch, context: (whole, host))
    found = time_plain(tuned, 2, 20) + time_batch(tuned, 2, 20, DEPTH, TOPK, 512)
    one = {(m.kind, m.width): m.milliseconds for m in found}
    assert {m.batch for m in found} == {2}
    assert (one["plain", 1], one["host", 1], one.get(("copies", 1))) == (1.0, host, pytest.approx(copies))
    assert (one["verify", 2], one["verify_tree", 3], one["draft_start", 1], one["extend", 1]) == (0.75, 0.75, 0.5, 0.25)
    assert CostModel.fit(found).plain_ms(2) == pytest.approx(max(1.0, whole))


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram"])
def test_what_a_plain_round_is_timed_of(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = session(method, on_device=True)
    assert isinstance(tuned.engine, DeviceEngine)
    followed: list[bool] = []

    def time_methods(engine: Any, batch: int, context: int, methods: list[DraftMethod]) -> list[dict[str, float]]:
        (plain,) = methods
        followed.append(plain.net is not None)
        return [{"round": 2.0, "extend": 1.0}]

    def time_steps(engine: Any, batch: int, context: int) -> tuple[float, float]:
        plain = tuned.engine._round.method  # type: ignore[union-attr]
        assert isinstance(plain, NoDraft), "the engine decodes plainly"
        assert plain.net is None
        return 3.0, 0.5

    monkeypatch.setattr(measure, "time_methods", time_methods)
    monkeypatch.setattr(measure, "time_steps", time_steps)
    tuned.use(ByBatch.always(SHAPES[0]))
    kinds = ["plain", "host", "copies", *(["extend"] if method != "ngram" else [])]
    assert [m.kind for m in time_plain(tuned, 2, 20)] == kinds
    assert followed == [False, *([True] if method != "ngram" else [])]
    assert not time_plain(tuned, 300, 20), "the cache does not hold so many rows"
    assert time_plain(tuned, 1, 10**6), "rows are no longer than requests may be"


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_parts_of_a_round_are_timed_and_leave_nothing_behind(method: str) -> None:
    tuned = session(method, on_device=True)
    assert isinstance(tuned.engine, DeviceEngine)
    expected = [c.token_ids for c in tuned.run(requests()).completions]
    shapes = [DraftShape(1, 1, 2), DraftShape(3, 1, 4)]
    times = time_methods(
        tuned.engine, 3, 20, [NoDraft(), *(make_method(method, shape, tuned.parts) for shape in shapes)]
    )
    for parts in times:
        assert sum(parts[name] for name in ("draft", "verify", "extend")) == pytest.approx(parts["round"], rel=0.5)
        assert min(parts.values()) > 0
    if method == "draft_model":
        assert times[2]["draft"] > times[1]["draft"] > times[0]["draft"]
    assert (tuned.engine.num_running, tuned.engine.num_waiting) == (0, 0)
    tuned.engine.check_integrity()
    assert [c.token_ids for c in tuned.run(requests()).completions] == expected


def test_steps_of_requests_that_end_are_not_timed() -> None:
    """With drafts that are often right, TIMED_TOKENS are written in fewer than 120 rounds."""
    tuned = session("draft_model", on_device=True)
    assert isinstance(tuned.engine, DeviceEngine)
    tuned.use(ByBatch.always(SHAPES[1]))
    with pytest.raises(AssertionError, match=r"ended|not every step"):
        time_steps(tuned.engine, 3, 20, steps=120)


def test_what_ran_before_does_not_change_what_is_gathered() -> None:
    engine = tiny_device_engine("draft_model", WIDE, max_batch_size=32, num_pages=512, prefix_cache=False)
    parts = DraftParts(CPU, OPS, engine._round.method.net, (1, 3))
    tuned = Session(Built(engine, "draft_model", parts), "none")
    tuned.use(ByBatch.always(None))
    assert engine._scheduler.min_free_requests == 2
    tuned.run(requests())
    assert engine._scheduler.min_free_requests > 2
    tuned.use(ByBatch.always(SHAPES[1]))
    assert engine._scheduler.min_free_requests == 2
    rounds = [c.speculation.rounds for c in tuned.run(requests()).completions]
    assert engine._rounds_of_rows.mean == pytest.approx(np.mean(rounds))


def costs_of(tuned: Session, batches: list[int]) -> list[Measurement]:
    found = time_prompts(tuned, 32)
    for batch in batches:
        found += time_plain(tuned, batch, 20) if tuned.is_on_device else []
        found += time_batch(tuned, batch, 20, DEPTH, TOPK, 512)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram"])
def test_on_a_gpu(method: str) -> None:
    """Traces, costs and captured rounds, over the kernels of the device."""
    tuned = gpu_session(method, "round")
    trace, expected = tuned.trace(requests(), TOPK, DEPTH), session(method, False).trace(requests(), TOPK, DEPTH)
    assert [row.tokens.tolist() for row in trace.rows] == [row.tokens.tolist() for row in expected.rows]
    model = CostModel.fit(costs_of(tuned, [1, 4]))
    assert model.plain_ms(4) > 0
    for shape in SHAPES if method != "ngram" else SHAPES[:2]:
        tuned.use(ByBatch.always(shape))
        live = tuned.run(requests())
        candidate: Any = NgramShape(shape.num_draft_tokens, 1, 3) if method == "ngram" else shape
        assert replay(trace, candidate).rounds_R.tolist() == [c.speculation.rounds for c in live.completions]
        assert model.round_ms(2, candidate) > 0


@pytest.mark.parametrize("on_device", [False, True])
def test_what_is_not_finished_in_time_is_dropped(on_device: bool) -> None:
    tuned = session("draft_model", on_device)
    expected = tuned.run(requests()).completions
    with pytest.raises(OutOfTime):
        tuned.run(requests(), until=0.0)
    assert (tuned.engine.num_running, tuned.engine.num_waiting) == (0, 0)
    tuned.engine.check_integrity()
    assert tuned.run(requests()).completions == expected
    with pytest.raises(OutOfTime):
        tuned.trace(requests(), TOPK, DEPTH, until=0.0)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_broken_model_is_told(on_device: bool) -> None:
    """What its rows and rounds take says nothing: an error with a hint, and no failed assertion."""
    engine: Any = (tiny_device_engine if on_device else tiny_engine)(
        "ngram", DraftShape(3, 1, 4), num_pages=512, prefix_cache=False, spoil=all_nan("lm_head.weight")
    )
    timed: list[Callable[[], object]] = [lambda: time_steps(engine, 2, 20), lambda: time_batch(broken, 2, 20, 0, 0, 64)]
    broken = Session(Built(engine, "ngram", DraftParts(CPU, OPS, None, (1, 3))), "none")
    with pytest.raises(ModelError, match="not finite"):
        broken.trace(requests(), 0, 0)
    with pytest.raises(ModelError, match="not finite"):
        timed[0 if on_device else 1]()
