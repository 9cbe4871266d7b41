"""The predicted time of a file, against a simulation that goes round by round, and against a run of the engine."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from specbatch.cache.pages import PagePool
from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.engine.prefill.admission_batching import ChunkCost, RoundsOfRows
from specbatch.engine.scheduler import Scheduler
from specbatch.engine.sequence import Sequence
from specbatch.errors import TuningError
from specbatch.tune.costs import CostModel, Measurement
from specbatch.tune.predict import Forecast, predict
from specbatch.tune.profile import FileProfile, Limits, Prediction
from specbatch.tune.replay import Replay, Replayer
from specbatch.tune.trace import RowTrace, Trace
from specbatch.types import Request, RngKey, SamplingParams
from tests.tiny_models import random_prompts, run, tiny_device_engine, tiny_engine
from tests.tracing import replayed, trace_rows

CHAIN, TREE = DraftShape(2, 1, 3), DraftShape(3, 2, 8)
NGRAM = DraftShape.ngram(5, 1, 3)
MIXED: Schedule = ByBatch((2, 5, 6), (TREE, CHAIN, None))
ROOMY = Limits(max_running=6, kv_tokens=100_000, prefill_chunk=64)


def costs() -> CostModel:
    points = [("verify", 5.0, 0.1), ("draft_start", 0.5, 0.01), ("draft_step", 0.7, 0.01), ("extend", 0.6, 0.02)]
    measured = [
        Measurement(kind, b, w, base + slope * b * w) for kind, base, slope in points for b in (1, 16) for w in (1, 16)
    ]
    measured += [Measurement("plain", b, 1, 4.5 + 0.1 * b) for b in (1, 16)]
    return CostModel.fit([*measured, *(Measurement("prefill", 1, t, 2.0 + 0.05 * t) for t in (1, 64))])


# A chunk of prompts takes a second: prefill_seconds is their number.
COUNTS_CHUNKS = CostModel.fit(
    [Measurement(kind, 1, 1, 1.0) for kind in ("plain", "verify", "draft_start", "draft_step", "extend")]
    + [Measurement("prefill", 1, 1, 1000.0)]
)


def replay_of(shape: DraftShape, outputs: np.ndarray, seed: int) -> Replay:
    """Rows of very different rates."""
    rates = np.random.default_rng(seed).uniform(1.1, shape.num_draft_tokens, len(outputs))
    tokens = np.maximum(outputs - 1, 0)
    return Replay(shape, tokens / rates, tokens, np.zeros(len(outputs)), ())


def profile_of(num_rows: int, seed: int = 0, kinds: int = 13) -> tuple[FileProfile, dict[DraftShape, Replay]]:
    rng = np.random.default_rng(seed)
    outputs = rng.integers(1, 60, kinds)
    replays = {c: replay_of(c, outputs, seed + i) for i, c in enumerate((CHAIN, TREE))}
    return FileProfile(rng.integers(5, 90, 29), outputs, num_rows, max_tokens=50), replays


def round_by_round(
    profile: FileProfile,
    limits: Limits,
    model: CostModel,
    replays: dict[DraftShape, Replay],
    schedule: Schedule,
    seed: int = 0,
) -> tuple[float, float, float, float, int, int]:
    """The engine's scheduler, asked before every round, with every token and every page.

    Milliseconds of prompts, of rounds up to the last admission and after it; tokens up to there; rounds; preemptions.
    """
    rng, kinds = np.random.default_rng(seed), len(profile.output_tokens_R)
    order = [k for _ in range(-(-profile.num_rows // kinds)) for k in rng.permutation(kinds).tolist()]
    ends = [max(1, min(int(profile.output_tokens_R[k]), profile.max_tokens)) for k in order[: profile.num_rows]]
    made, idle = [0.0] * profile.num_rows, [limits.async_depth] * profile.num_rows
    own_rounds, rounds_of_rows, cost = [0] * profile.num_rows, RoundsOfRows(), limits.chunk_cost
    gathers = (1, 1) if cost is None else (max(1, limits.max_running // 16), cost.tokens)
    pool = PagePool(limits.kv_tokens // limits.page_size, limits.page_size)
    scheduler = Scheduler(
        pool, None, limits.lookahead(schedule), lambda seq: None, limits.max_running, limits.prefill_chunk, *gathers
    )
    for row in range(profile.num_rows):
        prompt = [0] * int(profile.prompt_tokens[row % len(profile.prompt_tokens)])
        request = Request(row, prompt, SamplingParams(), RngKey(0, row, 0))
        scheduler.waiting.append(Sequence(request, [*prompt], max_length=10**6))
    neural = any(shape is not None for shape in schedule.items)
    prefill = decode = at_last = tokens_at_last = 0.0
    rounds = 0

    def finish_ended() -> None:
        for seq in list(scheduler.running):
            row = seq.request.request_id
            if made[row] >= ends[row] - 1e-9 and idle[row] <= 0:
                scheduler.finish(seq)
                rounds_of_rows.add(own_rounds[row])
                if cost is not None:
                    scheduler.min_free_requests = cost.min_free_requests(limits.max_running, rounds_of_rows.mean)

    while scheduler.waiting or scheduler.running:
        if spans := scheduler.plan_prefill():
            prefill += model.prefill_ms(sum(span.end - span.start for span in spans))
            for span in spans:
                row = span.seq.request.request_id
                span.seq.num_computed_tokens = span.end
                if span.seq.prefill_done and not made[row]:
                    made[row] = 1.0
                    span.seq.tokens.append(0)
            finish_ended()
            at_last, tokens_at_last = decode, sum(made)
            continue
        running = scheduler.plan_round()
        shape = schedule.at(len(running))
        decode += (
            model.plain_ms(len(running), followed=neural) if shape is None else model.round_ms(len(running), shape)
        )
        rounds += 1
        for seq in running:
            row = seq.request.request_id
            if made[row] >= ends[row] - 1e-9:
                idle[row] -= 1
                continue
            rate = 1.0 if shape is None else float(replays[shape].rates()[order[row]])
            made[row] = min(made[row] + rate, ends[row])
            own_rounds[row] += 1
            seq.tokens += [0] * (seq.num_prompt + math.ceil(made[row] - 1e-9) - len(seq.tokens))
            seq.num_computed_tokens = len(seq.tokens) - 1
        finish_ended()
    return prefill, at_last, decode - at_last, tokens_at_last, rounds, scheduler.num_preemptions


@pytest.mark.parametrize("schedule", [MIXED, ByBatch.always(None), ByBatch.always(TREE)], ids=str)
@pytest.mark.parametrize(
    "limits",
    [
        ROOMY,
        replace(ROOMY, max_running=1),
        replace(ROOMY, async_depth=1),
        replace(ROOMY, max_running=12, chunk_cost=ChunkCost(3.0, 160)),
        replace(ROOMY, max_running=40, async_depth=1, chunk_cost=ChunkCost(9.0, 600)),
        replace(ROOMY, kv_tokens=320, page_size=4),
        replace(ROOMY, kv_tokens=200, page_size=16, prefill_chunk=7, draft_kv_offset=1, async_depth=2),
        replace(ROOMY, kv_tokens=320, page_size=4, max_running=12, chunk_cost=ChunkCost(9.0, 250)),
    ],
    ids=["roomy", "one", "behind", "gathered", "gathered behind", "tight", "tighter", "tight and gathered"],
)
def test_events_equal_round_by_round(limits: Limits, schedule: Schedule) -> None:
    profile, replays = profile_of(70)
    found = predict(profile, limits, costs(), replays, schedule)
    prefill, steady, drain, tokens, rounds, preemptions = round_by_round(profile, limits, costs(), replays, schedule)
    assert found.rounds == rounds
    assert found.steady_tokens == pytest.approx(tokens)
    assert found.preemptions == preemptions
    assert found.prefill_seconds == pytest.approx(prefill / 1e3)
    assert found.steady_seconds == pytest.approx(steady / 1e3)
    assert found.drain_seconds == pytest.approx(drain / 1e3)
    assert found.num_simulated == found.num_rows == 70
    if limits.kv_tokens == 320:
        assert preemptions > 0, "nothing was ever preempted"
    if limits.chunk_cost is not None and limits.kv_tokens > 320:  # where the cache is full, request indices are free
        assert rounds != predict(profile, replace(limits, chunk_cost=None), costs(), replays, schedule).rounds


def test_tokens_are_all_there() -> None:
    profile, replays = profile_of(13 * 4)
    found = predict(profile, ROOMY, costs(), replays, MIXED)
    ends = np.clip(profile.output_tokens_R, 1, profile.max_tokens)
    assert found.output_tokens == pytest.approx(4 * ends.sum())
    assert found.tokens_by_batch.sum() == pytest.approx(4 * (ends - 1).sum())
    assert len(found.tokens_by_batch) == ROOMY.max_running + 1
    assert 1 < found.mean_batch <= 6
    assert found.tokens_per_second == pytest.approx(found.output_tokens / found.seconds)


@pytest.mark.parametrize("kv_tokens", [100_000, 320])
def test_extrapolation_equals_the_whole_simulation(kv_tokens: int) -> None:
    profile, replays = profile_of(6000)
    limits = replace(ROOMY, kv_tokens=kv_tokens)
    whole = predict(profile, limits, costs(), replays, MIXED, min_simulated=6000)
    part = predict(profile, limits, costs(), replays, MIXED, min_simulated=1000)
    assert (whole.num_simulated, part.num_simulated) == (6000, 1000)
    for name in (
        "seconds",
        "prefill_seconds",
        "steady_seconds",
        "rounds",
        "output_tokens",
        "tokens_per_second",
        "steady_tokens",
    ):
        assert getattr(part, name) == pytest.approx(getattr(whole, name), rel=0.01), name
    assert part.mean_batch == pytest.approx(whole.mean_batch, rel=0.01)


def test_ten_million_rows_take_no_longer() -> None:
    profile, replays = profile_of(10_000_000)
    began = time.perf_counter()
    found = predict(profile, replace(ROOMY, max_running=64), costs(), replays, MIXED)
    assert time.perf_counter() - began < 5
    small = predict(replace(profile, num_rows=100_000), replace(ROOMY, max_running=64), costs(), replays, MIXED)
    assert found.seconds == pytest.approx(100 * small.seconds, rel=0.01)


@pytest.mark.parametrize("kv_tokens", [ROOMY.kv_tokens, 400])
def test_a_shared_prefix_is_computed_and_kept_once(kv_tokens: int) -> None:
    profile, replays = profile_of(40)
    longer = replace(profile, prompt_tokens=profile.prompt_tokens + 1000, shared_prefix=1000)
    limits = replace(ROOMY, prefill_chunk=1000, kv_tokens=kv_tokens)
    one = predict(profile, limits, costs(), replays, MIXED)
    other = predict(longer, replace(limits, kv_tokens=limits.kv_tokens + 1000), costs(), replays, MIXED)
    assert other.prefill_seconds == pytest.approx(one.prefill_seconds + costs().prefill_ms(1000) / 1e3)
    assert (other.rounds, other.preemptions) == (one.rounds, one.preemptions)


def test_rows_that_cannot_run() -> None:
    profile, replays = profile_of(10)
    with pytest.raises(TuningError, match="do not fit a cache of 60 tokens"):
        predict(profile, replace(ROOMY, kv_tokens=60), costs(), replays, MIXED)
    with pytest.raises(TuningError, match="no rows"):
        replace(profile, num_rows=0)


@cache
def traced() -> tuple[list[list[int]], SamplingParams, Trace]:
    prompts, params = random_prompts(14, seed=2), SamplingParams(max_tokens=24)
    return prompts, params, trace_rows("draft_model", prompts, params, 1, 3, eos=(13, 52))


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "gpu"])
def test_rounds_of_a_real_run(on_device: bool) -> None:
    """The engine's own count of rounds, for rows that are the traced ones. On a GPU the engine reads a round late that
    a row has ended."""
    prompts, params, trace = traced()
    shape = DraftShape(3, 1, 4)
    replays: dict[DraftShape, Replay] = {shape: replayed(Replayer(trace), shape)}
    make = tiny_device_engine if on_device else tiny_engine
    engine = make("draft_model", shape, num_pages=256, max_batch_size=4, eos=(13, 52), prefix_cache=False)
    run(engine, prompts, params)
    profile = replace(FileProfile.of(trace, params.max_tokens), in_order=True)
    limits = Limits(
        max_running=4,
        kv_tokens=1024,
        prefill_chunk=32,
        page_size=4,
        draft_kv_offset=1,
        async_depth=1 if on_device else 0,
    )
    found: Prediction = predict(profile, limits, costs(), replays, ByBatch.always(shape))
    assert found.output_tokens == pytest.approx(engine.stats.generated_tokens)
    assert found.rounds == pytest.approx(engine.stats.rounds, rel=0.03)


@pytest.mark.parametrize(
    ("cost", "longest", "pages"),
    [
        (ChunkCost(1.0, 400), 40, 1024),
        (ChunkCost(0.2, 400), 40, 1024),  # fewer than a quarter of the request indices
        (ChunkCost(4.0, 15), 40, 1024),  # the prompts' tokens decide
        (ChunkCost(4.0, 400), 8, 1024),
        (ChunkCost(1.0, 400), 40, 160),  # rows are preempted
    ],
)
def test_admissions_of_a_real_run(cost: ChunkCost, longest: int, pages: int) -> None:
    """Where short prompts are gathered: the engine's own count of rounds and of the chunks that admit rows."""
    settings: dict[str, Any] = {"num_pages": pages, "max_batch_size": 32, "prefill_chunk_tokens": 512}
    engine = tiny_device_engine(num_layers=1, prefix_cache=False, chunk_cost=cost, **settings)
    generator, prompts = np.random.default_rng(1), random_prompts(130, seed=3, longest=9)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=int(generator.integers(1, longest + 1)), ignore_eos=True)
        engine.submit(Request(i, prompt, params, RngKey(0, i, 0)))
    admissions, done, waiting = 0, {}, len(prompts)
    while len(done) < len(prompts):
        done |= {c.request_id: len(c.token_ids) for c in engine.step()}
        admissions += engine.num_waiting < waiting
        waiting = engine.num_waiting
    lengths = zip((len(prompt) for prompt in prompts), (done[i] for i in range(len(prompts))), strict=True)
    profile = FileProfile(*(np.array(part) for part in zip(*lengths, strict=True)), 130, longest, in_order=True)
    limits = Limits(32, 4 * pages, 512, 4, async_depth=1, chunk_cost=cost)
    found = predict(profile, limits, COUNTS_CHUNKS, {}, ByBatch.always(None))
    assert found.output_tokens == engine.stats.generated_tokens
    assert found.rounds == pytest.approx(engine.stats.rounds, rel=0.03, abs=1)
    assert (found.preemptions > 0) == (engine.stats.preemptions > 0) == (pages < 1024)
    assert found.prefill_seconds == pytest.approx(admissions, rel=0.25)
    ungathered = predict(profile, replace(limits, chunk_cost=None), COUNTS_CHUNKS, {}, ByBatch.always(None))
    most = 0.8 if pages == 1024 else 1.0  # a row that is preempted does not wait for others
    assert found.prefill_seconds < most * ungathered.prefill_seconds


