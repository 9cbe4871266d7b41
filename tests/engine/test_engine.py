"""The device engine against the oracle, on CPU over the torch twins in float64: the same tokens, counts and log-
probabilities, for every method, shape, schedule and sampling mode."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from specbatch.draft.shape import DraftShape
from specbatch.engine import round
from specbatch.engine.engine import Engine
from specbatch.setup.trial import trial_prompt, trial_round
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.engine.graphs import assert_close_logprobs
from tests.marks import slow_on_cpu
from tests.tiny_models import VOCAB, random_prompts, round_of, run, run_requests, tiny_device_engine, tiny_oracle

CHAIN, SHORT, TREE, WIDE = DraftShape(3, 1, 4), DraftShape(1, 1, 2), DraftShape(5, 4, 8), DraftShape(7, 10, 60)
CASES = [
    ("none", None),
    ("ngram", CHAIN),
    ("draft_model", SHORT),
    ("draft_model", CHAIN),
    ("draft_model", TREE),
    ("eagle", CHAIN),
    ("eagle", TREE),
    ("eagle3", SHORT),
    ("eagle3", CHAIN),
    ("eagle3", TREE),
    slow_on_cpu("eagle3", WIDE),
]
GREEDY = SamplingParams(max_tokens=12)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=3)


def assert_same(actual: list[Completion], expected: list[Completion]) -> None:
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in actual] == [c.finish_reason for c in expected]
    assert [c.speculation for c in actual] == [c.speculation for c in expected]


PROMPTS = random_prompts(6, shared=10)
SETTINGS: dict[str, Any] = {"num_pages": 256, "eos": (5,)}


@cache
def by_the_oracle(method: str, shape: DraftShape | None, sampled: bool) -> list[Completion]:
    """Of `PROMPTS`; several tests compare with it."""
    return run(tiny_oracle(method, shape, **SETTINGS), PROMPTS, SAMPLED if sampled else GREEDY)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_equals_the_oracle(method: str, shape: DraftShape | None, sampled: bool) -> None:
    actual = run(tiny_device_engine(method, shape, **SETTINGS), PROMPTS, SAMPLED if sampled else GREEDY)
    assert_same(actual, by_the_oracle(method, shape, sampled))


@pytest.mark.parametrize(
    ("method", "shape"), [("draft_model", TREE), ("draft_model", CHAIN), ("eagle", TREE), ("eagle3", CHAIN)]
)
def test_draft_extend_of_large_batches(method: str, shape: DraftShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last layer is computed for each request's last accepted token only."""
    monkeypatch.setattr(round, "_FREE_ROWS", 0)
    for sampled in (False, True):
        actual = run(tiny_device_engine(method, shape, **SETTINGS), PROMPTS, SAMPLED if sampled else GREEDY)
        assert_same(actual, by_the_oracle(method, shape, sampled))


@pytest.mark.parametrize(("method", "shape"), [("none", None), ("draft_model", TREE), ("eagle3", CHAIN)])
def test_preemption_and_small_chunks(method: str, shape: DraftShape | None) -> None:
    """Pages run out again and again, and prompts come in pieces; the text is the one of a roomy cache."""
    prompts = random_prompts(6, seed=1, longest=30)
    params = SamplingParams(max_tokens=20)
    expected = run(tiny_oracle(method, shape, num_pages=256), prompts, params)
    lookahead = 24 if shape is TREE else 4
    engine = tiny_device_engine(method, shape, num_pages=24 + lookahead // 2, prefill_chunk_tokens=7)
    actual = run(engine, prompts, params)
    assert engine.stats.preemptions > 0
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]


def test_draft_vocabulary_of_its_own() -> None:
    prompts = random_prompts(5)
    settings = {"num_pages": 256, "draft_vocab": 30}
    for params in (GREEDY, SAMPLED):
        expected = run(tiny_oracle("eagle3", CHAIN, **settings), prompts, params)
        assert_same(run(tiny_device_engine("eagle3", CHAIN, **settings), prompts, params), expected)


@pytest.mark.parametrize(("method", "shape"), [("none", None), ("eagle", TREE), ("ngram", CHAIN)])
def test_logprobs(method: str, shape: DraftShape | None) -> None:
    prompts = random_prompts(5)
    params = SamplingParams(max_tokens=12, logprobs=3)
    expected = run(tiny_oracle(method, shape, num_pages=256), prompts, params)
    actual = run(tiny_device_engine(method, shape, num_pages=256), prompts, params)
    assert expected[0].logprobs
    assert_close_logprobs(actual, expected)


