"""What the parts of rounds and prompts take, and what is measured of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specbatch.counts import SpeculationCounts
from specbatch.draft import DraftMethod, DraftParts, NoDraft, make_method
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.errors import ModelError
from specbatch.setup.dummies import dummy_batch
from specbatch.tune import timing
from specbatch.tune.costs import CostModel, Measurement
from specbatch.tune.replay import Replayer
from specbatch.tune.session import Finished, Session
from specbatch.tune.timing import probes, time_batch, time_methods, time_plain, time_prompts, time_steps
from specbatch.types import Request
from tests.engine.test_nonfinite import all_nan
from tests.tiny_models import CPU, tiny_device_engine, tiny_engine
from tests.tracing import replayed
from tests.tune.test_session import DEPTH, OPS, SHAPES, TOPK, gpu_session, requests, session


def cuda_session(method: str, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Measured as on CUDA, with made-up times."""
    monkeypatch.setattr(Session, "on_cuda", True)
    return session(method, on_device=True)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram"])
def test_parts_of_a_round_add_up(method: str) -> None:
    tuned = gpu_session(method, "round")
    shape = DraftShape(3, 1, 4)
    methods = [NoDraft(), make_method(method, shape, tuned.parts)]
    with dummy_batch(tuned.engine, 2, 20):
        plain, drafting = time_methods(tuned.engine, methods)
    for times in (plain, drafting):
        assert sum(times[part] for part in ("draft", "verify", "extend")) == pytest.approx(times["round"], rel=0.2)
    assert plain["extend"] < plain["verify"], "nothing follows"
    assert method == "ngram" or drafting["draft"] > plain["draft"]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram"])
def test_costs_are_measured_for_every_part(method: str, on_device: bool) -> None:
    tuned = session(method, on_device)
    found = costs_of(tuned, [1, 3])
    assert tuned.engine.num_running == 0
    tuned.engine.check_integrity()
    model = CostModel.fit(found)
    ngram = DraftShape.ngram(5, 1, 3)
    # Chains and trees apart; of ngrams, the root alone too.
    widths = {(m.kind, m.width) for m in found}
    assert {("verify", 1)} <= widths if method == "ngram" else {("verify", 2), ("verify_tree", 3)} <= widths
    for batch in (1, 2, 3):
        candidates: list[Any] = [ngram] if method == "ngram" else list(SHAPES)
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
    tuned = session("ngram", on_device=False, num_pages=120)
    assert time_batch(tuned, 1, 20, DEPTH, TOPK, 512)
    assert not time_batch(tuned, 3, 20, DEPTH, TOPK, 512)
    tuned = session("ngram", on_device=False)
    assert time_batch(tuned, 3, 20, DEPTH, TOPK, 512)
    assert not time_batch(tuned, 300, 20, DEPTH, TOPK, 512), "no width for so many rows"
    assert tuned.engine.num_running == 0


def test_steps_are_timed_and_leave_nothing_behind() -> None:
    tuned = session("draft_model", on_device=True)
    tuned.use(ByBatch.always(None))
    expected = [c.token_ids for c in tuned.run(requests()).completions]
    for batch in (1, 4):
        with dummy_batch(tuned.engine, batch, 50):
            whole, host = time_steps(tuned.engine, 5)
        assert whole / 2 < host <= whole < 10_000, "on a CPU there is next to nothing to wait for"
        assert (tuned.engine.num_running, tuned.engine.num_waiting) == (0, 0)
        assert not tuned.engine._in_flight
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
        # A later step costs what the first one does not.
        assert {s.topk for s in every} == {s.topk for s in every if s.num_steps == 1}
    sizes = [s.num_draft_tokens for s in every if (s.num_steps, s.topk) == (2, topk)]
    assert sorted(sizes) == {1: [3], 3: [], 8: [12, 24, 32, 48, 64], 16: [24, 48, 64]}[topk]


