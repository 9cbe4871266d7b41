"""Prompts in pieces: on a CPU each piece is launched, or a stand-in for graphs replays it; on a GPU graphs do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specbatch.config_load import load_config
from specbatch.draft import NoDraft
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.graphs.piecewise import PiecewiseTrunk, token_ladder
from specbatch.graphs.runner import GraphRunner
from specbatch.graphs.traced import CompiledPieces, is_attention
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.engine.graphs import Replays
from tests.tiny_models import (
    num_target_layers,
    paged_of,
    random_prompts,
    round_of,
    run,
    tiny_config,
    tiny_decoder,
    tiny_device_engine,
    tiny_oracle,
)

SIZES = (16, 24, 32, 64)
GREEDY = SamplingParams(max_tokens=6)
SAMPLED = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, top_k=30)
SETTINGS: dict[str, Any] = {"num_pages": 512, "max_batch_size": 8, "eos": (5,), "prefill_chunk_tokens": 64}
CASES = [
    ("none", None),
    ("draft_model", DraftShape(3, 1, 4)),
    ("eagle", DraftShape(3, 1, 4)),
    ("eagle3", DraftShape(4, 3, 12)),
]


def never(key: Any) -> bool:
    return False


def trunks_of(engine: Engine) -> list[PiecewiseTrunk]:
    return [one for one in engine.prompts._trunks if isinstance(one, PiecewiseTrunk)]


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1, [16]), (16, [16]), (17, [16, 17]), (25, [16, 24, 25]), (32, [16, 24, 32]),
        (100, [16, 24, 32, 48, 64, 96, 100]),
    ],
)  # fmt: skip
def test_ladder(largest: int, expected: list[int]) -> None:
    assert token_ladder(largest) == expected


def test_a_whole_graph_is_captured_when_many_chunks_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then they are computed in pieces."""
    monkeypatch.setattr("specbatch.engine.prefill.graphs.CAPTURE_AFTER", 2)
    engine = tiny_device_engine(**SETTINGS, piece_sizes=SIZES, piece_runner=Replays(never), graph_tokens=64)
    (trunk,), found = trunks_of(engine), []
    for length in (9, 12, 17, 40):  # of one shape
        run(engine, random_prompts(1, seed=length, longest=1, shared=length - 1), GREEDY)
        found.append((trunk.num_replays, len(engine.prompts._buffers)))
    assert found == [(1, 0), (2, 0), (2, 1), (2, 1)]


def test_a_trunk_is_split_at_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two attentions there is one piece, whatever the layers are made of."""
    monkeypatch.setattr("specbatch.graphs.traced.compile_pieces", lambda split: 0)
    model = tiny_decoder(tiny_config(4, qkv_bias=True, qk_norm=True), torch.float64, attention=paged_of)
    traced = CompiledPieces(model, (0, 2, 4))
    assert traced.aux_layers == (0, 2), "the last layer's output is not a part of the trunk"
    calls = [is_attention(node) for node in traced.split.graph.nodes if node.op == "call_module"]
    assert calls == [False, True] * 3 + [False]


@pytest.mark.parametrize(
    ("method", "shape", "params", "captured", "whole"),
    [
        ("none", None, GREEDY, False, 0),
        ("draft_model", DraftShape(3, 1, 4), GREEDY, True, 0),
        ("eagle", DraftShape(3, 1, 4), SAMPLED, True, 0),
        ("eagle3", DraftShape(4, 3, 12), GREEDY, True, 64),
    ],
)
def test_texts_are_the_same(
    method: str,
    shape: DraftShape | None,
    params: SamplingParams,
    captured: bool,
    whole: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed prompts, some found in the prefix cache; some longer than a chunk, and so in pieces of other lengths.
    `whole`: chunks of whole prompts of up to as many tokens are padded as a whole."""
    monkeypatch.setattr("specbatch.engine.prefill.graphs.CAPTURE_AFTER", 1)
    prompts = random_prompts(10, shared=10) + random_prompts(2, seed=3, longest=1, shared=70)
    expected = run(tiny_oracle(method, shape, **SETTINGS), prompts, params)
    runner = Replays(never) if captured else None
    engine = tiny_device_engine(method, shape, **SETTINGS, piece_sizes=SIZES, piece_runner=runner, graph_tokens=whole)
    actual = run(engine, prompts, params)
    assert bool(engine.prompts._buffers) == bool(whole)
    assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
    assert [c.speculation for c in actual] == [c.speculation for c in expected]
    assert engine.stats.cached_prompt_tokens > 0
    trunks = trunks_of(engine)
    assert len(trunks) == (2 if method == "draft_model" else 1)
    assert all(trunk.num_replays > (0 if whole else 2) for trunk in trunks)


