"""The FlashInfer backend on a GPU: its kernels against the reference kernel, and the engine over it against Triton's.

The first run compiles FlashInfer's kernels (nvcc, some minutes; all modules at once). Run with `-n 0`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("flashinfer")
pytest.importorskip("triton")

from specbatch.attention.flashinfer import FlashInferAttention
from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.draft.shape import DraftShape
from specbatch.engine.executor import GraphMode
from specbatch.graphs.runner import GraphRunner
from specbatch.kernels import torch as reference
from specbatch.types import Completion, SamplingParams
from tests.kernels.batches import paged_batch, random, tree_batch
from tests.tiny_models import random_prompts, run, tiny_device_engine

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# (dtype, dtype of the cache, head dimension): what is compiled
MODULES = [
    (BF16, BF16, 64),
    (BF16, BF16, 128),
    (BF16, BF16, 256),
    (FP16, FP16, 64),
    (FP16, FP16, 128),
    (BF16, FP8, 128),
]
TOLERANCE = {BF16: 2e-2, FP16: 4e-3}  # of each row of one head, relative


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """All modules in one build, so that their files are compiled side by side."""
    from flashinfer.jit import build_jit_specs, gen_batch_prefill_module

    build_jit_specs(
        [
            gen_batch_prefill_module("fa2", q, kv, q, torch.int32, dim, dim, 0, False, False, False)
            for q, kv, dim in MODULES
        ]
    )


@dataclass(frozen=True)
class Setting:
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64

    def backend(self) -> FlashInferAttention:
        return FlashInferAttention(self.heads, self.kv_heads, self.dim, self.dtype, CUDA, self.kv_dtype)

    def cache(self, batch: PagedBatch) -> KVCache:
        """Two layers of random numbers; the second one is used."""
        num_pages = int(batch.page_table_BP.max()) + 2
        cache = KVCache(2, num_pages * batch.page_size, self.kv_heads, self.dim, self.kv_dtype, CUDA)
        values = random(*cache.layer(1).shape, dtype=self.dtype, seed=5)
        cache.layer(1).view(torch.uint8 if self.kv_dtype == FP8 else self.kv_dtype).copy_(
            values.to(FP8).view(torch.uint8) if self.kv_dtype == FP8 else values
        )
        return cache

    def queries(self, batch: PagedBatch) -> Tensor:
        return random(batch.slots_T.shape[0], self.heads, self.dim, dtype=self.dtype, seed=6)

    def expected(self, q: Tensor, cache: KVCache, batch: PagedBatch) -> Tensor:
        return reference.attend(q.float(), cache.layer(1), batch, self.dim**-0.5)

    def compare(self, actual: Tensor, q: Tensor, cache: KVCache, batch: PagedBatch, name: str) -> None:
        expected = self.expected(q, cache, batch)
        assert actual.dtype == self.dtype
        assert bool(torch.isfinite(actual).all()), name
        error = (actual.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)
        worst = float(error.max())
        assert worst < TOLERANCE[self.dtype], f"{name}: relative error {worst:.2e} at {int(error.argmax())}"

    def check(self, batch: PagedBatch, name: str) -> None:
        backend, q, cache = self.backend(), self.queries(batch), self.cache(batch)
        for attempt in ("first", "again"):  # the second time, a shape's plan is there
            actual = backend.attend(backend.plan(batch), q, cache, 1, None)
            self.compare(actual, q, cache, batch, f"{name}, {attempt}")


def random_tree(nodes: int, starts: list[int], page_size: int) -> PagedBatch:
    generator = torch.Generator().manual_seed(nodes)
    parents = [-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes)]
    return tree_batch(nodes, parents, starts, page_size)


def prompts(starts: list[int], counts: list[int], page_size: int) -> PagedBatch:
    host = np.cumsum([0, *counts]).astype(np.int32)
    return replace(paged_batch(starts, counts, page_size), host_query_starts=host)


def late_step_of_a_tree(page_size: int) -> PagedBatch:
    """Four new branches per row, whose mask begins eight slots before them, as in a draft's third step."""
    batch = paged_batch([8, 40, 141], [4, 4, 4], page_size)
    words = torch.tensor([[0b000100010001], [0b001000100010], [0b010000100001], [0b100001001000]], dtype=torch.int32)
    return replace(batch, mask_TW=words.repeat(3, 1).to(CUDA), mask_starts_B=batch.starts_B - 8)


