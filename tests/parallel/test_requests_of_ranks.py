"""Ranks with requests of their own, whose tokens travel to the ranks of their experts, answer as one process does."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.parallel.group import Group
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.parallel.threads import on_ranks
from tests.tiny_models import random_prompts, run, tiny_device_engine, tiny_engine

CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(3, 3, 8)
GREEDY = SamplingParams(max_tokens=10)
SAMPLED = SamplingParams(max_tokens=10, temperature=0.8, top_k=30, top_p=0.95, seed=5, logprobs=2)
PROMPTS = random_prompts(7, shared=17) + random_prompts(4, seed=1) + [[5, 6, 7, 8, 9] * 4]
ENGINES = {"CPU": tiny_engine, "fixed shapes": tiny_device_engine}
SETTINGS: dict[str, Any] = {"num_pages": 256, "family": "qwen3-moe", "num_layers": 3}


def run_own(engine: Engine, group: Group, prompts: list[list[int]], params: SamplingParams, owner: Any) -> Any:
    """Run the requests of which `owner(i)` is this rank, in step with the other ranks, until all have ended."""
    own = [i for i in range(len(prompts)) if owner(i) == group.rank]
    for i in own:
        engine.submit(Request(i, prompts[i], params, RngKey(params.seed or 0, i, 0)))
    done: dict[int, Completion] = {}
    while any(left for (left,) in group.agree([len(own) - len(done)])):
        done |= {completion.request_id: completion for completion in engine.step()}
        engine.check_integrity()
    return done


def outputs(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, str(c.finish_reason), c.speculation) for c in completions]


def of_ranks(size: int, make: Any, params: SamplingParams, owner: Any, prompts: list[list[int]] = PROMPTS) -> Any:
    """Return the completions of all ranks, and their engines."""

    def work(group: Group) -> tuple[dict[int, Completion], Engine]:
        engine = make(group)
        return run_own(engine, group, prompts, params, owner), engine

    results = on_ranks(size, work)
    done = {i: completion for found, _ in results for i, completion in found.items()}
    return [done[i] for i in range(len(prompts))], [engine for _, engine in results]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize(
    ("method", "shape", "params"),
    [
        ("none", None, GREEDY),
        ("none", None, SAMPLED),
        ("ngram", CHAIN, GREEDY),
        ("draft_model", TREE, SAMPLED),
        ("draft_model", CHAIN, SAMPLED),
        ("eagle", CHAIN, GREEDY),
        ("eagle3", TREE, SAMPLED),
    ],
)
def test_texts_and_rounds_are_those_of_one_process(
    method: str, shape: DraftShape | None, params: SamplingParams, kind: str, size: int
) -> None:
    """In float64, where no sum in another order moves a token. Rank 1 has two thirds of the requests."""
    alone = run(ENGINES[kind](method, shape, **SETTINGS), PROMPTS, params)

    def make(group: Group) -> Engine:
        return ENGINES[kind](method, shape, group=group, division="requests", **SETTINGS)

    found, engines = of_ranks(size, make, params, lambda i: 1 if i % 3 else i % size)
    assert outputs(found) == outputs(alone)
    assert all(engine.num_running == engine.num_waiting == 0 for engine in engines)
