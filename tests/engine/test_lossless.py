"""The project's first property: speculation does not change the output, on any path. The measure is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specbatch.draft.shape import DraftShape
from specbatch.types import SamplingParams
from tests.marks import slow_on_cpu
from tests.tiny_models import (
    num_target_layers,
    random_prompts,
    round_of,
    run,
    tiny_config,
    tiny_decoder,
    tiny_engine,
    tiny_oracle,
)

SHAPES = {
    "chain-3": DraftShape(3, 1, 4),
    "chain-1": DraftShape(1, 1, 2),
    "chain-7": DraftShape(7, 1, 8),
    "tree-2-2": DraftShape(2, 2, 4),
    "tree-5-4-8": DraftShape(5, 4, 8),
    "tree-4-4-34": DraftShape(4, 4, 34),  # masks of two words
    "tree-7-10-60": DraftShape(7, 10, 60),
}
METHODS = ["ngram", "draft_model", "eagle"]  # eagle3 needs a deeper target and has tests of its own
CASES = [(m, s) for m in METHODS for s in SHAPES if m != "ngram" or s.startswith("chain")]
# On the CPU the widest tree takes as long as all others.
FAST = [slow_on_cpu(m, s) if s == "tree-7-10-60" else (m, s) for m, s in CASES]
EAGLE3 = [slow_on_cpu(s, None) if s == "tree-7-10-60" else (s, None) for s in SHAPES]
EAGLE3 += [("chain-3", 30), ("tree-5-4-8", 30)]
# Preemption sees a method's lookahead and whether its drafts are trees.
PREEMPTED = [
    ("ngram", "chain-3"),
    ("draft_model", "chain-1"),
    ("draft_model", "tree-5-4-8"),
    ("eagle", "chain-7"),
    ("eagle", "tree-2-2"),
]
PREEMPTED += [slow_on_cpu(*case) for case in CASES if case not in PREEMPTED]
GREEDY = SamplingParams(max_tokens=16)
SAMPLED = SamplingParams(max_tokens=16, temperature=0.8, top_k=30, top_p=0.95, min_p=0.01, seed=5)


def texts(completions: list) -> list[tuple[list[int], str]]:
    """With the margins, to 5 digits: the oracle adds up in another order."""
    return [(c.token_ids, f"{c.finish_reason}, {c.margin.value:.5g} at {c.margin.position}") for c in completions]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    repeated = [[5, 6, 7, 8, 9] * 4, [3] * 12]  # something for n-grams to find
    return random_prompts(3, shared=17) + random_prompts(1, seed=1) + repeated


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[tuple[list[int], str]]:
    """By the oracle."""
    return texts(run(tiny_oracle("none", prefix_cache=False), prompts, GREEDY))


def test_plain_output_is_worth_comparing(plain: list[tuple[list[int], str]]) -> None:
    """Different prompts give different texts, and those are not one token over and over."""
    assert len({tuple(tokens) for tokens, _ in plain}) == len(plain)
    assert sum(len(set(tokens)) > 4 for tokens, _ in plain) > len(plain) // 2
    assert len({ending for _, ending in plain}) == len(plain), "two margins are equal"
    assert any(not ending.endswith("at 0") for _, ending in plain)


@pytest.mark.parametrize(("method", "shape"), FAST)
def test_greedy_equals_plain(
    method: str, shape: str, prompts: list[list[int]], plain: list[tuple[list[int], str]]
) -> None:
    completions = run(tiny_engine(method, SHAPES[shape], num_pages=256), prompts, GREEDY)
    assert texts(completions) == plain
    if method == "draft_model":
        assert sum(c.speculation.accepted for c in completions) > 0, (
            "nothing was ever accepted: the test would prove little"
        )


@pytest.fixture(scope="module")
def plain_eagle3(prompts: list[list[int]]) -> list[tuple[list[int], str]]:
    """Plain decoding of EAGLE-3's deeper target, by the oracle."""
    return texts(run(tiny_oracle("none", num_layers=num_target_layers("eagle3"), num_pages=256), prompts, GREEDY))


@pytest.mark.parametrize(("shape", "draft_vocab"), EAGLE3)
def test_eagle3_equals_its_plain(
    shape: str, draft_vocab: int | None, prompts: list[list[int]], plain_eagle3: list
) -> None:
    engine = tiny_engine("eagle3", SHAPES[shape], num_pages=256, draft_vocab=draft_vocab)
    assert texts(run(engine, prompts, GREEDY)) == plain_eagle3


