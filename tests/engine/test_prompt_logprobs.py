"""Log-probabilities of prompt tokens: the same in chunks, after a prefix that is cached, and after a preemption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.coins import plain_logits
from tests.tiny_models import (
    num_target_layers,
    random_prompts,
    run,
    tiny_config,
    tiny_decoder,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
)

PARAMS = SamplingParams(max_tokens=6, prompt_logprobs=3)
PROMPTS = [*random_prompts(7, shared=13), [5]]


def scores(completions: list[Completion]) -> list[Any]:
    return [
        [(lp.token_id, round(lp.logprob, 9), [(i, round(v, 9)) for i, v in lp.top]) for lp in c.prompt_logprobs or ()]
        for c in completions
    ]


def expected(method: str, start: int = 0) -> list[Any]:
    """Of one forward pass over each prompt."""
    target, found = tiny_decoder(tiny_config(num_target_layers(method)), torch.float64), []
    for prompt in PROMPTS:
        logprobs = torch.log_softmax(plain_logits(target, prompt), dim=-1)
        rows = []
        for i in range(max(1, start), len(prompt)):
            values, ids = logprobs[i - 1].topk(3)
            top = [(int(t), round(float(v), 9)) for t, v in zip(ids, values, strict=True)]
            rows.append((prompt[i], round(float(logprobs[i - 1, prompt[i]]), 9), top))
        found.append(rows)
    return found


CASES = [
    ("none", None),
    pytest.param("eagle3", DraftShape(3, 1, 4), marks=pytest.mark.slow),
    pytest.param("draft_model", DraftShape(3, 1, 4), marks=pytest.mark.slow),
    pytest.param("eagle", DraftShape(3, 2, 6), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("method", "shape"), CASES, ids=str)
def test_in_chunks_and_with_a_shared_prefix(method: str, shape: DraftShape | None) -> None:
    plain = [c.token_ids for c in run(tiny_oracle(method, shape), PROMPTS, SamplingParams(max_tokens=6))]
    for make in (tiny_engine, tiny_device_engine, tiny_oracle):
        engine = make(method, shape, prefill_chunk_tokens=9)
        for start in (0, 11):
            found = run(engine, PROMPTS, replace(PARAMS, prompt_logprobs_start=start))
            assert scores(found) == expected(method, start)
            assert [c.token_ids for c in found] == plain
        before = engine.stats.cached_prompt_tokens
        run(engine, PROMPTS, PARAMS)
        assert engine.stats.cached_prompt_tokens == before, "what is scored is computed"
        run(engine, PROMPTS, replace(PARAMS, prompt_logprobs_start=11))
        assert engine.stats.cached_prompt_tokens == before + 7 * 8, "two pages of 4 come before the tenth token"


@pytest.mark.parametrize("make", [tiny_engine, tiny_device_engine])
def test_after_a_preemption(make: Callable[..., Engine]) -> None:
    engine = make(num_pages=24, prefill_chunk_tokens=16)
    found = run(engine, PROMPTS, replace(PARAMS, max_tokens=20))
    assert engine.stats.preemptions > 0
    assert scores(found) == expected("none")


def test_once_for_a_row_and_only_where_asked() -> None:
    engine = tiny_engine()
    for i, params in enumerate((PARAMS, PARAMS, SamplingParams(max_tokens=6))):
        engine.submit(Request(i, PROMPTS[0], params, RngKey(0, 0, sample=i % 2)))
    done: dict[int, Completion] = {}
    while len(done) < 3:
        done |= {completion.request_id: completion for completion in engine.step()}
    assert [len(done[i].prompt_logprobs or ()) for i in range(3)] == [len(PROMPTS[0]) - 1, 0, 0]
    assert done[2].prompt_logprobs is None