def test_extrapolation_with_gathering() -> None:
    profile, replays = profile_of(6000)
    limits = replace(ROOMY, max_running=24, chunk_cost=ChunkCost(2.0, 300))
    whole = predict(profile, limits, costs(), replays, MIXED, min_simulated=6000)
    part = predict(profile, limits, costs(), replays, MIXED, min_simulated=1000)
    assert (whole.num_simulated, part.num_simulated) == (6000, 1000)
    for name in ("seconds", "prefill_seconds", "rounds", "output_tokens"):
        assert getattr(part, name) == pytest.approx(getattr(whole, name), rel=0.01), name


def test_gathering_follows_the_rounds_of_full_batches() -> None:
    """Of the schedule's shape there, and of rows that are cut at max_tokens."""
    outputs, many = np.array([n for short in range(21, 62) for n in (short, 401)]), 1000
    replays = {CHAIN: Replay(CHAIN, (outputs - 1) / 2, outputs - 1, np.zeros(len(outputs)), ())}
    limits = replace(ROOMY, max_running=64, chunk_cost=ChunkCost(0.1, 1000))
    profile = FileProfile(np.array([5, 5]), outputs, many, max_tokens=61)

    def gathered(schedule: Schedule) -> float:
        return many / predict(profile, limits, COUNTS_CHUNKS, replays, schedule).prefill_seconds

    # A row or two end in a round.
    assert ChunkCost(0.1, 0).min_free_requests(64, 50) == 4 <= gathered(ByBatch((4, 64), (CHAIN, None))) < 5.5
    assert ChunkCost(0.1, 0).min_free_requests(64, 25) == 6 <= gathered(ByBatch.always(CHAIN)) < 8.5