@pytest.mark.parametrize(("method", "shape"), PREEMPTED)
def test_preemption_changes_nothing(
    method: str, shape: str, prompts: list[list[int]], plain: list[tuple[list[int], str]]
) -> None:
    """A cache so small that requests are thrown out and recomputed."""
    lookahead = tiny_engine(method, SHAPES[shape], num_pages=256).num_lookahead
    longest = max(map(len, prompts)) + GREEDY.max_tokens
    engine = tiny_engine(method, SHAPES[shape], num_pages=(longest + 2 * lookahead) // 4 + 6)
    assert texts(run(engine, prompts, GREEDY)) == plain
    assert engine.stats.preemptions > 0, "the cache was too large to preempt anything"


SCHEDULING: dict[str, dict[str, Any]] = {
    "batch-1, page-1": {"max_batch_size": 1, "page_size": 1, "num_pages": 700},
    "batch-8, page-16": {"max_batch_size": 8, "page_size": 16},
    "chunk-3, no prefix": {"prefill_chunk_tokens": 3, "prefix_cache": False},
}


@pytest.mark.parametrize("change", SCHEDULING)
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model", "eagle"])
def test_scheduling_changes_nothing(
    change: str, method: str, prompts: list[list[int]], plain: list[tuple[list[int], str]]
) -> None:
    shape = SHAPES["chain-3"] if method != "eagle" else SHAPES["tree-5-4-8"]
    engine = tiny_engine(method, shape, **{"num_pages": 256, **SCHEDULING[change]})
    assert texts(run(engine, prompts, GREEDY)) == plain
    assert (engine.stats.cached_prompt_tokens > 0) == (change != "chunk-3, no prefix")


@pytest.fixture(scope="module")
def plain_sampled(prompts: list[list[int]]) -> list[tuple[list[int], str]]:
    """By the oracle."""
    return texts(run(tiny_oracle("none"), prompts, SAMPLED))


@pytest.mark.parametrize(
    ("method", "shape"), [("ngram", "chain-3"), ("draft_model", "tree-5-4-8"), ("eagle", "tree-2-2")]
)
def test_sampled_deterministic_drafts_equal_plain_sampling(
    method: str, shape: str, prompts: list[list[int]], plain_sampled: list[tuple[list[int], str]]
) -> None:
    """Trees and n-grams draw the numbers that plain sampling draws: the same tokens, not only the same distribution."""
    completions = run(tiny_engine(method, SHAPES[shape], num_pages=256), prompts, SAMPLED)
    assert texts(completions) == plain_sampled
    assert sum(c.speculation.accepted for c in completions) > 0


def test_sampled_chain_does_not_depend_on_scheduling(prompts: list[list[int]]) -> None:
    """p/q chains are another draw from the same distribution, but the same one however requests are scheduled."""
    shape = SHAPES["chain-3"]
    base = run(tiny_oracle("draft_model", shape, num_pages=256), prompts, SAMPLED)
    others = [
        tiny_engine("draft_model", shape, num_pages=256, max_batch_size=1, prefix_cache=False),
        tiny_engine("draft_model", shape, num_pages=256, max_batch_size=8, prefill_chunk_tokens=5),
        tiny_engine("draft_model", shape, num_pages=27),
    ]
    for engine in others:
        completions = run(engine, prompts, SAMPLED)
        assert texts(completions) == texts(base)
        assert [c.speculation for c in completions] == [c.speculation for c in base]
    assert others[-1].stats.preemptions > 0


@pytest.mark.parametrize("shape", [DraftShape(3, 1, 4), DraftShape(3, 4, 37)])
def test_a_perfect_draft_is_accepted(shape: DraftShape, prompts: list[list[int]]) -> None:
    """The target drafting for itself, so draft caches, positions and draft-extend are right: a chain is accepted
    whole, and so is one branch of a tree that verifies every candidate (unless the best path fell out of the beam)."""
    engine = tiny_engine("draft_model", shape, num_pages=256)
    net: Any = round_of(engine).method.net
    net._model = round_of(engine)._target
    net.cache = net._model.new_cache(257 * 4, torch.float64)
    counts = [c.speculation for c in run(engine, prompts, GREEDY)]
    if shape.is_chain:
        assert all(c.rounds == -(-(GREEDY.max_tokens - 1) // (shape.num_steps + 1)) for c in counts)
    else:
        assert sum(c.accepted_at[2] for c in counts) > 0.9 * sum(c.proposed_at[2] for c in counts)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_requests_of_one_token_leave_a_whole_prefix_behind(method: str) -> None:
    """A request that ends in its prefill shares its pages: the draft's entries in them must be there too."""
    prompt = random_prompts(1, seed=3, longest=1, shared=20)[0]
    later = [[*prompt, 3, 4], [*prompt, 7]]
    fresh = run(tiny_oracle(method, SHAPES["chain-3"], prefix_cache=False), later, SAMPLED)
    engine = tiny_engine(method, SHAPES["chain-3"])
    run(engine, [prompt], SamplingParams(max_tokens=1))
    run(engine, [[9] * 24], SamplingParams(max_tokens=8))  # scribbles over what was freed
    shared = run(engine, later, SAMPLED)
    assert engine.stats.cached_prompt_tokens > 0
    assert texts(shared) == texts(fresh)
    assert [c.speculation for c in shared] == [c.speculation for c in fresh]


def test_a_draft_model_with_a_smaller_embedding() -> None:
    """Embeddings of one family are padded to different sizes: a token past the draft's must not abort the run."""
    engine = tiny_engine("draft_model", SHAPES["chain-3"])
    net: Any = round_of(engine).method.net
    net._model, net._width = tiny_decoder(tiny_config(1, vocab=50), torch.float64), 50
    prompts = [[1, 2, 55, 3]]
    assert texts(run(engine, prompts, GREEDY)) == texts(run(tiny_oracle("none"), prompts, GREEDY))
