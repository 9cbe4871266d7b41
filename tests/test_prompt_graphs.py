"""Chunks of whole prompts, padded to few shapes: on a CPU run as they are, on a GPU graphs. Texts are the oracle's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specbatch.engine.device_engine import DeviceEngine
from specbatch.engine.prompt_graphs import PromptGraphs
from specbatch.engine.prompts import ChunkShape, PromptPacker
from specbatch.engine.round import Round
from specbatch.engine.transfers import Transfers
from specbatch.speculation.tree import DraftShape
from specbatch.types import NoiseKey, Request, SamplingParams
from tests.models import CPU, random_prompts, run, tiny_device_engine, tiny_engine

CASES = [
    ("none", None),
    ("ngram", DraftShape(3, 1, 4)),
    ("draft_model", DraftShape(3, 1, 4)),
    ("draft_model", DraftShape(3, 4, 8)),
    ("eagle", DraftShape(3, 1, 4)),
    ("eagle3", DraftShape(4, 3, 12)),
]
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, top_k=30, min_p=0.01)
CUDA = torch.device("cuda")


def shapes_used(monkeypatch: pytest.MonkeyPatch) -> list[ChunkShape | None]:
    """Of every chunk from now on, the shape that it is padded to."""
    used: list[ChunkShape | None] = []
    shape_of = PromptGraphs._shape

    def noted(graphs: PromptGraphs, packed: Any) -> ChunkShape | None:
        used.append(shape_of(graphs, packed))
        return used[-1]

    monkeypatch.setattr(PromptGraphs, "_shape", noted)
    return used


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_texts_are_the_same(
    method: str, shape: DraftShape | None, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share a prefix, some found in the cache; some longer than a chunk, and so in pieces."""
    prompts = random_prompts(14, shared=10) + random_prompts(2, seed=3, longest=1, shared=70)
    settings: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "eos": (5,)}
    expected = run(tiny_engine(method, shape, **settings), prompts, params)
    used = shapes_used(monkeypatch)
    engine = tiny_device_engine(method, shape, **settings, prefill_chunk_tokens=64, graph_tokens=128)
    actual = run(engine, prompts, params)
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
    assert [c.speculation for c in actual] == [c.speculation for c in expected]
    padded = {one for one in used if one is not None}
    assert len(padded) > 1
    assert None in used, "a piece of a prompt is not padded"
    assert engine.stats.cached_prompt_tokens > 0
    assert {one.rows for one in padded} <= {1, 4, 8}
    state = engine._state
    assert bool(state.ints_SF[state.padding, 3]), "padding is done"