def test_bits_are_those_of_prompts_without_pieces() -> None:
    """In float32 a token's bits do not depend on padding. Lengths around each size and around a chunk's end; scores of
    prompt tokens, which need the last layer's output of every token."""
    lengths = [length + i for length in (1, *SIZES) for i in (-1, 0, 1) if length + i > 0] + [65, 90, 128, 129]
    prompts = [random_prompts(1, seed=length, longest=1, shared=length - 1)[0] for length in lengths]
    params = replace(GREEDY, max_tokens=2, prompt_logprobs=1, logprobs=2)
    settings = SETTINGS | {"dtype": torch.float32, "max_batch_size": 2, "prefix_cache": False}
    plain, pieces = (
        tiny_device_engine(**settings, piece_sizes=sizes, piece_runner=Replays(never)) for sizes in ((), SIZES)
    )
    expected, actual = run(plain, prompts, params), run(pieces, prompts, params)
    assert actual == expected
    caches = [round_of(engine)._cache.all_layers[..., :-1, :] for engine in (plain, pieces)]
    assert torch.equal(*caches), "all keys and values, and nowhere else"
    assert trunks_of(pieces)[0].num_replays >= len(lengths)


def test_a_round_with_as_many_tokens_as_a_captured_size_replays_nothing() -> None:
    """4 requests of 4 nodes each: 16 tokens, which is a size. So are the 20 that the draft model has of the prompts."""
    shape = DraftShape(3, 1, 4)
    runner = Replays(never)
    settings = SETTINGS | {"max_batch_size": 4, "prefix_cache": False}
    engine = tiny_device_engine("draft_model", shape, **settings, piece_sizes=[16, 20], piece_runner=runner)
    prompts = [[3, 4, 5, 6]] * 4
    for i, prompt in enumerate(prompts):
        engine.submit(Request(i, prompt, SamplingParams(max_tokens=20), RngKey(0, i, 0)))
    engine.step()
    trunks = trunks_of(engine)
    after_prompts = [trunk.num_replays for trunk in trunks], runner.num_replays
    assert after_prompts[0] == [1, 1], "the prompts have 16 tokens, too"
    while engine.num_running:
        engine.step()
    assert engine.stats.rounds > 2
    assert ([trunk.num_replays for trunk in trunks], runner.num_replays) == after_prompts


def test_padding_is_written_nowhere() -> None:
    """A chunk of 16 tokens, then one of 3 padded to 16: the slots of the first are as they were."""
    engine = tiny_device_engine(**SETTINGS, piece_sizes=[16], piece_runner=Replays(never))
    cache = round_of(engine)._cache.all_layers
    run(engine, [list(range(1, 17))], SamplingParams(max_tokens=1))
    before = cache.clone()
    run(engine, [[7, 8, 9]], SamplingParams(max_tokens=1))
    changed = (before != cache).flatten(0, 2).any(dim=2).any(dim=0).nonzero()[:, 0]
    assert len(changed[changed < cache.shape[3] - 1]) == 3


def test_a_size_that_does_not_fit_is_launched() -> None:
    """Memory runs out in the capture of a piece of the largest size: chunks of that size have no pieces."""

    class Full(Replays):
        def capture(self, key: Any, function: Any) -> Any:
            if key[1:] == (64, 1):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return super().capture(key, function)

    runner = Full(never)
    settings = SETTINGS | {"prefix_cache": False}
    engine = tiny_device_engine(**settings, piece_sizes=SIZES, piece_runner=runner)
    assert len(runner) == num_target_layers("none") * (len(SIZES) - 1)
    (trunk,) = trunks_of(engine)
    prompts = random_prompts(2, longest=1, shared=50)
    expected = run(tiny_oracle(**settings), prompts, GREEDY)
    assert [c.token_ids for c in run(engine, prompts, GREEDY)] == [c.token_ids for c in expected]
    assert trunk.num_replays == 0


def test_other_auxiliary_layers() -> None:
    """Without the draft network, fewer are wanted than were captured."""
    shape = DraftShape(3, 1, 4)
    engine = tiny_device_engine("eagle3", shape, **SETTINGS, piece_sizes=SIZES, piece_runner=Replays(never))
    engine.set_methods(ByBatch.always(NoDraft()), "none")
    prompts = random_prompts(3)
    expected = run(tiny_oracle(num_layers=num_target_layers("eagle3"), **SETTINGS), prompts, GREEDY)
    assert [c.token_ids for c in run(engine, prompts, GREEDY)] == [c.token_ids for c in expected]
    assert trunks_of(engine)[0].num_replays > 0