def test_what_a_later_step_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chains of every length on a device, each beyond the first step."""
    tuned = cuda_session("draft_model", monkeypatch)

    def time_methods(engine: Any, methods: list[DraftMethod]) -> list[dict[str, float]]:
        drafts = [1.0 + 0.25 * (method.max_path - 2) for method in methods]
        return [{"draft": draft, "verify": 2.0, "extend": 1.0, "round": 3.0 + draft} for draft in drafts]

    monkeypatch.setattr(timing, "time_methods", time_methods)
    found = time_batch(tuned, 2, 20, 6, TOPK, 512)
    assert {m.width for m in found if m.kind == "verify"} == set(range(2, 8))
    assert {m.milliseconds for m in found if m.kind == "draft_start"} == {1.0}
    assert {m.milliseconds for m in found if m.kind == "draft_step"} == {0.25}
    # A difference is noisier than what it is taken of: 2% of 1.25 and of 1.0 are 13% of 0.25.
    noise = max(m.noise for m in found if m.kind == "draft_step")
    assert noise == pytest.approx(0.128, abs=1e-3)
    assert {m.noise for m in found if m.kind in ("draft_start", "verify", "extend")} == {0.02}


def test_later_steps_that_take_no_time_are_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = cuda_session("draft_model", monkeypatch)

    def time_methods(engine: Any, methods: list[DraftMethod]) -> list[dict[str, float]]:
        return [{"draft": 1.0, "verify": 2.0, "extend": 1.0, "round": 4.0} for _ in methods]

    monkeypatch.setattr(timing, "time_methods", time_methods)
    steps = [m for m in time_batch(tuned, 2, 20, 2, 1, 512) if m.kind == "draft_step"]
    assert [(m.milliseconds, m.noise) for m in steps] == [(0.0, math.inf)]


@pytest.mark.parametrize(("slow", "times"), [(0.25, 4), (0.75, 2)])
def test_prompts_are_timed_again_and_again(slow: float, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert (ran.count(16), ran.count(24), ran.count(32)) == (4, 4, times)


@pytest.mark.parametrize(
    ("whole", "host", "copies"),
    [(1.3, 0.25, 0.3), (3.0, 3.0, None), (0.9, 0.5, 0.0)],
    ids=["the GPU is busy", "the host is busy", "noise"],
)
def test_what_is_timed_on_a_device(
    whole: float, host: float, copies: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With made-up times: those of the device engine's graphs are of CUDA alone."""
    tuned = cuda_session("draft_model", monkeypatch)
    parts = {"draft": 0.5, "verify": 0.75, "extend": 0.25}

    def time_methods(engine: Any, methods: list[Any]) -> list[dict[str, float]]:
        return [parts | {"round": 1.0} for _ in methods]

    monkeypatch.setattr(timing, "time_methods", time_methods)
    monkeypatch.setattr(timing, "time_steps", lambda engine, steps: (whole, host))
    found = time_plain(tuned, 2, 20) + time_batch(tuned, 2, 20, DEPTH, TOPK, 512)
    one = {(m.kind, m.width): m.milliseconds for m in found}
    assert {m.batch for m in found} == {2}
    assert (one["plain", 1], one["host", 1], one.get(("copies", 1))) == (1.0, host, pytest.approx(copies))
    assert (one["verify", 2], one["verify_tree", 3], one["draft_start", 1], one["extend", 1]) == (0.75, 0.75, 0.5, 0.25)
    assert CostModel.fit(found).plain_ms(2) == pytest.approx(max(1.0, whole))


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram"])
def test_what_a_plain_round_is_timed_of(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = cuda_session(method, monkeypatch)
    followed: list[bool] = []

    def time_methods(engine: Any, methods: list[DraftMethod]) -> list[dict[str, float]]:
        followed.extend(method.net is not None for method in methods)
        return [{"round": 2.0, "extend": 1.0} for _ in methods]

    def time_steps(engine: Any, steps: int) -> tuple[float, float]:
        plain = tuned.engine.executor.rounds.at(1).method
        assert isinstance(plain, NoDraft), "the engine decodes plainly"
        assert plain.net is None
        return 3.0, 0.5

    monkeypatch.setattr(timing, "time_methods", time_methods)
    monkeypatch.setattr(timing, "time_steps", time_steps)
    tuned.use(ByBatch.always(SHAPES[0]))
    kinds = ["plain", "host", "copies", *(["extend"] if method != "ngram" else [])]
    assert [m.kind for m in time_plain(tuned, 2, 20)] == kinds
    assert followed == [False, *([True] if method != "ngram" else [])]
    assert not time_plain(tuned, 300, 20), "the cache does not hold so many rows"
    assert time_plain(tuned, 1, 10**6), "no request is longer than it may be"


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_parts_of_a_round_are_timed_and_leave_nothing_behind(method: str) -> None:
    tuned = session(method, on_device=True)
    expected = [c.token_ids for c in tuned.run(requests()).completions]
    shapes = [DraftShape(1, 1, 2), DraftShape(3, 1, 4)]
    methods = [NoDraft(), *(tuned.make(shape) for shape in shapes)]
    with dummy_batch(tuned.engine, 3, 20):
        times = time_methods(tuned.engine, methods)
        time_steps(tuned.engine, 2)
        again = time_methods(tuned.engine, methods[:1])
    assert again[0]["round"] < 10 * times[0]["round"] + 100
    for parts in times:
        # Each figure is a median of its own: on a busy machine they are of different repeats.
        assert 0.2 < sum(parts[name] for name in ("draft", "verify", "extend")) / parts["round"] < 5
        assert min(parts.values()) > 0
    if method == "draft_model":
        assert times[2]["draft"] > times[1]["draft"] > times[0]["draft"]
    assert (tuned.engine.num_running, tuned.engine.num_waiting) == (0, 0)
    tuned.engine.check_integrity()
    assert [c.token_ids for c in tuned.run(requests()).completions] == expected


def test_steps_of_requests_that_end_are_not_timed() -> None:
    """With drafts that are often right, TIMED_TOKENS are written in fewer than 120 rounds."""
    tuned = session("draft_model", on_device=True)
    tuned.use(ByBatch.always(SHAPES[1]))
    with pytest.raises(AssertionError, match=r"ended|not every step"), dummy_batch(tuned.engine, 3, 20):
        time_steps(tuned.engine, 120)


def costs_of(tuned: Session, batches: list[int]) -> list[Measurement]:
    found = time_prompts(tuned, 32)
    for batch in batches:
        found += time_plain(tuned, batch, 20) if tuned.on_cuda else []
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
        candidate: Any = DraftShape.ngram(shape.num_draft_tokens, 1, 3) if method == "ngram" else shape
        assert replayed(Replayer(trace), candidate).rounds_R.tolist() == [
            c.speculation.rounds for c in live.completions
        ]
        assert model.round_ms(2, candidate) > 0


@pytest.mark.parametrize("on_device", [False, True])
def test_a_broken_model_is_an_error(on_device: bool) -> None:
    """Its times mean nothing: an error with a hint, and no failed assertion."""
    engine = (tiny_device_engine if on_device else tiny_engine)(
        "ngram", DraftShape(3, 1, 4), num_pages=512, prefix_cache=False, spoil=all_nan("lm_head.weight")
    )
    broken = Session(engine, "ngram", DraftParts(CPU, OPS, None, (1, 3)), "none")
    with pytest.raises(ModelError, match="not finite"):
        broken.trace(requests(), 0, 0)
    with pytest.raises(ModelError, match="not finite"):
        time_batch(broken, 2, 20, 0, 0, 64)