@pytest.mark.parametrize("shape", [None, NGRAM], ids=["plain", "ngram"])
def test_rows_of_a_forecast(shape: DraftShape | None) -> None:
    """One after the other, rows take what they take alone, again and again."""
    texts = ([1, 2, 3, 4] * 10, list(range(100, 130)), [7, 8] * 35)
    rows = [RowTrace(4, np.array(text, dtype=np.int32)) for text in texts]
    parts = {"plain": 10.0, "verify": 16.0, "prefill": 3.0}
    costs = CostModel.fit([Measurement(kind, 1, 1, ms) for kind, ms in parts.items()])
    limits = Limits(1, 4096, 64, 4, None, 64, 0, None)

    def forecast(*rows: RowTrace) -> Forecast:
        trace = Trace(rows, 0, 0, False)
        return Forecast(trace, {NGRAM: replayed(Replayer(trace), NGRAM)}, costs, limits, 128)

    schedule = ByBatch.always(shape)
    alone = [forecast(row).seconds(schedule, 1) for row in rows]
    assert len(set(alone)) == 3
    totals = [forecast(*rows).seconds(schedule, count) for count in (1, 2, 3, 4, 6)]
    expected = [alone[0], sum(alone[:2]), sum(alone), sum(alone) + alone[0], 2 * sum(alone)]
    assert totals == pytest.approx(expected)
