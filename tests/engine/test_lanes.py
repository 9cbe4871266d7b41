"""Two lanes: how batches are divided, and that no token depends on it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbatch.config_load import load_config
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.engine.executor import GraphMode, PaddedSize, RoundBatch, padded_sizes
from specbatch.engine.overlap.lanes import MIN_LANE, NEVER, LaneLimits, Lanes, LaneSizes
from specbatch.engine.prefill.packing import PromptChunk
from specbatch.engine.reports import Report
from specbatch.engine.round import Round
from specbatch.engine.sequence import Sequence
from specbatch.errors import ConfigError
from specbatch.models.stages import TwoPasses, completed
from specbatch.parallel.group import Group
from specbatch.setup import autotune_lanes as lane_times
from specbatch.setup.autotune_lanes import LaneTimes, chosen, median_times, time_lanes, with_lanes_that_gain
from specbatch.setup.dummies import dummy_batch
from specbatch.setup.lanes import Job, lane_limits, resolve_mode
from specbatch.setup.memory import CachePlan
from specbatch.setup.resolve import resolve
from specbatch.setup.round_parts import Rounds
from specbatch.setup.sizing import Sized
from specbatch.setup.trial import trial_prompt
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.parallel.threads import on_ranks
from tests.tiny_models import CPU, random_prompts, round_of, run, tiny_device_engine, tiny_engine

CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(3, 3, 8)
SAMPLED = SamplingParams(max_tokens=14, temperature=0.8, top_k=30, seed=5, logprobs=2)


def sequence(num_tokens: int) -> Sequence:
    return Sequence(Request(0, [1], SamplingParams(), RngKey(0, 0, 0)), [1] * num_tokens, 10**6)


@given(
    st.lists(st.lists(st.integers(1, 400), max_size=20), max_size=12),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=25, deadline=None)
def test_lanes_hold_each_request_once_and_are_as_small_as_equal_ones(
    arrivals: list[list[int]], min_lane: int, pads: bool, data: st.DataObject
) -> None:
    """Requests come and go in any order."""
    sizes = LaneSizes.up_to(64, min_lane)
    lanes, running = Lanes(sizes, pads=pads), list[Sequence]()
    for lengths in arrivals:
        running = [seq for seq in running if not data.draw(st.booleans())]
        running = (running + [sequence(n) for n in lengths])[:64]
        batch = lanes.divide(running)
        found = [seq for seq in batch.sequences if seq is not None]
        assert sorted(map(id, found)) == sorted(map(id, running))
        if len(running) < 2 * min_lane:
            assert batch == (running, 0), "a short batch is one lane"
            continue
        size = sizes.of(len(running))
        first, second = batch.sequences[: batch.lane], batch.sequences[batch.lane :]
        assert 0 < len(second) <= size
        assert None not in second
        assert batch.lane == size if pads else 0 < batch.lane <= size
        assert pads or None not in first


def test_a_request_keeps_its_lane_until_one_of_them_is_short() -> None:
    lanes, old = Lanes(LaneSizes.up_to(64, 1), pads=False), [sequence(n) for n in (90, 50, 40, 30, 20, 10, 10, 10)]
    batch = lanes.divide(old)
    first, second = batch.sequences[: batch.lane], batch.sequences[batch.lane :]
    loads = [sum(len(seq.tokens) for seq in part if seq is not None) for part in (first, second)]
    assert loads == [140, 120], "lanes read about equally many keys"
    more = [sequence(5)]
    grown = lanes.divide(old + more)
    assert (grown.sequences[: grown.lane], grown.sequences[grown.lane :]) == (first, [*second, *more])
    left = [seq for seq in second if seq is not None]
    assert lanes.divide(left) == ([left[0], left[3], *left[1:3]], 2), "one lane has drained: 50, 10, 40, 20"
    assert lanes.divide(left[:1]) == (left[:1], 0)


def test_each_padded_size_is_one_that_batches_have() -> None:
    lanes, items = LaneSizes.up_to(256), ByBatch((30, 256), ("a", "b"))
    sizes = padded_sizes(items, 256, lanes)
    for count in range(1, 257):
        lane = lanes.of(count)
        assert (lane == 0) == (count < 2 * MIN_LANE)
        size = next(s for (s, of), i in reversed(sizes) if of == lane and i == items.index(count) and s >= count)
        assert not lane or size == 2 * lane
    plain = padded_sizes(items, 256)
    assert len(sizes) <= len(plain) + 2
    assert all(size.lane == 0 for size, _ in plain)
    single = LaneSizes(lanes.sizes, frozenset([16]))
    assert [single.of(n) for n in (16, 17, 32, 33)] == [8, 0, 0, 24]
    assert padded_sizes(ByBatch.always("a"), 3, LaneSizes.up_to(3, 1))[0] == (PaddedSize(4, 2), 0)


ENGINES = {"CPU": tiny_engine, "fixed shapes": tiny_device_engine}


def outputs(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, c.finish_reason, c.logprobs, c.margin, c.speculation) for c in completions]


def spied(engine: Engine) -> list[int]:
    """The lanes of the rounds that it will run."""
    launch, found = engine.executor.run, list[int]()

    def run(batch: RoundBatch) -> Report:
        found.append(batch.lane)
        return launch(batch)

    engine.executor.run = run  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("method", "shape", "kind"),
    [
        ("none", None, "CPU"),
        ("ngram", CHAIN, "CPU"),
        ("draft_model", TREE, "CPU"),
        ("eagle3", CHAIN, "CPU"),
        ("eagle3", TREE, "fixed shapes"),
    ],
)
def test_lanes_change_no_bit(method: str, shape: DraftShape | None, kind: str) -> None:
    """Tokens, log-probabilities and counts, sampled; float32 where the CPU promises it."""
    dtype = torch.float32 if kind == "CPU" else torch.float64
    options: dict[str, Any] = {"num_pages": 256, "max_batch_size": 7, "dtype": dtype, "eos": (5,)}
    prompts = random_prompts(9, shared=9)
    expected = run(ENGINES[kind](method, shape, **options), prompts, SAMPLED)
    engine = ENGINES[kind](method, shape, min_lane=1, **options)
    lanes = spied(engine)
    actual = run(engine, prompts, SAMPLED)
    assert max(lanes) >= 3
    if kind == "CPU":
        assert outputs(actual) == outputs(expected)
    else:
        assert [c.token_ids for c in actual] == [c.token_ids for c in expected]


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_any_order_of_admission_end_and_preemption(count: int) -> None:
    examples = given(
        st.lists(st.tuples(st.integers(0, 4), st.integers(1, 14), st.booleans()), min_size=3, max_size=9),
        st.sampled_from([("none", None), ("ngram", CHAIN), ("draft_model", CHAIN)]),
        st.integers(16, 40),
    )
    settings(max_examples=count, deadline=None)(examples(no_order_matters))()


def no_order_matters(rows: list[tuple[int, int, bool]], method: tuple[str, DraftShape | None], num_pages: int) -> None:
    """`rows`: steps before each is submitted, its tokens, whether it samples."""
    prompts = random_prompts(len(rows), seed=len(rows), longest=12, shared=5)

    def answers(min_lane: int | None) -> list[Any]:
        settings: dict[str, Any] = {"dtype": torch.float32, "num_pages": num_pages, "prefill_chunk_tokens": 9}
        engine = tiny_engine(*method, max_batch_size=6, min_lane=min_lane, **settings)
        done = list[Completion]()
        for i, (steps, max_tokens, sampled) in enumerate(rows):
            for _ in range(steps):
                done += engine.step()
            params = SamplingParams(max_tokens=max_tokens, temperature=0.9 if sampled else 0.0, logprobs=1)
            engine.submit(Request(i, prompts[i], params, RngKey(3, i, 0)))
        while len(done) < len(rows):
            done += engine.step()
            engine.check_integrity()
        return outputs(sorted(done, key=lambda completion: completion.request_id))

    assert answers(1) == answers(2) == answers(None)


def test_pages_run_out() -> None:
    prompts = random_prompts(6, seed=1, longest=30)
    params = SamplingParams(max_tokens=16)
    expected = run(tiny_engine("draft_model", TREE, num_pages=256, dtype=torch.float32), prompts, params)
    engine = tiny_engine("draft_model", TREE, num_pages=36, dtype=torch.float32, min_lane=1)
    assert outputs(run(engine, prompts, params)) == outputs(expected)
    assert engine.stats.preemptions > 0


def test_ranks_sum_in_the_same_order() -> None:
    prompts = random_prompts(4, shared=9, longest=12)

    def work(min_lane: int | None) -> list[Any]:
        def on_rank(group: Group) -> list[Any]:
            engine = tiny_engine("draft_model", CHAIN, num_pages=256, group=group, min_lane=min_lane, num_layers=3)
            return outputs(run(engine, prompts, SAMPLED))

        return on_ranks(2, on_rank)

    assert work(1) == work(None)


def test_the_second_pass_runs_half_a_layer_later() -> None:
    order = list[str]()

    def stages(name: str, count: int) -> Generator[None, None, str]:
        for i in range(count):
            order.append(f"{name}{i}")
            yield
        return name

    assert TwoPasses(CPU).run(stages("a", 3), stages("b", 4)) == ("a", "b")
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2", "b3"]
    assert completed(stages("c", 2)) == "c"


@pytest.mark.parametrize(("given_value", "decided"), [("on", "on"), ("off", "off"), ("auto", "off")])
def test_the_option_as_yaml_reads_it(given_value: str, decided: str) -> None:
    sets = ["model.target=random:tiny", "engine.device=cpu", f"engine.two_batch_overlap={given_value}"]
    run = resolve(load_config(None, sets))
    assert run.config.engine.two_batch_overlap == decided
    assert run.engine.lanes == (LaneLimits(MIN_LANE, 128) if decided == "on" else None)
    with pytest.raises(ConfigError, match="must be off, on or auto, not 3"):
        load_config(None, ["engine.two_batch_overlap=3"])


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("method", "shape"), [("none", None), ("ngram", CHAIN), ("eagle", CHAIN), ("eagle3", TREE)])
def test_two_streams_give_the_tokens_of_one(
    method: str, shape: DraftShape | None, dtype: torch.dtype, graphs: GraphMode
) -> None:
    options: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "dtype": dtype, "device": torch.device("cuda")}
    prompts = random_prompts(19, shared=10)
    expected = run(tiny_device_engine(method, shape, graphs=graphs, **options), prompts, SAMPLED)
    engine = tiny_device_engine(method, shape, graphs=graphs, min_lane=1, **options)
    lanes = spied(engine)
    assert [c.token_ids for c in run(engine, prompts, SAMPLED)] == [c.token_ids for c in expected]
    assert max(lanes) == 4


def test_timing_both_leaves_the_requests_as_they_were() -> None:
    for kind in (tiny_device_engine, tiny_engine):
        engine = kind("draft_model", CHAIN, num_pages=512, max_batch_size=6, min_lane=1)
        with dummy_batch(engine, 6, 20):
            table = round_of(engine).state
            before = table.ints_SF.clone()
            times = time_lanes(round_of(engine), engine.prepare_round(), 6, 3)
            assert torch.equal(table.ints_SF, before)
        assert min(times) > 0


def test_lanes_are_chosen_where_they_gain() -> None:
    made_up = {8: LaneTimes(100, 98.5), 16: LaneTimes(100, 90), 24: LaneTimes(100, 120), 32: LaneTimes(100, 50)}
    single, notes = chosen(list(made_up), made_up.__getitem__, False)
    assert single == {8, 24}
    assert notes[1] == (
        "engine.two_batch_overlap: 32 rows: two lanes (a round of 32 takes 100 us in one lane, 90 us in two)"
    )
    assert "16 rows: one lane" in notes[0]
    measured = list[int]()
    single, notes = chosen(list(made_up), lambda size: (measured.append(size), made_up[size])[1], True)
    assert measured == [8, 16]
    assert single == {8}
    assert notes[1].startswith("engine.two_batch_overlap: 32 to 64 rows: two lanes (a round of 32 takes ")


def test_auto_keeps_two_lanes_where_they_gain() -> None:
    """Ranks run the same, and decide by the times of the first. Times are made up."""

    def on_rank(group: Group) -> tuple[Sized, list[str]]:
        two_us = itertools.cycle([120.0, 90.0, 99.0])

        def made_up(runs: Any, device: torch.device, restore: Any) -> LaneTimes:
            for run_ in runs:
                run_()
                restore()
            return LaneTimes(100, next(two_us) + 50 * group.rank)

        options: dict[str, Any] = {"num_pages": 800, "max_batch_size": 16, "prefill_chunk_tokens": 128, "min_lane": 4}
        engine = tiny_engine("none", group=group, prefix_cache=False, **options)
        rounds = Rounds(engine.executor.rounds, [], engine.executor.lanes)
        sized = Sized(rounds, CachePlan(800, 160, 160), 16, 128)
        return with_lanes_that_gain(sized, engine, group, made_up)

    for sized, notes in on_ranks(2, on_rank):
        lanes, two_lanes = sized.rounds.lanes, sized.rounds.items.items[0].two_lanes
        assert lanes == LaneSizes((4, 8), frozenset([4]))
        assert two_lanes is not None
        assert two_lanes.min_prompt_lane == NEVER
        assert [note.removeprefix("engine.two_batch_overlap: ") for note in notes] == [
            "8 rows: one lane (a round of 8 takes 100 us in one lane, 120 us in two)",
            "16 rows: two lanes (a round of 16 takes 100 us in one lane, 90 us in two)",
            "prompts: one lane (a chunk of 128 tokens takes 100 us in one lane, 99 us in two)",
        ]


def test_a_trial_chunk_in_two_lanes_writes_the_keys_of_one_lane() -> None:
    """The chunk has one prompt or several, which may be cut, and the last of which may be longer."""
    round_ = round_of(tiny_engine("none", num_pages=64, max_batch_size=8, min_lane=1))
    one = round_.with_two_lanes(None)
    for num_tokens, num_prompts in ((64, None), (64, 4), (60, 3), (64, 16), (50, 5), (53, 3), (63, 10)):
        written = []
        for way in (one, round_):
            round_._cache.all_layers.zero_()
            trial_prompt(way, num_tokens, num_prompts)
            written.append(round_._cache.all_layers.clone())
        assert written[0].any()
        assert torch.equal(*written), (num_tokens, num_prompts)


@pytest.mark.parametrize(("num_tokens", "num_prompts"), [(64, None), (64, 4), (50, 4), (7, 4), (5, 5)])
def test_each_token_of_a_trial_chunk_belongs_to_a_prompt(
    num_tokens: int, num_prompts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last prompt has the tokens that are left. Each prompt ends there."""
    chunks = list[PromptChunk]()
    monkeypatch.setattr(Round, "prefill", lambda _, chunk, __: chunks.append(chunk))
    trial_prompt(round_of(tiny_engine("none", num_pages=64, max_batch_size=8)), num_tokens, num_prompts)
    (chunk,) = chunks
    starts = chunk.layout.query_starts.tolist()
    assert starts[-1] == num_tokens
    assert len(starts) - 1 == len(chunk.layout.starts_B) == (num_prompts or 1)
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    assert set(lengths[:-1]) <= {num_tokens // (num_prompts or 1)}
    assert max(lengths) == chunk.layout.max_queries
    assert chunk.layout.positions_T.tolist() == [i for length in lengths for i in range(length)]
    if num_prompts is not None:
        assert chunk.lengths_R.tolist() == lengths
        assert chunk.logits_indices.index_R.tolist() == [end - 1 for end in starts[1:]]


def test_larger_batches_follow_those_of_their_draft_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have fewer tokens."""
    monkeypatch.setitem(lane_times._FOLLOWS, "cpu", True)

    def on_rank(group: Group) -> list[str]:
        schedule = ByBatch((9, 32), (CHAIN, DraftShape(1, 1, 2)))
        engine = tiny_engine("draft_model", schedule, group=group, min_lane=4, num_pages=2000, max_batch_size=32)
        sized = Sized(Rounds(engine.executor.rounds, [], engine.executor.lanes), CachePlan(2000, 160, 160), 32, 64)
        two_us = iter([90.0, 120.0, 90.0, 120.0])
        return with_lanes_that_gain(sized, engine, group, lambda *_: LaneTimes(100, next(two_us)))[1]

    for notes in on_ranks(2, on_rank):
        assert [note.split(":")[1] for note in notes[:3]] == [" 8 rows", " 16 rows", " 32 rows"]


def test_auto_has_one_lane_for_what_the_cache_does_not_hold() -> None:
    engine = tiny_engine("none", num_pages=400, max_batch_size=16, min_lane=4)
    sized = Sized(Rounds(engine.executor.rounds, [], engine.executor.lanes), CachePlan(400, 160, 160), 16, 64)
    found, notes = with_lanes_that_gain(sized, engine, None, lambda *_: LaneTimes(100, 50))
    assert found.rounds.lanes == LaneSizes((4, 8), frozenset([8]))
    assert "16 rows and more: one lane (the cache does not hold" in notes[1]
    assert "prompts: one lane (there are no other ranks)" in notes[2]


def test_the_time_of_slow_rounds_is_measured_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often on each rank, whatever it finds itself."""
    monkeypatch.setitem(lane_times._REPEATS, "cpu", 20)

    def on_rank(group: Group) -> list[list[int]]:
        counts = list[list[int]]()
        for pause in (0.0, 0.08):
            calls = [0, 0]

            def run_(i: int, calls: list[int] = calls, pause: float = pause) -> None:
                calls[i] += 1
                time.sleep(pause if group.rank == 0 else 0)

            times = median_times([partial(run_, 0), partial(run_, 1)], CPU, lambda: None, group)
            assert group.rank or min(times) >= 1e6 * pause
            counts.append(calls)
        return counts

    assert on_ranks(2, on_rank) == [[[22, 22], [5, 5]]] * 2


@pytest.mark.parametrize(("micros", "count"), [(1000.0, 42), (30_000.0, 14), (150_000.0, 5)])
def test_short_runs_come_before_what_is_measured_on_a_gpu(
    micros: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long run has brought the GPU to its full speed itself."""
    calls = list[int]()
    monkeypatch.setattr(lane_times, "_micros", lambda run, device: (calls.append(run()), micros + run())[1])
    times = median_times([lambda: 1, lambda: 2], torch.device("cuda"), lambda: None)
    assert times == LaneTimes(micros + 1, micros + 2)
    assert calls == [1, 2] * count


def test_prompts_have_two_lanes_from_the_first_size_that_gains() -> None:
    def on_rank(group: Group) -> tuple[int, str]:
        two_us = iter([99.0, 90.0])
        engine = tiny_engine("none", group=group, min_lane=1, num_pages=800, max_batch_size=16)
        sized = Sized(Rounds(engine.executor.rounds, [], None), CachePlan(800, 160, 160), 16, 128)
        found, notes = with_lanes_that_gain(sized, engine, group, lambda *_: LaneTimes(100, next(two_us)))
        two_lanes = found.rounds.items.items[0].two_lanes
        assert found.rounds.lanes is None
        assert two_lanes is not None
        return two_lanes.min_prompt_lane, notes[0]

    for found in on_ranks(2, on_rank):
        assert found == (
            32,
            "engine.two_batch_overlap: prompts: two lanes from 64 tokens on (a chunk of 64 tokens takes 100 us in one "
            "lane, 90 us in two)",
        )


@pytest.mark.parametrize(
    ("sets", "device", "attention", "decided", "reason"),
    [
        ([], "cpu", "torch", "off", None),
        (["engine.tensor_parallel=2"], "cpu", "torch", "auto", None),
        ([], "cuda", "triton", "auto", None),
        (["engine.two_batch_overlap=on"], "cuda", "triton", "on", None),
        (["engine.cascade_attention=on"], "cuda", "triton", "auto", None),
        (["engine.deterministic=true"], "cuda", "triton", "off", "engine.deterministic is on"),
        ([], "cuda", "flashinfer", "off", "engine.attention is flashinfer"),
    ],
)
def test_where_lanes_are_measured(sets: list[str], device: str, attention: str, decided: str, reason: str) -> None:
    notes: list[str] = []
    assert resolve_mode(load_config(None, sets).engine, torch.device(device), attention, notes) == decided
    assert notes == ([] if reason is None else [f"engine.two_batch_overlap: off ({reason})"])


@pytest.mark.parametrize(
    ("num_ranks", "job", "expected"),
    [
        (1, Job(64, 1, 270_000_000, 8192, has_groups=False), LaneLimits(8, NEVER)),
        (1, Job(64, 1, 3_000_000_000, 8192, has_groups=False), None),
        (1, Job(256, 1, 270_000_000, 8192, has_groups=False), None),
        (2, Job(256, 1, 10**11, 8192, has_groups=False), LaneLimits(None, 1024)),
        (2, Job(512, 1, 10**11, 8192, has_groups=False), LaneLimits(256, 1024)),
        (2, Job(256, 4, 10**11, 8192, has_groups=False), LaneLimits(64, 1024)),
        (2, Job(256, 7, 10**11, 8192, has_groups=False), LaneLimits(40, 1024)),
        (2, Job(256, 4, 10**11, 8192, has_groups=True), LaneLimits(None, 1024)),
        (2, Job(256, 4, 10**11, 8192, has_groups=False, has_budget=True), LaneLimits(None, 1024)),
        (2, Job(64, 64, 10**11, 8192, has_groups=False), LaneLimits(8, 1024)),
        (2, Job(512, 16, 10**11, 8192, has_groups=False, experts="tensors"), None),
        (2, Job(512, 16, 10**11, 32768, has_groups=False, experts="requests"), LaneLimits(None, 12288)),
        (2, Job(512, 16, 10**11, 1024, has_groups=False, experts="requests"), LaneLimits(None, 1024)),
        (4, Job(512, 16, 10**11, 32768, has_groups=False, experts="requests"), LaneLimits(None, 12288)),
        (4, Job(512, 16, 10**11, 8192, has_groups=False), LaneLimits(16, 1024)),
        (3, Job(512, 16, 10**11, 32768, has_groups=False, experts="requests"), None),
        (3, Job(512, 16, 10**11, 8192, has_groups=False), None),
        (8, Job(512, 16, 10**11, 32768, has_groups=False, experts="requests"), None),
        (8, Job(512, 16, 10**11, 8192, has_groups=True, experts="experts"), None),
    ],
)
def test_what_auto_measures_on_cuda(num_ranks: int, job: Job, expected: LaneLimits | None) -> None:
    notes: list[str] = []
    cuda = torch.device("cuda")
    assert lane_limits("auto", num_ranks, cuda, job, notes) == expected
    assert bool(notes) == (expected is None)
    assert lane_limits("off", num_ranks, cuda, job, notes) is None
    for name in ("has_groups", "has_budget"):
        assert num_ranks > 1 or lane_limits("auto", 1, cuda, job._replace(**{name: True}), []) is None
    assert lane_limits("on", num_ranks, cuda, job._replace(has_groups=False), notes) == LaneLimits(8, 1024)


def test_lanes_on_cuda_need_kernels_with_memory_of_their_own() -> None:
    section, cuda = load_config(None, ["engine.two_batch_overlap=on"]).engine, torch.device("cuda")
    with pytest.raises(ConfigError, match="on CUDA, not flashinfer"):
        resolve_mode(section, cuda, "flashinfer", [])
    with pytest.raises(ConfigError, match="does not run with"):
        resolve_mode(replace(section, deterministic=True), cuda, "triton", [])
