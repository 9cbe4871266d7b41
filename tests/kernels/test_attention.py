"""The Triton kernel of attention against the reference: in Triton's interpreter without a GPU, for real with one.

bf16 is left to the GPU: the interpreter multiplies bf16 operands as garbage.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specbatch.attention.triton import PagedAttention
from specbatch.batch import PagedBatch
from specbatch.kernels import torch as reference
from specbatch.kernels.triton import attention
from specbatch.kernels.triton.parts.attention_tile import Fp8Form, tile_for
from tests.kernels.batches import (
    CUDA,
    DEVICE,
    DTYPES,
    FP8,
    ROUNDED,
    close,
    paged_batch,
    random,
    random_cache,
    tree_batch,
)
from tests.kernels.operations import Ops
from tests.marks import slow_on_cpu

pytestmark = [pytest.mark.gpu] if CUDA else []


def attend_both(
    batch: PagedBatch,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    window: int | None,
    splits: int,
    rounded: bool = False,
) -> tuple[Tensor, Tensor]:
    q = random(batch.slots_T.shape[0], heads, dim, dtype=dtype)
    kv = random_cache(batch, kv_heads, dim, dtype)
    if rounded:
        kv = kv.to(FP8)
    workspace = attention.Workspace(DEVICE, 16384, dim)
    scale = dim**-0.5
    expected = reference.attend(q, kv, batch, scale, window)
    actual = attention.attend(q, kv, batch, scale, window, splits, workspace)
    if splits > 1:  # the counters are back at zero: a second launch on the same workspace is right too
        again = attention.attend(q, kv, batch, scale, window, splits, workspace)
        assert torch.equal(again, actual)
    return actual, expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("page_size", [slow_on_cpu(1), 16, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(4, 2, 80), (7, 1, 64), *map(slow_on_cpu, [4, 3, 8, 2], [1, 1, 1, 1], [64, 96, 128, 256])],
)
def test_attention_decode_and_verify(
    heads: int, kv_heads: int, dim: int, page_size: int, splits: int, rounded: bool, dtype: torch.dtype
) -> None:
    batch = paged_batch([70, 0, 129], [4, 4, 4], page_size)
    actual, expected = attend_both(batch, heads, kv_heads, dim, dtype, None, splits, rounded)
    close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize(("splits", "window"), [(1, None), (2, 20), slow_on_cpu(1, 20), slow_on_cpu(2, None)])
def test_attention_prefill_of_uneven_prompts(
    splits: int, window: int | None, rounded: bool, dtype: torch.dtype
) -> None:
    batch = paged_batch([0, 33, 5], [70, 1, 40], 16)
    actual, expected = attend_both(batch, 4, 2, 64, dtype, window, splits, rounded)
    close(actual, expected, dtype)


def test_windows_that_begin_at_the_border_of_a_block() -> None:
    """The kernel begins at the block of the oldest key, which here is the first or the last key of a block."""
    starts = [16 * i + 19 + offset for i in range(1, 6) for offset in (-1, 0)]
    batch = paged_batch(starts, [1] * len(starts), 16)
    actual, expected = attend_both(batch, 1, 1, 16, DTYPES[0], 20, 1)
    close(actual, expected, DTYPES[0])


@pytest.mark.parametrize(("rounded", "splits"), [(False, 1), (True, 2), slow_on_cpu(False, 2), slow_on_cpu(True, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [4, slow_on_cpu(8), 40, slow_on_cpu(60)])  # 40: two words of a mask, two tiles
def test_attention_of_a_tree(nodes: int, dtype: torch.dtype, rounded: bool, splits: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    parents = [-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes)]
    batch = tree_batch(nodes, parents, [0, 31, 70], 16)
    actual, expected = attend_both(batch, 4, 2, 64, dtype, None, splits, rounded)
    close(actual, expected, dtype)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 1e3), *[(torch.bfloat16, 1e6)] * CUDA])
@pytest.mark.parametrize("form", ["half", "pairs"])
@pytest.mark.parametrize(
    ("dim", "splits", "nodes", "window", "page_size"),
    [(64, 4, 0, None, 16), (80, 1, 5, None, 64), slow_on_cpu(128, 2, 40, None, 16), slow_on_cpu(128, 1, 0, 20, 1)],
)
def test_fp8_in_float16(
    dim: int,
    splits: int,
    nodes: int,
    window: int | None,
    page_size: int,
    form: Fp8Form,
    dtype: torch.dtype,
    size: float,
) -> None:
    """Queries in bfloat16 may be larger than float16's largest number."""
    starts, parents = [70, 0, 33], [-1, 0, 0, 1, 3, *range(4, 39)][:nodes]
    batch = tree_batch(nodes, parents, starts, page_size) if nodes else paged_batch(starts, [4] * 3, page_size)
    q = random(batch.slots_T.shape[0], 4, dim, dtype=dtype) * size
    kv, scale = random_cache(batch, 2, dim, dtype).to(FP8), dim**-0.5 / size
    workspace = attention.Workspace(DEVICE, 16384, dim)
    expected = reference.attend(q, kv, batch, scale, window, v_scale=0.3)
    tile = replace(tile_for(8, dim, 2), fp8=form)
    for peeled in (False, True):
        shape = replace(tile, peeled=peeled)
        actual = attention.attend_by(shape, q, kv, batch, scale, window, splits, workspace, v_scale=0.3)
        close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize("splits", [1, 4])