@pytest.mark.parametrize(("method", "shape"), [("draft_model", DraftShape(3, 1, 4)), ("eagle3", DraftShape(3, 2, 6))])
def test_rows_that_are_computed_again(method: str, shape: DraftShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted row comes back with its root known: its chunk is padded, too."""
    prompts = random_prompts(12, seed=1, longest=12)
    params = SamplingParams(max_tokens=30)
    expected = run(tiny_engine(method, shape, num_pages=256), prompts, params)
    used = shapes_used(monkeypatch)
    engine = tiny_device_engine(method, shape, num_pages=40, max_batch_size=8, graph_tokens=128)
    actual = run(engine, prompts, params)
    assert engine.stats.preemptions > 0
    assert any(used)
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]


def test_log_probabilities_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    used = shapes_used(monkeypatch)
    prompts, params = random_prompts(3), SamplingParams(max_tokens=4, logprobs=2)
    engine = tiny_device_engine("none", None, graph_tokens=128)
    actual, expected = run(engine, prompts, params), run(tiny_engine("none", None), prompts, params)
    assert [len(c.logprobs or []) for c in actual] == [4, 4, 4]
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
    assert not used


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle3"])
def test_a_chunk_of_nothing_touches_padding_alone(method: str) -> None:
    """That is what is run when a graph is captured, with other rows in the middle of their texts."""
    engine = tiny_device_engine(method, DraftShape(3, 1, 4), graph_tokens=128, num_pages=128)
    for i, prompt in enumerate(random_prompts(3)):
        engine.submit(Request(i, prompt, GREEDY, NoiseKey(0, i, 0)))
    for _ in range(4):
        engine.step()
    round_, state = engine._round, engine._state
    kept = [state.ints_SF, state.features_SE, state.tokens_SL, state.page_table_SP]
    caches = [round_._cache, *([round_.drafter.net.cache] if round_.drafter.net is not None else [])]
    spare = caches[0].all_layers.shape[3] - 1  # of no page
    before = [part[:-1].clone() for part in kept] + [cache.all_layers[..., :spare, :].clone() for cache in caches]
    packer = engine._packer
    chunk_of_nothing(packer, round_, ChunkShape(64, 4, 64))
    after = [part[:-1] for part in kept] + [cache.all_layers[..., :spare, :] for cache in caches]
    for mine, theirs in zip(after, before, strict=True):
        assert torch.equal(mine, theirs)
    assert bool(state.ints_SF[state.padding, 3])


@torch.inference_mode()
def chunk_of_nothing(packer: PromptPacker, round_: Round, shape: ChunkShape) -> None:
    arrays = packer.pack([]).padded(shape, round_.state.padding)
    longs, ints = (Transfers(CPU).upload(part) for part in (arrays.longs, arrays.ints))
    for sampled in (False, True):
        round_.prefill(packer.chunk(arrays, longs, ints, round_.state.page_table_SP, shape.queries), sampled)


@pytest.mark.parametrize(
    ("tokens", "rows", "queries", "expected"),
    [
        (63, 1, 63, (64, 1, 64)),
        (64, 1, 64, (128, 1, 128)),
        (900, 3, 256, (1024, 4, 256)),
        (900, 5, 257, (1024, 12, 1024)),
        (1023, 12, 100, (1024, 12, 256)),
        (200, 4, 60, (256, 4, 256)),
        (1024, 1, 1024, None),
    ],
)
def test_shapes(tokens: int, rows: int, queries: int, expected: tuple[int, int, int] | None) -> None:
    """More tokens than there are, rows in steps of four, at most as many as there are places."""
    packed = PromptPacker(4, None).pack([])
    packed.target.tokens = [0] * tokens
    packed.target.rows = packed.rows = [0] * rows
    packed.target.max_queries = queries
    graphs = PromptGraphs(PromptPacker(4, None), Transfers(CPU), CPU, 12, 1024)
    assert graphs._shape(packed) == expected
    packed.rows = [0] * (rows - 1)
    assert graphs._shape(packed) is None, "a prompt goes on"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_graphs_give_the_same_texts(
    method: str, shape: DraftShape | None, params: SamplingParams, dtype: torch.dtype
) -> None:
    """Captured with other rows running; float64 over the twins, float32 over the kernels."""
    prompts = random_prompts(14, shared=10) + random_prompts(2, seed=3, longest=1, shared=70)
    settings: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "eos": (5,), "dtype": dtype}
    expected = run(tiny_engine(method, shape, **settings), prompts, params)
    engine = tiny_device_engine(
        method, shape, **settings, device=CUDA, graphs="round", prefill_chunk_tokens=64, graph_tokens=128
    )
    for _ in range(2):  # captured, then replayed
        actual = run(engine, prompts, params)
        assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
    assert num_graphs(engine) > 1


@pytest.mark.gpu
def test_only_whole_rounds_have_graphs_of_prompts() -> None:
    prompts = random_prompts(5)
    engine = tiny_device_engine("none", None, device=CUDA, graphs="phases", graph_tokens=128)
    run(engine, prompts, GREEDY)
    assert num_graphs(engine) == 0


def num_graphs(engine: DeviceEngine) -> int:
    runner = engine._prompts._runner
    assert runner is not None
    return len(runner)
