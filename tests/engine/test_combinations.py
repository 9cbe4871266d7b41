"""Lanes, shared prefixes, prompts in pieces, graphs, FP8 caches, grammars, reasoning and rules, in random combinations:
the engine against the oracle, or against plain decoding where keys and values are rounded."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specbatch.cache.prefix_groups import GroupLimits
from specbatch.engine.engine import Engine
from specbatch.grammar.constraint import constraint_of
from specbatch.grammar.reasoning import AfterReasoning
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.engine.graphs import Replays
from tests.engine.test_constrained import COMPILER, GRAMMARS, SHAPES, TOKENIZER
from tests.grammar.tiny_tokenizer import END
from tests.tiny_models import (
    num_target_layers,
    random_prompts,
    run_requests,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
)

RULES: dict[str, list[Any]] = {
    "repetition_penalty": [0.8, 1.3],
    "presence_penalty": [-1.0, 1.5],
    "frequency_penalty": [-0.5, 0.7],
    "logprobs": [0, 2],
    "prompt_logprobs": [0, 1],
    "logit_bias": [{5: 3.0, 9: -100.0}],
}


def requests_of(rng: random.Random, count: int, temperatures: list[float]) -> list[Request]:
    """The same ones for the same state of `rng`; grammars start anew. Half of the prompts share a prefix."""
    prompts = random_prompts(count, shared=rng.choice((0, 9)), longest=60)
    prompts[::2] = random_prompts(len(prompts[::2]), shared=rng.choice((9, 70)), longest=20)
    grammars, found = rng.choice((0, 0, 0.1, 0.8)), []  # batches with a grammar are one lane
    for i, prompt in enumerate(prompts):
        options = {"max_tokens": rng.randint(1, 30), "temperature": rng.choice(temperatures)}
        options |= {name: rng.choice(values) for name, values in RULES.items() if rng.random() < 0.12}
        options["min_tokens"] = rng.randint(0, options["max_tokens"])
        name = rng.choice(list(GRAMMARS)) if rng.random() < grammars else "none"
        params = SamplingParams(**options, **GRAMMARS[name])
        constraint = constraint_of(params)
        matcher: Any = None if constraint is None else COMPILER.matcher(constraint)
        begin, end = rng.choice((None, rng.randrange(3, 60))), rng.randrange(3, 60)
        if matcher is not None and rng.random() < 0.5:
            matcher = AfterReasoning(matcher, begin, (end,), len(TOKENIZER))
        found.append(Request(i, prompt, params, RngKey(7, i, 0), matcher=matcher))
    return found


def engine_of(rng: random.Random, case: str, settings: dict[str, Any]) -> Engine:
    settings |= {"num_pages": rng.choice((64, 128, 512)), "max_batch_size": rng.choice((3, 8, 16))}
    settings |= {
        "prefill_chunk_tokens": rng.choice((8, 24, 200)),
        "piece_sizes": rng.choice(((), (16,), (16, 64, 256))),
    }
    together = rng.choice(("lanes", "groups"))
    if together == "lanes":
        settings["min_lane"] = rng.choice((1, 2))
    if rng.random() < 0.4:
        return tiny_engine(*SHAPES[case], **settings)
    if together == "groups":
        settings["cascade"] = GroupLimits(2, 64, min_batch=rng.choice((1, 3)))
    engine = tiny_device_engine(*SHAPES[case], graph_tokens=rng.choice((0, 128)), **settings)
    if rng.random() < 0.6:
        engine.executor.mode, engine.executor.runner = "round", Replays(lambda key: False)  # type: ignore[assignment]
    return engine


def decided(completions: list[Completion]) -> list[Any]:
    return [
        (one.token_ids, one.finish_reason, one.no_token_left, [item.token_id for item in one.logprobs or ()])
        for one in completions
    ]


def check(seed: int) -> None:
    rng = random.Random(seed)
    case = rng.choice(list(SHAPES))
    method = SHAPES[case][0]
    # A sampled chain of a draft network draws other numbers than plain decoding.
    temperatures = [0.0] if "chain" in case else [0.0, 0.5, 1.0]
    plain: dict[str, Any] = {"num_layers": num_target_layers(method), "eos": (END,)}
    settings: dict[str, Any] = {"eos": (END,)}
    reference: Any
    if rng.random() < 0.2:
        settings["kv_dtype"] = torch.float8_e4m3fn
        reference = tiny_device_engine(**plain, max_batch_size=1, num_pages=512, kv_dtype=torch.float8_e4m3fn)
    else:
        reference = tiny_oracle(**plain)
    count, state = rng.randint(4, 14), rng.getrandbits(32)
    expected = run_requests(reference, requests_of(random.Random(state), count, temperatures))
    engine = engine_of(rng, case, settings)
    found = run_requests(engine, requests_of(random.Random(state), count, temperatures))
    engine.check_integrity()
    assert decided(found) == decided(expected), (seed, case, settings)


FAST = (0, 1, 5, 8, 9)  # groups, grammars, lanes, lanes with a few grammars, groups with many


@pytest.mark.parametrize("seed", [pytest.param(i, marks=() if i in FAST else pytest.mark.slow) for i in range(100)])
def test_random_combinations(seed: int) -> None:
    check(seed)
