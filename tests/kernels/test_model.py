"""The model's Triton kernels against their torch twins: in Triton's interpreter without a GPU, for real with one.

bf16 is left to the GPU: the interpreter multiplies bf16 operands as garbage. So is what a float8 cache holds after a
write: the interpreter rounds 0.49 to 0.25, and a NaN to 384. It reads float8 correctly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from specbatch.batch import PagedBatch, slots_of  # noqa: E402
from specbatch.kernels import torch as reference  # noqa: E402
from specbatch.kernels.triton import attention, model  # noqa: E402
from tests.marks import slow_on_cpu  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if CUDA else [torch.float32, slow_on_cpu(torch.float16)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
FP8 = torch.float8_e4m3fn
ROUNDED = [False, True] if CUDA else [False, slow_on_cpu(True)]  # keys and values in float8
pytestmark = [pytest.mark.gpu] if CUDA else []


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
    batch = paged_batch([0, 33, 5], [150, 1, 40], 16)
    actual, expected = attend_both(batch, 4, 2, 64, dtype, window, splits, rounded)
    close(actual, expected, dtype)


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


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [4, slow_on_cpu(8), 60])
def test_attention_of_a_tree(nodes: int, dtype: torch.dtype, rounded: bool, splits: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    parents = [-1] + [int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, nodes)]
    batch = tree_batch(nodes, parents, [0, 31, 70], 16)
    actual, expected = attend_both(batch, 4, 2, 64, dtype, None, splits, rounded)
    close(actual, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", ROUNDED)
@pytest.mark.parametrize("splits", [1, 4])
def test_bits_do_not_depend_on_the_cut(splits: int, rounded: bool, dtype: torch.dtype) -> None:
    """One sequence, computed whole, in two chunks, and with its last tokens one by one: equal bits for each token,
    with one tile shape, as the deterministic mode will have it."""
    total = 90
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
    assert torch.equal(torch.cat([part(i, i + 1) for i in range(80, total)]), full[80:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576, 4096])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = random(5, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    close(model.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    x = random(3, 2 * 1000, dtype=dtype) * 4
    close(model.silu_mul(x), reference.silu_mul(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 80), (8, 1, 128)])
def test_rotary_write(heads: int, kv_heads: int, dim: int, norm: bool, dtype: torch.dtype) -> None:
    tokens = 6
    qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.outer(torch.arange(50.0), torch.rand(dim // 2, generator=torch.Generator().manual_seed(1)))
    cos, sin = (t.repeat(1, 2).to(DEVICE, dtype) for t in (angles.cos(), angles.sin()))
    sin[:, : dim // 2] *= -1
    positions = torch.tensor([3, 4, 5, 49, 0, 7], device=DEVICE)
    slots = torch.tensor([8, 0, 3, -1, 5, -1], device=DEVICE)
    norms = (random(dim, dtype=dtype, seed=2), random(dim, dtype=dtype, seed=3)) if norm else (None, None)
    before = random(2, kv_heads, 20, dim, dtype=dtype, seed=4)
    caches, queries = [], []
    for ops in (model, reference):
        cache = before.clone()
        queries.append(
            ops.rotary_write(qkv, heads, kv_heads, cos, sin, positions, slots, cache, *norms, 1e-6)  # type: ignore[attr-defined]
        )
        caches.append(cache)
    close(queries[0], queries[1], dtype)
    close(caches[0][:, :, :-1], caches[1][:, :, :-1], dtype)
    untouched = [s for s in range(20) if s not in (8, 0, 3, 5)]
    assert torch.equal(caches[0][:, :, untouched], before[:, :, untouched]), "a token of slot -1 was written"


@pytest.mark.skipif(not CUDA, reason="the interpreter rounds to float8 wrongly")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_rotary_write_to_float8(dim: int, dtype: torch.dtype) -> None:
    """Values, which nothing is computed of, and keys at position 0, which no angle turns, have the twin's very bits:
    every rounding, subnormals and saturation included. Other keys may round to a neighbour."""
    tokens, heads, kv_heads = 40, 4, 2
    scales = torch.logspace(-4, 4, tokens, device=DEVICE)[:, None]
    qkv = (random(tokens, (heads + 2 * kv_heads) * dim, dtype=torch.float32) * scales).to(dtype)
    angles = torch.outer(torch.arange(50.0), torch.rand(dim // 2, generator=torch.Generator().manual_seed(1)))
    cos, sin = (t.repeat(1, 2).to(DEVICE, dtype) for t in (angles.cos(), angles.sin()))
    sin[:, : dim // 2] *= -1
    slots = torch.arange(tokens, device=DEVICE)
    for positions in (torch.zeros_like(slots), slots):
        caches = []
        for ops in (model, reference):
            cache = torch.zeros(2, kv_heads, tokens + 1, dim, dtype=FP8, device=DEVICE)
            ops.rotary_write(qkv, heads, kv_heads, cos, sin, positions, slots, cache, None, None, 0.0)  # type: ignore[attr-defined]
            caches.append(cache)
        bits = [cache.view(torch.uint8) for cache in caches]
        assert torch.equal(bits[0][1], bits[1][1])
        if not positions.any():
            # A zero of the other sign is as good: -x * 0 is added to.
            assert torch.equal(caches[0].float(), caches[1].float())
        k, expected = caches[0][0].float(), caches[1][0].float()
        assert float(k.abs().max()) == 448
        apart = (k - expected).abs() > 2**-9 + 0.13 * expected.abs()
        # Where two products nearly cancel, the twin's roundings in 16 bits show.
        assert float(apart.float().mean()) < 0.01


@pytest.mark.skipif(not CUDA, reason="the interpreter rounds to float8 wrongly")
def test_rotary_write_of_what_float8_cannot_hold() -> None:
    values = torch.tensor([500.0, -1e30, 449.0, 448.0, 465.0, 0.3, -1.0, 0.0] * 2, device=DEVICE)
    cos, sin, at = torch.ones(4, 16, device=DEVICE), torch.zeros(4, 16, device=DEVICE), torch.tensor([1], device=DEVICE)
    for ops in (model, reference):
        cache = torch.zeros(2, 1, 3, 16, dtype=FP8, device=DEVICE)
        ops.rotary_write(values.repeat(1, 3), 1, 1, cos, sin, at, at, cache, None, None, 0.0)  # type: ignore[attr-defined]
        expected = torch.tensor([448.0, -448.0, 448.0, 448.0, 448.0, 0.3125, -1.0, 0.0] * 2, device=DEVICE)
        assert torch.equal(cache[1, 0, 1].float(), expected)
        # What is not finite is told from what is too large: NaN as a key, 0 as a value.
        for broken in (torch.inf, torch.nan):
            spoilt = values.where(values != 449.0, broken)
            ops.rotary_write(spoilt.repeat(1, 3), 1, 1, cos, sin, at, at, cache, None, None, 0.0)  # type: ignore[attr-defined]
            assert cache[0, 0, 1].float().isnan().all()
            assert not cache[1, 0, 1].float().any()


@pytest.mark.parametrize("dtype", [*DTYPES, FP8])
def test_move_slots(dtype: torch.dtype) -> None:
    kv = random(3, 2, 2, 24, 16, dtype=dtype)  # the last slot is spare, as in every cache
    # A path that closes up (each target is a source before it), one that lies as it should, one over two pages.
    source = torch.tensor([[4, 6, 8], [9, 0, 2], [19, 1, 3]], device=DEVICE)
    target = torch.tensor([[4, 5, 6], [-1, -1, 2], [15, 19, 1]], device=DEVICE)
    expected, actual = kv.clone(), kv.clone()
    reference.move_slots(expected, source, target)
    model.move_slots(actual, source, target)
    kv, expected, actual = (x.float() for x in (kv, expected, actual))  # torch compares no float8 everywhere
    assert torch.equal(actual, expected)
    for s, t in ((4, 4), (6, 5), (8, 6), (2, 2), (19, 15), (1, 19), (3, 1)):
        assert torch.equal(actual[:, :, :, t], kv[:, :, :, s])


def test_slots_of() -> None:
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    assert slots_of(table, 4, torch.tensor([[0, 5], [3, 4]])).tolist() == [[12, 5], [11, 0]]