BATCHES: dict[str, Callable[[int], PagedBatch]] = {
    "decode": lambda page: paged_batch([70, 0, 129, 300], [1] * 4, page),
    "one row": lambda page: paged_batch([1000], [1], page),
    "chain": lambda page: paged_batch([70, 0, 129], [4] * 3, page),
    "tree of 8": lambda page: random_tree(8, [0, 31, 70, 257], page),
    "tree of 60": lambda page: random_tree(60, [0, 31, 70], page),
    "late step": late_step_of_a_tree,
    "uneven prompts": lambda page: prompts([0, 33, 5, 64], [150, 1, 40, 64], page),
    "one prompt": lambda page: prompts([0], [700], page),
    "many short prompts": lambda page: prompts([0] * 40, [1 + i % 9 for i in range(40)], page),
}


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_twin(name: str, page_size: int) -> None:
    Setting().check(BATCHES[name](page_size), name)


@pytest.mark.parametrize(("dtype", "kv_dtype", "dim"), MODULES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (8, 1), (7, 1)])
def test_geometries(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    for name in ("decode", "chain", "tree of 8", "tree of 60", "uneven prompts"):
        Setting(dtype, kv_dtype, heads, kv_heads, dim).check(BATCHES[name](16), name)


def test_rows_of_padding() -> None:
    """Padding, which is no request: an empty table and no slots before it. It disturbs no request and stays finite."""
    setting, batch = Setting(), random_tree(8, [70, 0, 31, 0], 16)
    batch.page_table_BP[1::2] = 0
    setting.check(batch, "padding")


@pytest.mark.parametrize("name", ["decode", "chain", "tree of 8", "tree of 60"])
def test_lengths_change_under_a_graph(name: str) -> None:
    """Two batch sizes are captured, largest first, over tables that reach further than any length; replays alternate
    while the lengths go up and down."""
    setting, runner = Setting(), GraphRunner(CUDA)
    backend, batch = setting.backend(), BATCHES[name](16)
    longest = batch.starts_B.clone()
    cache, q, queries = setting.cache(batch), setting.queries(batch), batch.max_queries

    def first(size: int) -> PagedBatch:
        masked = batch.mask_TW is not None
        return replace(
            batch,
            slots_T=batch.slots_T[: size * queries],
            page_table_BP=batch.page_table_BP[:size],
            starts_B=batch.starts_B[:size],
            query_starts=batch.query_starts[: size + 1],
            mask_TW=batch.mask_TW[: size * queries] if masked and batch.mask_TW is not None else None,
            mask_starts_B=batch.starts_B[:size] if masked else None,
        )

    parts = {size: first(size) for size in (batch.starts_B.shape[0], 2)}
    for size, part in parts.items():

        def forward(part: PagedBatch = part, size: int = size) -> Tensor:
            return backend.attend(backend.plan(part), q[: size * queries], cache, 1, None)

        runner.capture((size,), forward)
    for step in range(6):
        batch.starts_B.copy_((longest.float() * (1 - step / 7)).int() if step % 2 else longest)
        for size, part in parts.items():
            actual = runner.replay((size,))
            setting.compare(actual, q[: size * queries], cache, part, f"step {step}, {size} rows")


def test_prompts_planned_while_the_device_is_behind() -> None:
    """Plans are staged in page-locked memory, which must not be written again before it was copied."""
    setting = Setting()
    chunks = [prompts([0, 9 * i], [40 + 13 * i, 64 - 5 * i], 16) for i in range(10)]
    backend = setting.backend()
    caches, queries = [setting.cache(c) for c in chunks], [setting.queries(c) for c in chunks]
    backend.attend(backend.plan(chunks[0]), queries[0], caches[0], 1, None)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    outs = [
        backend.attend(backend.plan(c), q, cache, 1, None) for c, q, cache in zip(chunks, queries, caches, strict=True)
    ]
    for i, out in enumerate(outs):
        setting.compare(out, queries[i], caches[i], chunks[i], f"chunk {i}")


CASES = [
    ("none", None),
    ("ngram", DraftShape(3, 1, 4)),
    ("eagle3", DraftShape(3, 1, 4)),
    ("draft_model", DraftShape(3, 1, 4)),
    ("eagle", DraftShape(5, 4, 8)),
]
# With larger weights, the features that an EAGLE head hands on to itself leave the range of float16.
SETTINGS = {
    "num_pages": 512,
    "max_batch_size": 8,
    "hidden": 64,
    "head_dim": 64,
    "scale": 0.15,
    "device": CUDA,
    "eos": (5,),
}


def flashinfer_engine(method: str, shape: DraftShape | None, graphs: GraphMode, dtype: torch.dtype = BF16) -> object:
    return tiny_device_engine(method, shape, **SETTINGS, dtype=dtype, graphs=graphs, backend=FlashInferAttention)


def compared(ours: list[Completion], theirs: list[Completion], tolerance: float) -> int:
    """Checks the logprobs of all tokens up to and including the first that differs (whose context is the same still);
    returns how many these are."""
    count = 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        for x, y, token, other in zip(a.logprobs, b.logprobs, a.token_ids, b.token_ids, strict=False):
            assert abs(x.logprob - y.logprob) < tolerance, (a.request_id, count, x, y)
            count += 1
            if token != other:
                break
    return count


@pytest.mark.parametrize(("dtype", "tolerance"), [(FP16, 0.05), (BF16, 0.4)])
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_engine_agrees_with_triton(method: str, shape: DraftShape | None, dtype: torch.dtype, tolerance: float) -> None:
    """Eager rounds: shapes are planned as they come, prompts in chunks of 32 tokens."""
    params = SamplingParams(max_tokens=24, logprobs=0)
    requests = random_prompts(9, shared=10)
    theirs = run(tiny_device_engine(method, shape, **SETTINGS, dtype=dtype), requests, params)
    ours = run(flashinfer_engine(method, shape, "none", dtype), requests, params)
    tokens = sum(len(c.token_ids) for c in theirs)
    assert compared(ours, theirs, tolerance) >= tokens // (2 if dtype == FP16 else 6)


@pytest.mark.parametrize(("method", "shape"), CASES)
def test_graphs_give_the_tokens_of_eager_rounds(method: str, shape: DraftShape | None) -> None:
    """Batches shrink from 8 to 1, so padded graphs are replayed after larger ones. The kernels and their shapes are the
    same, so the bits are."""
    params, requests = SamplingParams(max_tokens=24), random_prompts(9, shared=10)
    eager = run(flashinfer_engine(method, shape, "none"), requests, params)
    captured = run(flashinfer_engine(method, shape, "round"), requests, params)
    assert [c.token_ids for c in captured] == [c.token_ids for c in eager]
    assert [c.speculation for c in captured] == [c.speculation for c in eager]


@pytest.mark.parametrize(("method", "shape"), CASES)
@pytest.mark.parametrize("graphs", ["none", "round"])
def test_nothing_waits_for_the_device(method: str, shape: DraftShape | None, graphs: GraphMode) -> None:
    params = SamplingParams(max_tokens=24)
    engine = flashinfer_engine(method, shape, graphs)
    run(engine, random_prompts(9), params)  # compiles and captures
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(engine, random_prompts(9, seed=1), params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
