"""Traces of engines, and replays of them against live runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from specbatch.draft import DraftParts
from specbatch.draft.network import DraftNet
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.engine.executor import GraphMode, RoundExecutor
from specbatch.kernels import ops_for
from specbatch.tune.replay import Replayer
from specbatch.tune.session import OutOfTime, Session
from specbatch.tune.trace import Trace
from specbatch.types import Request, RngKey, SamplingParams
from tests.engine.test_out_of_memory import Replays
from tests.tiny_models import CPU, random_prompts, round_of, tiny_device_engine, tiny_engine
from tests.tracing import replayed

TOPK, DEPTH = 3, 3
OPS = ops_for(CPU, torch.float64)
CUDA = torch.device("cuda")
WIDE = DraftShape(DEPTH, TOPK, 1 + TOPK + (DEPTH - 1) * TOPK**2)
SHAPES = [DraftShape(1, 1, 2), DraftShape(3, 1, 4), DraftShape(2, 3, 6), DraftShape(3, 3, 10)]


# An EAGLE-3 head by default reads layers that only a deeper target has.
SMALL: dict[str, dict[str, Any]] = {"eagle3": {"num_layers": 3, "aux_layers": (0, 1, 2)}}


def gpu_session(method: str, graphs: GraphMode) -> Session:
    """In float64, in which a GPU writes the texts that a CPU does."""
    small = SMALL.get(method, {})
    engine = tiny_device_engine(method, WIDE, num_pages=512, prefix_cache=False, device=CUDA, **small)
    parts = DraftParts(CUDA, ops_for(CUDA, torch.float64), net_of(engine), (1, 3))
    return Session(engine, method, parts, graphs)


def session(method: str, on_device: bool, num_pages: int = 512, coupled: bool = False) -> Session:
    """Over a tiny engine that was built for the widest shape: as it runs on a GPU, or as on a CPU."""
    make = tiny_device_engine if on_device else tiny_engine
    engine = make(method, WIDE, num_pages=num_pages, prefix_cache=False, **SMALL.get(method, {}))
    return Session(engine, method, DraftParts(CPU, OPS, net_of(engine), (1, 3), coupled), "none")


def net_of(engine: Engine) -> DraftNet | None:
    return round_of(engine).method.net


def requests(temperature: float = 0.0) -> list[Request]:
    return [
        Request(i, prompt, SamplingParams(max_tokens=4 + 3 * i, temperature=temperature), RngKey(7, i, 0))
        for i, prompt in enumerate(random_prompts(6))
    ]


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_cpu_and_a_gpu_record_the_same(method: str) -> None:
    assert_same(*(session(method, on_device).trace(requests(), TOPK, DEPTH) for on_device in (False, True)))


@pytest.mark.parametrize(("method", "temperature"), [("draft_model", 0.9), ("eagle3", 0.0)])
def test_what_captures_in_the_middle_of_a_run_leave_of_the_record(
    method: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drafts for padding, between the rounds of rows. What a GPU does beyond that is tested there."""

    class Captures(RoundExecutor):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.mode, self.runner = "round", cast(Any, Replays(lambda key: False))

    monkeypatch.setattr("specbatch.engine.engine.RoundExecutor", Captures)
    tuned = session(method, on_device=True)
    # Padding has stream 0: of no row here, so that what is recorded of it shows.
    rows = [replace(row, rng=RngKey(7, 64 + row.request_id, 0)) for row in requests(temperature)[:5]]
    traced = tuned.trace(rows, TOPK, DEPTH)
    assert tuned.engine.executor.num_graphs > 1
    assert_same(session(method, on_device=False).trace(rows, TOPK, DEPTH), traced)


