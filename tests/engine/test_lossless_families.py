"""Speculation changes nothing with the traits of other families: windows that bind, soft caps, sinks, norms after
attention and MLP, two rotary embeddings, heads that rotate in part, experts. The measure is the oracle, in float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from specbatch.cache.prefix_groups import GroupLimits
from specbatch.draft.shape import DraftShape
from specbatch.types import SamplingParams
from tests.engine.test_lossless import GREEDY, SAMPLED, SHAPES, texts
from tests.tiny_models import num_target_layers, random_prompts, run, tiny_device_engine, tiny_engine, tiny_oracle

FAMILIES = ["gemma2", "qwen3-moe", "gpt-oss", "gemma3", "glm4-moe", "flex-olmo", "pre-norms", "cohere2", "gpt-neox"]
# A default run has all cases of the first three families, and these.
NOT_WIDE = [("pre-norms", "eagle3-tree"), ("cohere2", "draft-model-tree"), ("gpt-neox", "pieces")]
# Method, shape, settings of the engine. Prompts of 17 shared tokens hit the prefix cache.
CASES: dict[str, tuple[str, DraftShape | None, dict[str, Any]]] = {
    "plain": ("none", None, {}),
    "ngram": ("ngram", SHAPES["chain-3"], {}),
    "draft-model-chain": ("draft_model", SHAPES["chain-7"], {}),
    "draft-model-tree": ("draft_model", SHAPES["tree-5-4-8"], {}),
    "eagle-tree": ("eagle", SHAPES["tree-2-2"], {}),
    "eagle3-tree": ("eagle3", SHAPES["tree-4-4-34"], {}),
    "short-chunks": ("draft_model", SHAPES["tree-5-4-8"], {"prefill_chunk_tokens": 3, "prefix_cache": False}),
    "preempted": ("ngram", SHAPES["chain-3"], {"num_pages": 22}),
    "lanes": ("draft_model", SHAPES["chain-3"], {"min_lane": 1, "max_batch_size": 6}),
    "pieces": ("draft_model", SHAPES["tree-5-4-8"], {"piece_sizes": (8, 32)}),
    "cascade": ("draft_model", SHAPES["chain-3"], {"cascade": GroupLimits(2, 2)}),
}


PROMPTS = [*random_prompts(4, shared=17), [5, 6, 7, 8, 9] * 4, [3] * 12]


@functools.cache
def plain_texts(family: str, num_layers: int, params: SamplingParams) -> list[tuple[list[int], str]]:
    """Return the oracle's texts of plain decoding, which takes longer than the engine's."""
    return texts(run(tiny_oracle("none", family=family, num_layers=num_layers, num_pages=256), PROMPTS, params))


@pytest.mark.parametrize("sampled", [False, pytest.param(True, marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    ("family", "case"),
    [
        pair if family in FAMILIES[:3] or pair in NOT_WIDE else pytest.param(*pair, marks=pytest.mark.wide)
        for family in FAMILIES
        for pair in ((family, case) for case in CASES)
    ],
)
def test_equal_to_the_oracle(family: str, case: str, sampled: bool) -> None:
    method, shape, settings = CASES[case]
    if sampled and shape is not None and shape.is_chain and method != "ngram":
        pytest.skip("chains draw other numbers from the same distribution")
    params: SamplingParams = SAMPLED if sampled else GREEDY
    on_device = "min_lane" in settings or "cascade" in settings or "piece_sizes" in settings
    make = tiny_device_engine if on_device else tiny_engine
    engine = make(method, shape, **{"num_pages": 256, "family": family, **settings})
    completions = run(engine, PROMPTS, params)
    assert texts(completions) == plain_texts(family, num_target_layers(method), params)
    if method == "draft_model":
        assert sum(c.speculation.accepted for c in completions) > 0
    if case == "preempted":
        assert engine.stats.preemptions > 0
