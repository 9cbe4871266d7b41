"""The model's Triton kernels against the reference kernels: in Triton's interpreter without a GPU, for real with one.

What a float8 cache holds after a write is left to the GPU: the interpreter rounds 0.49 to 0.25, and a NaN to 384. It
reads float8 correctly.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from specbatch.batch import slots_of
from specbatch.kernels import torch as reference
from specbatch.kernels.triton import model
from tests.kernels.batches import CUDA, DEVICE, DTYPES, FP8, close, random

pytestmark = [pytest.mark.gpu] if CUDA else []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576, 4096])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = random(5, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    close(model.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_act_mul(dtype: torch.dtype) -> None:
    x = random(3, 2 * 1000, dtype=dtype) * 4
    close(model.act_mul(x), reference.act_mul(x), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("norm", "offset"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned"), [(9, 3, 64, 64), (4, 4, 80, 80), (8, 1, 128, 128), (3, 1, 80, 20)]
)
def test_rotary_write(
    heads: int, kv_heads: int, dim: int, turned: int, norm: bool, offset: bool, dtype: torch.dtype
) -> None:
    """`turned`: the dimensions of a head that rotate."""
    tokens = 6
    qkv = random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = torch.outer(torch.arange(50.0), torch.rand(turned // 2, generator=torch.Generator().manual_seed(1)))
    cos, sin = (t.repeat(1, 2).to(DEVICE, dtype) for t in (angles.cos(), angles.sin()))
    sin[:, : turned // 2] *= -1
    positions = torch.tensor([3, 4, 5, 49, 0, 7], device=DEVICE)
    slots = torch.tensor([8, 0, 3, -1, 5, -1], device=DEVICE)
    norms = (random(dim, dtype=dtype, seed=2), random(dim, dtype=dtype, seed=3)) if norm else (None, None)
    k_offset = random(kv_heads, dim, dtype=torch.float32, seed=5) if offset else None
    before = random(2, kv_heads, 20, dim, dtype=dtype, seed=4)
    caches, queries = [], []
    for ops in (model, reference):
        cache = before.clone()
        queries.append(
            ops.rotary_write(
                qkv, heads, kv_heads, cos, sin, positions, slots, cache, *norms, 1e-6, k_offset_KD=k_offset
            )  # type: ignore[attr-defined]
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
    """Values, which nothing is computed of, and keys at position 0, which no angle turns, have the bits of the
    reference: every rounding, subnormals and saturation included. Other keys may round to a neighbour."""
    tokens, heads, kv_heads = 40, 4, 2
    scales = torch.logspace(-4, 4, tokens, device=DEVICE)[:, None]
    qkv = (random(tokens, (heads + 2 * kv_heads) * dim, dtype=torch.float32) * scales).to(dtype)
    angles = torch.outer(torch.arange(50.0), torch.rand(dim // 2, generator=torch.Generator().manual_seed(1)))
    cos, sin = (t.repeat(1, 2).to(DEVICE, dtype) for t in (angles.cos(), angles.sin()))
    sin[:, : dim // 2] *= -1
    slots = torch.arange(tokens, device=DEVICE)
    for positions, kv_scales in ((torch.zeros_like(slots), (1.0, 1.0)), (slots, (1.0, 1.0)), (slots * 0, (0.5, 0.3))):
        caches = []
        for ops in (model, reference):
            cache = torch.zeros(2, kv_heads, tokens + 1, dim, dtype=FP8, device=DEVICE)
            ops.rotary_write(qkv, heads, kv_heads, cos, sin, positions, slots, cache, None, None, 0.0, *kv_scales)  # type: ignore[attr-defined]
            caches.append(cache)
        bits = [cache.view(torch.uint8) for cache in caches]
        assert torch.equal(bits[0][1], bits[1][1])
        if not positions.any():
            # A zero of the other sign is as good: -x * 0 is added to.
            assert torch.equal(caches[0].float(), caches[1].float())
        k, expected = caches[0][0].float(), caches[1][0].float()
        assert float(k.abs().max()) == 448
        apart = (k - expected).abs() > 2**-9 + 0.13 * expected.abs()
        # Where two products nearly cancel, the roundings of the reference in 16 bits show.
        assert float(apart.float().mean()) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 48, 128])
def test_rotate(dim: int, dtype: torch.dtype) -> None:
    """Queries and keys are parts of one projection, so heads are not contiguous."""
    qkv = random(5, 9, dim, dtype=dtype)
    q, k = qkv[:, :6], qkv[:, 6:8]
    angles = random(5, dim, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    for found, expected in zip(model.rotate(q, k, cos, sin), reference.rotate(q, k, cos, sin), strict=True):
        close(found, expected, dtype)


@pytest.mark.skipif(not CUDA, reason="the interpreter rounds to float8 wrongly")
def test_rotary_write_of_what_float8_cannot_hold() -> None:
    values = torch.tensor([500.0, -1e30, 449.0, 448.0, 465.0, 0.3, -1.0, 0.0] * 2, device=DEVICE)
    cos, sin, at = torch.ones(4, 16, device=DEVICE), torch.zeros(4, 16, device=DEVICE), torch.tensor([1], device=DEVICE)
    for ops in (model, reference):
        cache = torch.zeros(2, 1, 3, 16, dtype=FP8, device=DEVICE)
        ops.rotary_write(values.repeat(1, 3), 1, 1, cos, sin, at, at, cache, None, None, 0.0)  # type: ignore[attr-defined]
        expected = torch.tensor([448.0, -448.0, 448.0, 448.0, 448.0, 0.3125, -1.0, 0.0] * 2, device=DEVICE)
        assert torch.equal(cache[1, 0, 1].float(), expected)
        # What is not finite is different from what is too large: NaN as a key, 0 as a value.
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
