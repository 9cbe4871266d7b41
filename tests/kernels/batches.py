"""Random tensors, caches and batches for the tests of kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from tests.marks import slow_on_cpu

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32, slow_on_cpu(torch.float16)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
FP8 = torch.float8_e4m3fn
ROUNDED = [False, True] if CUDA else [False, slow_on_cpu(True)]  # keys and values in float8


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.shape == expected.shape
    assert bool(torch.isfinite(actual).all())
    error = (actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-6)
    assert float(error) < TOLERANCE[dtype], f"relative error {float(error):.2e}"


def paged_batch(starts: list[int], counts: list[int], page_size: int, seed: int = 0, spare: int = 4) -> PagedBatch:
    """Sequences on shuffled pages; tables are padded with page 0."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(s + c) // page_size) for s, c in zip(starts, counts, strict=True)]
    order = torch.randperm(sum(needed) + spare, generator=generator).tolist()
    table = torch.zeros(len(starts), max(needed) + 1, dtype=torch.int32)
    slots, positions = [], []
    for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
        pages = [order.pop() for _ in range(needed[b])]
        table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        slots += [pages[i // page_size] * page_size + i % page_size for i in range(start, start + count)]
        positions += range(start, start + count)
    ends = torch.tensor([0, *counts]).cumsum(0)
    return PagedBatch(
        torch.tensor(slots, device=DEVICE),
        torch.tensor(positions, device=DEVICE),
        table.to(DEVICE),
        page_size,
        torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        ends.to(torch.int32).to(DEVICE),
        max(counts),
    )


def random_cache(batch: PagedBatch, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    num_pages = int(batch.page_table_BP.max()) + 2
    return random(2, num_kv_heads, num_pages * batch.page_size, head_dim, dtype=dtype, seed=5)


def tree_batch(counts: int, parents: list[int], starts: list[int], page_size: int) -> PagedBatch:
    batch = paged_batch(starts, [counts] * len(starts), page_size)
    words = -(-counts // 32)
    bits = torch.zeros(counts, words * 32, dtype=torch.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            bits[node] = bits[parent]
        bits[node, node] = 1
    packed = (bits.view(counts, words, 32) << torch.arange(32)).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return replace(batch, mask_TW=packed.repeat(len(starts), 1).to(DEVICE), mask_starts_B=batch.starts_B)