def test_stop_strings() -> None:
    """The host sees them a round after the device has gone on; what ran in vain disturbs nobody, prompts submitted
    meanwhile included."""
    prompts = random_prompts(9, shared=6)

    def run_with_stops(engine: Engine) -> dict[int, Completion]:
        done: dict[int, Completion] = {}
        for i, prompt in enumerate(prompts):
            for n in (1, 2) if i == 0 else (1,):
                params = replace(SAMPLED if i % 2 else GREEDY, ignore_eos=n == 2)
                check = StopAt(modulus=7, remainder=i % 7)
                engine.submit(Request(10 * i + n, prompt, params, RngKey(2**63 + i, i, n), check))
            done |= {c.request_id: c for c in engine.step()}
        while len(done) < len(prompts) + 1:
            done |= {c.request_id: c for c in engine.step()}
            engine.check_integrity()
        return done

    settings = {"num_pages": 256, "eos": (5,)}
    expected = run_with_stops(tiny_oracle("eagle3", TREE, **settings))
    actual = run_with_stops(tiny_device_engine("eagle3", TREE, **settings))
    assert_same([actual[i] for i in sorted(actual)], [expected[i] for i in sorted(expected)])
    assert any(len(c.token_ids) < GREEDY.max_tokens for c in expected.values())


@dataclass
class StopAt:
    """A stop check that ends at a token of some residue, which it keeps out of the text."""

    modulus: int
    remainder: int

    def __call__(self, tokens: Sequence[int], start: int, num_new: int) -> int | None:
        tokens = tokens[start:]
        first = len(tokens) - num_new
        hits = [i for i in range(first, len(tokens)) if tokens[i] % self.modulus == self.remainder and i > 3]
        return hits[0] if hits else None


def test_stop_tokens() -> None:
    """More of them than the device looks for."""
    prompts = random_prompts(6)
    plain = run(tiny_oracle(num_pages=256), prompts, SamplingParams(max_tokens=30))
    stops = tuple(sorted({c.token_ids[7] for c in plain}))[:9]  # more than the device looks for
    params = SamplingParams(max_tokens=30, stop_token_ids=stops)
    expected = run(tiny_oracle("eagle3", CHAIN, num_pages=256), prompts, params)
    assert_same(run(tiny_device_engine("eagle3", CHAIN, num_pages=256), prompts, params), expected)


@pytest.mark.parametrize(("shape", "length"), [(CHAIN, 2.5), (CHAIN, 4.0), (TREE, 2.3)])
def test_simulated_acceptance(shape: DraftShape, length: float) -> None:
    engine = tiny_device_engine("eagle3", shape, num_pages=512, max_batch_size=8, simulate=length)
    done = run(engine, random_prompts(8), SamplingParams(max_tokens=100))
    assert all(len(c.token_ids) == 100 for c in done)
    assert engine.stats.speculation.acceptance_length == pytest.approx(length, abs=0.12)


@pytest.mark.parametrize("page_size", [4, 8, 16])
@pytest.mark.parametrize("shape", [DraftShape(5, 1, 6), DraftShape(7, 1, 8), DraftShape(5, 4, 8)])
def test_rows_that_fill_the_context(shape: DraftShape, page_size: int) -> None:
    """Every draft is accepted, and the round under way when a row ends runs once more in vain: nothing reads or writes
    past positions and pages, and a row alone in the cache ends at its very length."""
    engine = tiny_device_engine(
        "eagle3",
        shape,
        num_pages=96 // page_size,
        page_size=page_size,
        max_batch_size=2,
        simulate=shape.num_steps + 1.0,
    )
    longest = engine.limits.max_prompt_tokens + 1
    for prompt in random_prompts(3):
        (done,) = run(engine, [prompt], SamplingParams(max_tokens=1000))
        assert len(prompt) + len(done.token_ids) == longest


def test_trees_deeper_than_they_are_large() -> None:
    prompts = random_prompts(5)
    shape = DraftShape(17, 2, 8)
    expected = run(tiny_oracle("eagle3", shape, num_pages=256), prompts, GREEDY)
    assert_same(run(tiny_device_engine("eagle3", shape, num_pages=256), prompts, GREEDY), expected)


