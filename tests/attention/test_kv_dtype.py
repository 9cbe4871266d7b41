"""Keys and values in float8: speculation gives plain decoding's tokens over such a cache too, on a CPU with the
reference kernels in float64. What an element becomes depends on itself alone, so neither schedules nor drafts can
show."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from specbatch.cache.pages import KVCache
from specbatch.config import KVDtypeName
from specbatch.config_load import load_config
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.errors import ConfigError
from specbatch.kernels import torch as reference
from specbatch.setup.cache import resolve_kv_dtype
from specbatch.setup.memory import CachedModel, Rows, plan_cache
from specbatch.setup.resolve import resolve
from specbatch.types import SamplingParams
from tests.marks import slow_on_cpu
from tests.tiny_models import CPU, num_target_layers, random_prompts, round_of, run, tiny_config, tiny_device_engine

FP8 = torch.float8_e4m3fn
CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(5, 4, 8)
CASES = [
    ("ngram", CHAIN),
    ("draft_model", CHAIN),
    ("eagle", TREE),
    ("eagle3", CHAIN),
    slow_on_cpu("eagle3", DraftShape(7, 10, 60)),
]
GREEDY = SamplingParams(max_tokens=12)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=3)


def prompts() -> list[list[int]]:
    repeated = [[5, 6, 7, 8, 9] * 4, [3] * 12]  # something for n-grams to find
    return random_prompts(5, shared=10) + repeated


def tokens_of(
    method: str, shape: DraftShape | None, params: SamplingParams, **settings: Any
) -> tuple[Engine, list[list[int]]]:
    settings = {"num_pages": 256, "eos": (5,), "kv_dtype": FP8} | settings
    engine = tiny_device_engine(method, shape, **settings)
    return engine, [list(c.token_ids) for c in run(engine, prompts(), params)]


def plain(params: SamplingParams, num_layers: int, **settings: Any) -> list[list[int]]:
    """Row by row, without drafts and shared pages."""
    settings = {"max_batch_size": 1, "prefix_cache": False} | settings
    return tokens_of("none", None, params, num_layers=num_layers, **settings)[1]


@cache
def plain_greedy(method: str) -> list[list[int]]:
    """What speculation by this method must give: its target has as many layers."""
    return plain(GREEDY, num_target_layers(method))


def cache_of(engine: Engine) -> KVCache:
    return round_of(engine)._cache


@pytest.mark.parametrize(("method", "shape"), CASES)
def test_speculation_equals_plain(method: str, shape: DraftShape) -> None:
    engine, actual = tokens_of(method, shape, GREEDY)
    assert cache_of(engine).all_layers.dtype == FP8
    if round_of(engine).method.net is not None:
        assert round_of(engine).method.net.cache.all_layers.dtype == FP8
    assert actual == plain_greedy(method)
    assert engine.stats.speculation.acceptance_length > 1, "nothing was ever accepted: this proves little"


# Each rule by which tokens are drawn; the other methods in `tests/engine/test_invariance.py`, without float8.
DRAWN = [
    ("none", None),
    ("draft_model", CHAIN),
    ("eagle", TREE),
    *map(slow_on_cpu, ["ngram", "eagle3"], [CHAIN, CHAIN]),
]


@pytest.mark.parametrize(("method", "shape"), DRAWN)
def test_samples_do_not_depend_on_scheduling(method: str, shape: DraftShape | None) -> None:
    """Chains verified by p/q draw otherwise than plain decoding, from the same distribution."""
    _, expected = tokens_of(method, shape, SAMPLED, max_batch_size=1, prefix_cache=False)
    assert tokens_of(method, shape, SAMPLED, max_batch_size=8, prefill_chunk_tokens=5)[1] == expected


def test_the_cache_is_rounded() -> None:
    """The tests here would pass over an unrounded cache too; this one does not."""
    rounded = plain(replace(GREEDY, max_tokens=30), 2)
    assert rounded != plain(replace(GREEDY, max_tokens=30), 2, kv_dtype=None)


@pytest.mark.parametrize(("method", "shape"), [("none", None), ("ngram", CHAIN), ("draft_model", TREE)])
def test_preemption_and_small_chunks(method: str, shape: DraftShape | None) -> None:
    pages = {None: 16, CHAIN: 16, TREE: 28}[shape]
    engine, actual = tokens_of(method, shape, GREEDY, num_pages=pages, prefill_chunk_tokens=7)
    assert engine.stats.preemptions > 0
    assert actual == plain_greedy(method)


@pytest.mark.parametrize("page_size", [1, slow_on_cpu(16), 64])
@pytest.mark.parametrize(("method", "shape"), [("none", None), ("ngram", CHAIN), ("eagle", TREE)])
def test_page_sizes(method: str, shape: DraftShape | None, page_size: int) -> None:
    _, actual = tokens_of(method, shape, GREEDY, num_pages=1024 // page_size, page_size=page_size)
    assert actual == plain_greedy(method)


def test_values_out_of_range_become_the_largest() -> None:
    """What only a broken model computes is different from them: NaN as a key, 0 as a value."""
    values = torch.tensor([500.0, -1e30, 449.0, 448.0, 465.0, 0.3, -1.0, 0.0])
    largest = torch.tensor([448.0, -448.0, 448.0, 448.0, 448.0, 0.3125, -1.0, 0.0])
    cos, sin = torch.ones(4, 8), torch.zeros(4, 8)
    at = torch.tensor([1])
    for broken in (None, torch.inf, torch.nan):
        stored = torch.zeros(2, 1, 3, 8, dtype=FP8)
        if broken is not None:
            values[2] = broken
        reference.rotary_write(values.repeat(1, 3), 1, 1, cos[:, :8], sin[:, :8], at, at, stored, None, None, 0.0)
        k, v = stored[:, 0, 1].float()
        if broken is None:
            assert torch.equal(k, largest)
            assert torch.equal(v, largest)
        else:
            assert k.isnan().all()
            assert not v.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, FP8])
def test_an_allocation_is_zeros(dtype: torch.dtype) -> None:
    cache = KVCache(2, 8, 3, 4, dtype, CPU)
    assert cache.all_layers.dtype == dtype
    assert not cache.all_layers.float().any()
    assert cache.all_layers.nbytes == 8 * KVCache.bytes_per_slot(2, 3, 4, dtype) == 8 * 2 * 2 * 3 * 4 * dtype.itemsize
    cache.resize(5)
    assert cache.all_layers.shape == (2, 2, 3, 5, 4)


def test_memory_is_counted_in_the_caches_dtype() -> None:
    models = [CachedModel.whole(tiny_config(), packs=False), CachedModel(tiny_config(), 1, 0)]

    def fitting(kv_dtype: torch.dtype) -> int:
        rows = Rows(sum(model.bytes_per_token(kv_dtype) for model in models), 16, 1, 1 << 40, 1)
        return plan_cache(1 << 28, rows).num_pages

    assert fitting(FP8) == 2 * fitting(torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float64, torch.float64),
        ("float16", torch.float16, torch.float16),
        ("fp8_e4m3", torch.bfloat16, FP8),
    ],
)
def test_what_is_allowed(
    name: KVDtypeName, dtype: torch.dtype, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    notes: list[str] = []
    assert resolve_kv_dtype(name, "triton", torch.device("cuda"), dtype, notes) == expected
    assert len(notes) == (expected == FP8)


@pytest.mark.parametrize(
    ("name", "attention", "capability", "message"),
    [
        ("float16", "triton", (9, 0), "the model runs in bfloat16"),
        ("fp8_e4m3", "torch", (9, 0), "fp8_e4m3 on CUDA needs engine.attention"),
        ("fp8_e4m3", "triton", (8, 6), "and cuda has 8.6"),
    ],
)
def test_what_is_refused(
    name: KVDtypeName, attention: str, capability: tuple[int, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype") as caught:
        resolve_kv_dtype(name, attention, torch.device("cuda"), torch.bfloat16, [])
    assert message in caught.value.message
    assert "auto" in (caught.value.hint or "")


def test_it_is_decided_with_the_run() -> None:
    sets = ["model.target=random:tiny", "engine.device=cpu", "engine.kv_cache_tokens=4096"]
    run = resolve(load_config(None, sets))
    assert (run.kv_dtype, run.config.engine.kv_dtype) == (torch.float32, "float32")
    assert resolve(load_config(None, [*sets, "engine.kv_dtype=float32"])).kv_dtype == torch.float32
    rounded = resolve(load_config(None, [*sets, "engine.kv_dtype=fp8_e4m3"]))
    assert (rounded.kv_dtype, rounded.config.engine.kv_dtype) == (FP8, "fp8_e4m3")
