"""Coupled drafts: sampled chains, too, give the tokens of plain decoding, not only their distribution."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.tiny_models import (
    num_target_layers,
    random_prompts,
    round_of,
    run,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
)

CHAINS = {f"chain-{steps}": DraftShape(steps, 1, steps + 1) for steps in (1, 3, 7)}
MIXED: Schedule = ByBatch((1, 2, 3, 5), (DraftShape(5, 1, 6), DraftShape(3, 3, 8), None, DraftShape(2, 1, 3)))
SHAPES: dict[str, DraftShape | Schedule] = {**CHAINS, "schedule": MIXED}
METHODS: dict[str, dict[str, Any]] = {
    "draft_model": {},
    "eagle": {},
    "eagle3": {},
    "eagle3, draft vocabulary": {"draft_vocab": 30},
}
SAMPLED = SamplingParams(max_tokens=10, temperature=0.8, top_k=30, top_p=0.95, min_p=0.01, seed=5)
HOT = SamplingParams(max_tokens=10, temperature=1.3, seed=6, logprobs=2)
PROMPTS = random_prompts(3, shared=17) + random_prompts(3, seed=1)
MAKE = {"CPU": tiny_engine, "fixed shapes": tiny_device_engine}


def outputs(completions: list[Completion]) -> list[tuple[list[int], str, object]]:
    """With the bits of the log-probabilities, where they are wanted."""
    return [(c.token_ids, str(c.finish_reason), c.logprobs) for c in completions]


@cache
def plain_by_the_oracle() -> list[Completion]:
    return run(tiny_oracle(), PROMPTS, SAMPLED)


def accepted(completions: list[Completion]) -> int:
    return sum(c.speculation.accepted for c in completions)


# Log-probabilities have the same bits in float32 only, see `test_invariance`.
@pytest.mark.parametrize(
    ("shape", "dtype", "params"),
    [
        pytest.param("chain-1", torch.float64, SAMPLED, id="chain-1, float64", marks=pytest.mark.slow),
        pytest.param("chain-3", torch.float32, HOT, id="chain-3, float32"),
        pytest.param("chain-7", torch.float64, SAMPLED, id="chain-7, float64", marks=pytest.mark.slow),
        pytest.param("schedule", torch.float64, SAMPLED, id="schedule, float64"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_sampled_chains_equal_plain_sampling(
    method: str, shape: str, dtype: torch.dtype, params: SamplingParams
) -> None:
    name = method.split(",")[0]
    plain = tiny_engine(num_layers=num_target_layers(name), dtype=dtype, num_pages=256)
    engine = tiny_engine(name, SHAPES[shape], dtype=dtype, num_pages=256, coupled=True, **METHODS[method])
    completions = run(engine, PROMPTS, params)
    assert outputs(completions) == outputs(run(plain, PROMPTS, params))
    assert accepted(completions) > 0, "nothing was accepted: the test would prove little"


SCHEDULING: dict[str, dict[str, Any]] = {
    "batch-1, page-1": {"max_batch_size": 1, "page_size": 1, "num_pages": 700},
    "batch-8, page-16": {"max_batch_size": 8, "page_size": 16, "num_pages": 256},
    "chunk-3, no prefix": {"prefill_chunk_tokens": 3, "prefix_cache": False, "num_pages": 256},
    "preempted": {"num_pages": 24},
}


@pytest.mark.parametrize("change", SCHEDULING)
@pytest.mark.parametrize(
    ("method", "shape", "engine"), [("draft_model", "chain-3", "fixed shapes"), ("eagle", "schedule", "CPU")]
)
def test_scheduling_changes_nothing(method: str, shape: str, change: str, engine: str) -> None:
    changed = MAKE[engine](method, SHAPES[shape], coupled=True, **SCHEDULING[change])
    assert outputs(run(changed, PROMPTS, SAMPLED)) == outputs(plain_by_the_oracle())
    assert (changed.stats.preemptions > 0) == (change == "preempted")
    assert (changed.stats.cached_prompt_tokens > 0) == (change != "chunk-3, no prefix")


@pytest.mark.parametrize(("shape", "engine"), [("chain-1", "CPU"), ("chain-3", "fixed shapes")])
@pytest.mark.parametrize("method", METHODS)
def test_the_oracle_accepts_the_same_drafts(method: str, shape: str, engine: str) -> None:
    name, options = method.split(",")[0], {"num_pages": 256, "coupled": True, **METHODS[method]}
    expected = run(tiny_oracle(name, CHAINS[shape], **options), PROMPTS, SAMPLED)
    completions = run(MAKE[engine](name, CHAINS[shape], **options), PROMPTS, SAMPLED)
    assert [c.speculation for c in completions] == [c.speculation for c in expected]
    assert outputs(completions) == outputs(expected)


@pytest.mark.parametrize("shape", CHAINS)
def test_a_perfect_draft_is_accepted(shape: str) -> None:
    """The target drafts for itself: at any temperature draft and target draw the same token."""
    engine = tiny_engine("draft_model", CHAINS[shape], num_pages=256, coupled=True)
    net: Any = round_of(engine).method.net
    net._model = round_of(engine)._target
    net.cache = net._model.new_cache(257 * 4, torch.float64)
    counts = [c.speculation for c in run(engine, PROMPTS, HOT)]
    assert all(c.rounds == -(-(HOT.max_tokens - 1) // (CHAINS[shape].num_steps + 1)) for c in counts)


@pytest.mark.parametrize("engine", MAKE)
def test_greedy_and_sampled_requests_together(engine: str) -> None:
    """Greedy ones take the rounds that they take alone, without coupled drafts."""
    greedy, shape = SamplingParams(max_tokens=10), CHAINS["chain-3"]
    alone = [run(tiny_engine("eagle", shape), [prompt], greedy, check=False)[0] for prompt in PROMPTS[::2]]
    both = MAKE[engine]("eagle", shape, num_pages=256, max_batch_size=8, coupled=True)
    for i, prompt in enumerate(PROMPTS):
        params = SAMPLED if i % 2 else greedy
        both.submit(Request(i, prompt, params, RngKey(params.seed or 0, i, 0)))
    done: dict[int, Completion] = {}
    while len(done) < len(PROMPTS):
        done |= {c.request_id: c for c in both.step()}
    assert [(done[2 * i].token_ids, done[2 * i].speculation) for i in range(len(alone))] == [
        (c.token_ids, c.speculation) for c in alone
    ]
    assert [done[i].token_ids for i in (1, 3, 5)] == [plain_by_the_oracle()[i].token_ids for i in (1, 3, 5)]