def test_vocabulary_is_checked() -> None:
    engine = tiny_device_engine()
    with pytest.raises(ValueError, match="vocabulary"):
        run(engine, [[VOCAB]], GREEDY)


@pytest.mark.parametrize(
    ("method", "shape"), [("none", None), ("ngram", CHAIN), ("draft_model", CHAIN), ("eagle", TREE)]
)
def test_the_trial_run_changes_no_slot(method: str, shape: DraftShape | None) -> None:
    """What measures memory and compiles kernels before the cache has its size; fewer tokens than slots, too."""
    engine = tiny_device_engine(method, shape, num_pages=64, max_batch_size=8, min_lane=1)
    state = round_of(engine).state
    before = state.ints_SF.clone()
    for num_tokens in (4, 32, 64):
        for num_prompts in (1, num_tokens // 4):
            trial_prompt(round_of(engine), num_tokens, num_prompts)
    state.add_rules(VOCAB).add_node_masks(round_of(engine).method.num_lookahead)
    state.add_grammars(VOCAB, ())
    trial_round(round_of(engine), torch.full((8,), state.padding), num_top=20)
    assert torch.equal(state.ints_SF, before)
    prompts = random_prompts(3)
    assert_same(run(engine, prompts, GREEDY), run(tiny_oracle(method, shape, num_pages=64), prompts, GREEDY))


def test_a_step_that_is_interrupted_loses_no_completion() -> None:
    """Before a preemption all results are read, so requests end. Then the launch is interrupted."""
    prompts = random_prompts(12, longest=30)
    wanted = [
        Request(i, prompt, SamplingParams(max_tokens=4 + 3 * i), RngKey(0, i, 0)) for i, prompt in enumerate(prompts)
    ]
    expected = run_requests(tiny_oracle(num_pages=256), wanted)
    engine, num_interrupts, num_left = tiny_device_engine(num_pages=28), 0, 0
    launch, done = engine.executor.run, list[Completion]()

    def interrupted(*args: Any) -> Any:
        nonlocal num_interrupts
        if engine.num_running + engine.num_waiting < num_left:  # a request has ended in this step
            num_interrupts += 1
            raise KeyboardInterrupt
        return launch(*args)

    engine.executor.run = interrupted  # type: ignore[method-assign]
    for request in wanted:
        engine.submit(request)
    for _ in range(200):
        num_left = engine.num_running + engine.num_waiting
        with contextlib.suppress(KeyboardInterrupt):
            done += engine.step()
    assert num_interrupts > 0
    done.sort(key=lambda completion: completion.request_id)
    assert [c.token_ids for c in done] == [c.token_ids for c in expected]


def test_what_the_caller_does_between_steps_is_not_the_engines_time() -> None:
    engine = tiny_device_engine("none", None, num_pages=256)
    began = time.perf_counter()
    for i, prompt in enumerate(random_prompts(5)):
        engine.submit(Request(i, prompt, GREEDY, RngKey(0, i, 0)))
    while engine.num_running or engine.num_waiting:
        engine._last_read -= 1e6  # as if it had been away so long
        engine.step()
    assert 0 < engine.stats.prefill_seconds + engine.stats.decode_seconds <= time.perf_counter() - began


def test_launching_a_chunk_is_time_of_prompts() -> None:
    """On the CPU a launch is the whole computation. Bounds from below: a busy machine makes nothing faster."""
    engine = tiny_device_engine("none", None, num_pages=256)
    round_, spent = round_of(engine), {"prefill": 0.0, "draft": 0.0}

    def slow(name: str) -> None:
        function = getattr(round_, name)

        def slowed(*args: object) -> object:
            began = time.perf_counter()
            time.sleep(0.05)
            found = function(*args)
            spent[name] += time.perf_counter() - began
            return found

        setattr(round_, name, slowed)

    slow("prefill")
    slow("draft")
    began = time.perf_counter()
    run(engine, random_prompts(1), replace(GREEDY, max_tokens=4))
    stats = engine.stats
    assert 0 < spent["prefill"] <= stats.prefill_seconds
    # The first of three rounds is launched before the prompt's report is read, so that it counts as the prompt's.
    assert stats.decode_seconds >= 2 * 0.05
    assert stats.prefill_seconds + stats.decode_seconds <= time.perf_counter() - began