@pytest.mark.slow
def test_compiled_pieces() -> None:
    """By Inductor, on a CPU: once for all layers but the first, and for any number of tokens."""
    prompts = random_prompts(6, shared=10)
    expected = run(tiny_oracle(num_layers=5, **SETTINGS), prompts, GREEDY)
    engine = tiny_device_engine(num_layers=5, **SETTINGS, piece_sizes=SIZES, piece_runner=Replays(never), compiled=True)
    assert [c.token_ids for c in run(engine, prompts, GREEDY)] == [c.token_ids for c in expected]
    (trunk,) = trunks_of(engine)
    assert trunk.num_replays > 2
    assert isinstance(trunk.pieces, CompiledPieces)
    assert trunk.pieces.num_compiled == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("method", "shape", "dtype", "compiled", "whole"),
    [
        *((*case, dtype, False, whole) for case in CASES for dtype, whole in ((torch.float64, 0), (torch.float32, 64))),
        (*CASES[1], torch.float32, True, 0),
        (*CASES[3], torch.float32, True, 0),
    ],
)
def test_graphs_give_the_same_texts(
    method: str,
    shape: DraftShape | None,
    dtype: torch.dtype,
    compiled: bool,
    whole: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """float64 with the reference kernels, float32 with Triton's; with whole graphs (`whole` tokens) and without."""
    monkeypatch.setattr("specbatch.engine.prefill.graphs.CAPTURE_AFTER", 0)
    prompts = random_prompts(10, shared=10) + random_prompts(2, seed=3, longest=1, shared=70)
    settings, cuda = SETTINGS | {"dtype": dtype}, torch.device("cuda")
    runner = GraphRunner(cuda)
    engine = tiny_device_engine(
        method, shape, **settings, device=cuda, graphs="round", piece_sizes=SIZES, piece_runner=runner,
        compiled=compiled, graph_tokens=whole,
    )  # fmt: skip
    for params in (GREEDY, SAMPLED):
        expected = run(tiny_oracle(method, shape, **settings), prompts, params)
        actual = run(engine, prompts, params)
        assert [c.token_ids for c in actual] == [c.token_ids for c in expected]
    assert len(runner) >= 2 * len(SIZES)
    assert bool(engine.prompts._buffers) == bool(whole)
    replays = [trunk.num_replays for trunk in trunks_of(engine)]
    assert replays[0] > 0 if whole else min(replays) > 2


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "shape"), [CASES[1], CASES[3]])
def test_graphs_have_the_bits_of_launches(method: str, shape: DraftShape) -> None:
    """Chunks of all sizes, in any order, of two models in one memory pool, with auxiliary hidden states: where a graph
    wrote over what a later piece reads, bits would differ."""
    cuda = torch.device("cuda")
    settings = SETTINGS | {"dtype": torch.float32, "max_batch_size": 1, "prefix_cache": False, "device": cuda}
    lengths = [40, 5, 64, 20, 33, 16, 60, 30, 90, 24, 7]
    prompts = [random_prompts(1, seed=length, longest=1, shared=length - 1)[0] for length in lengths]
    params = replace(GREEDY, prompt_logprobs=1, logprobs=2)
    launched, replayed = (
        tiny_device_engine(method, shape, **settings, piece_sizes=SIZES, piece_runner=runner)
        for runner in (None, GraphRunner(cuda))
    )
    assert run(replayed, prompts, params) == run(launched, prompts, params)
    assert torch.equal(*(round_of(engine)._cache.all_layers[..., :-1, :] for engine in (launched, replayed)))
    assert all(trunk.num_replays >= 10 for engine in (launched, replayed) for trunk in trunks_of(engine))


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["none", "eagle3"])
def test_auto(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole graphs for short prompts, pieces for those whose tokens are scored; texts are those of launches."""
    monkeypatch.setattr("specbatch.engine.prefill.graphs.CAPTURE_AFTER", 0)
    draft = [f"speculation.draft=random:{method}", "speculation.num_steps=3"] if method != "none" else []
    sets = ["model.target=random:tiny", "model.dtype=float32", "engine.device=cuda", f"speculation.method={method}"]
    sets += [*draft, "engine.kv_cache_tokens=8192", "engine.prefill_chunk_tokens=256", "engine.max_batch_size=4"]
    prompts, found = random_prompts(6, longest=60) + random_prompts(2, seed=3, longest=1, shared=300), []
    for graphs in ("off", "auto"):
        resolved = resolve(load_config(None, [*sets, f"prefill.graphs={graphs}"]))
        engine = build_engine(resolved)
        assert isinstance(engine, Engine)
        found.append([run(engine, prompts, replace(GREEDY, prompt_logprobs=wanted)) for wanted in (None, 1)])
    assert [[c.token_ids for c in part] for part in found[0]] == [[c.token_ids for c in part] for part in found[1]]
    assert resolved.config.prefill.graphs == "both"
    assert any("graphs of pieces" in note for note in resolved.notes)
    assert "prompt_graphs" in engine.start_bytes
    assert engine.prompts.runner
    assert all(trunk.num_replays > 1 for trunk in trunks_of(engine))