def test_bits_do_not_depend_on_the_cut(splits: int, rounded: bool, dtype: torch.dtype) -> None:
    """One sequence, computed whole, in two chunks, and with its last tokens one by one: equal bits for each token,
    with one tile shape."""
    total = 70
    whole = paged_batch([0], [total], 16)
    q = random(total, 4, 64, dtype=dtype)
    kv = random_cache(whole, 2, 64, dtype).to(FP8 if rounded else dtype)
    workspace = attention.Workspace(DEVICE, 16384, 64)

    def part(start: int, end: int) -> Tensor:
        cut = replace(
            whole,
            slots_T=whole.slots_T[start:end],
            positions_T=whole.positions_T[start:end],
            starts_B=torch.tensor([start], dtype=torch.int32, device=DEVICE),
            query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
            max_queries=total,  # keeps the tile's shape
        )
        return attention.attend(q[start:end].contiguous(), kv, cut, 0.125, None, splits, workspace)

    full = part(0, total)
    assert torch.equal(torch.cat([part(0, 37), part(37, total)]), full)
    assert torch.equal(torch.cat([part(i, i + 1) for i in range(64, total)]), full[64:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [5, slow_on_cpu(None)])
def test_only_long_sequences_are_split(nodes: int | None, dtype: torch.dtype) -> None:
    """Two of three have 130 tokens or more; the list has room for one of them, for both, and for more."""
    starts = [150, 20, 130]
    batch = paged_batch(starts, [1] * 3, 16) if nodes is None else tree_batch(nodes, [-1, 0, 0, 1, 3], starts, 16)
    q = random(batch.slots_T.shape[0], 4, 64, dtype=dtype)
    kv, workspace = random_cache(batch, 2, 64, dtype), attention.Workspace(DEVICE, 4096, 64)
    expected = reference.attend(q, kv, batch, 0.125, None)
    for count in (1, 3):
        listed = reference.long_sequences(batch.starts_B, batch.query_starts, 131, count)
        for _ in range(2):  # the counters are back at zero
            close(attention.attend(q, kv, batch, 0.125, None, 4, workspace, listed), expected, dtype)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_long_sequences(ops: Ops, count: int) -> None:
    starts = torch.tensor([3, 900, 10, 500, 499, 600], dtype=torch.int32, device=DEVICE)
    query_starts = torch.tensor([0, 1, 2, 502, 503, 504, 504], dtype=torch.int32, device=DEVICE)
    index, listed = ops.long_sequences(starts, query_starts, 500, count)
    indices = {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}
    assert index.tolist() == [-1 if indices.get(i, 9) >= count else indices[i] for i in range(6)]
    assert listed.tolist() == [1, 2, 3, 4, 5][:count]
    index, listed = ops.long_sequences(starts, query_starts, 900, count)
    assert listed.tolist() == [1, -1, -1, -1, -1][:count]
    assert (index.dtype, listed.dtype) == (torch.int32, torch.int32)


def test_the_backend_splits_long_sequences() -> None:
    batch = paged_batch([70, 600], [1, 1], 16)
    batch = replace(batch, page_table_BP=batch.page_table_BP[torch.tensor([0] * 299 + [1])])
    batch = replace(batch, starts_B=batch.starts_B[torch.tensor([0] * 299 + [1])])
    batch = replace(batch, query_starts=torch.arange(301, dtype=torch.int32, device=DEVICE))
    backend = PagedAttention(4, 2, 64, torch.float32, torch.device("cpu"), long_tokens=500)
    plan = backend.plan(batch)
    listed = plan.listed
    assert listed is not None
    assert plan.num_splits == 8
    assert listed[0].tolist() == [-1] * 299 + [0]
    assert listed[1].tolist() == [299] + [-1] * 31
    assert PagedAttention(4, 2, 64, torch.float32, torch.device("cpu")).plan(batch)[1:] == (1, None, 0)