def test_traced_batches_share_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows traced in two batches, and again after another use, are those traced at once."""
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
        batches = [tuned.trace(batch, TOPK, DEPTH) for batch in (requests()[:2], requests()[2:])]
        assert len(redrafted) == 1
        rows = [row for batch in batches for row in batch.rows]
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
        captured = tuned.engine.executor.num_graphs
        assert captured > 1 if graphs == "round" else not captured


def assert_same(one: Trace, other: Trace) -> None:
    for mine, theirs in zip(one.rows, other.rows, strict=True):
        assert mine.tokens.tolist() == theirs.tokens.tolist()
        rounds = slice(0, len(mine.tokens) - mine.num_prompt - 1)  # the last token is the root of no round
        for name in ("chain_PS", "tokens_PC", "parents_PC"):
            assert getattr(mine, name)[rounds].tolist() == getattr(theirs, name)[rounds].tolist(), name
        np.testing.assert_allclose(mine.scores_PC[rounds], theirs.scores_PC[rounds], atol=1e-5)


@pytest.mark.parametrize(
    ("method", "on_device"), [("eagle3", False), ("draft_model", True), ("eagle3", True), ("ngram", True)]
)
def test_replay_is_what_a_run_does(method: str, on_device: bool) -> None:
    """Other methods on a CPU are those of test_live.py."""
    tuned = session(method, on_device)
    trace = tuned.trace(requests(), TOPK, DEPTH)
    for shape in SHAPES:
        tuned.use(ByBatch.always(shape))
        if method == "ngram" and not shape.is_chain:
            continue
        live = tuned.run(requests())
        candidate: Any = shape
        if method == "ngram":
            candidate = DraftShape.ngram(shape.num_draft_tokens, 1, 3)
        found = replayed(Replayer(trace), candidate)
        assert found.rounds_R.tolist() == [c.speculation.rounds for c in live.completions]
        assert found.tokens_R.tolist() == [c.speculation.committed for c in live.completions]


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
    assert replayed(Replayer(trace), SHAPES[-1]).rounds_R.tolist() == [c.speculation.rounds for c in live.completions]


@pytest.mark.parametrize(("method", "on_device"), [("draft_model", False), ("eagle3", True)])
def test_coupled_sampled_chains_are_replayed_exactly(method: str, on_device: bool) -> None:
    tuned = session(method, on_device, coupled=True)
    found = Replayer(tuned.trace(requests(0.9), TOPK, DEPTH))
    for shape in SHAPES[:2]:
        tuned.use(ByBatch.always(shape))
        live = tuned.run(requests(0.9))
        assert replayed(found, shape).rounds_R.tolist() == [c.speculation.rounds for c in live.completions]
        assert live.counts.accepted > 0


@pytest.mark.wide
def test_drawn_chains_are_replayed_with_the_counts_of_a_run() -> None:
    """Greedy drafts alone would show less than what drawn drafts are worth."""
    tuned = session("draft_model", on_device=True)
    params = SamplingParams(max_tokens=30, temperature=0.9)
    many = [Request(i, row.prompt_token_ids, params, RngKey(7, i, 0)) for i, row in enumerate(requests() * 2)]
    greedy = tuned.trace(many, TOPK, DEPTH)
    trace = replace(greedy, drawn=tuned.count_drawn(many, DEPTH))
    for shape in SHAPES[:2]:
        tuned.use(ByBatch.always(shape))
        live = tuned.run(many).counts
        found, uncorrected = replayed(Replayer(trace), shape), replayed(Replayer(greedy), shape)
        assert found.tokens_per_round == pytest.approx(live.acceptance_length, rel=0.08)
        assert found.tokens_R.tolist() == uncorrected.tokens_R.tolist()
        assert uncorrected.tokens_per_round < 0.95 * found.tokens_per_round
        expected = np.array(live.accepted_at) / live.rounds
        assert np.array(found.accepted_at) / found.rounds == pytest.approx(expected, abs=0.1)
    tree = SHAPES[-1]
    assert replayed(Replayer(trace), tree).rounds_R.tolist() == replayed(Replayer(greedy), tree).rounds_R.tolist()


def test_what_is_counted_of_a_run_that_draws() -> None:
    tuned = session("draft_model", on_device=False)
    assert tuned.draws_chains
    assert not session("draft_model", on_device=False, coupled=True).draws_chains
    assert not session("ngram", on_device=False).draws_chains
    drawn = tuned.count_drawn(requests(0.9), DEPTH)
    tuned.use(ByBatch.always(DraftShape(DEPTH, 1, DEPTH + 1)))
    counts = tuned.run(requests(0.9)).counts
    assert drawn.tolist() == [counts.rounds, *counts.accepted_at, *[0] * (DEPTH - len(counts.accepted_at))]
    with pytest.raises(OutOfTime):
        tuned.count_drawn(requests(0.9), DEPTH, until=0.0)
    traces = []
    for _ in range(2):
        traces.append(tuned.trace(requests(0.9), TOPK, DEPTH))
        tuned.count_drawn(requests(0.9), DEPTH)
    assert_same(*traces)


def test_what_ran_before_does_not_change_what_is_gathered() -> None:
    engine = tiny_device_engine("draft_model", WIDE, max_batch_size=32, num_pages=512, prefix_cache=False)
    parts = DraftParts(CPU, OPS, net_of(engine), (1, 3))
    tuned = Session(engine, "draft_model", parts, "none")
    tuned.use(ByBatch.always(None))
    assert engine._scheduler.min_free_requests == 2
    tuned.run(requests())
    assert engine._scheduler.min_free_requests > 2
    tuned.use(ByBatch.always(SHAPES[1]))
    assert engine._scheduler.min_free_requests == 2
    rounds = [c.speculation.rounds for c in tuned.run(requests()).completions]
    assert engine._rounds_of_rows.mean == pytest.approx(np.mean(rounds))


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
