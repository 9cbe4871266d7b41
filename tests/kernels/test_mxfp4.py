"""Weights in MXFP4: every number with every scale, and tiles in kernels, in Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from specbatch.kernels.mxfp4 import MXFP4_GROUP
from specbatch.kernels.torch.parts.mxfp4 import MAX_SCALE, VALUES, dequantise, quantise
from specbatch.kernels.triton.parts.launch import launch
from specbatch.kernels.triton.parts.mxfp4 import load_mxfp4, load_mxfp4_bfloat16
from tests.kernels.batches import CUDA, DEVICE

pytestmark = [pytest.mark.gpu] if CUDA else []
TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def all_numbers() -> tuple[Tensor, Tensor, Tensor]:
    """Return the values and scales of a weight with each code and scale, and its numbers in float64."""
    codes = torch.arange(MXFP4_GROUP).remainder(16).repeat(MAX_SCALE + 1, 2)
    codes[:, MXFP4_GROUP:] = codes[:, MXFP4_GROUP:].flip(1)
    scales = torch.arange(MAX_SCALE + 1).unsqueeze(1).repeat(1, 2)
    numbers = torch.tensor(VALUES, dtype=torch.float64)[codes] * torch.exp2(scales.double() - 127).repeat_interleave(
        MXFP4_GROUP, 1
    )
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    return packed.to(torch.uint8).to(DEVICE), scales.to(torch.uint8).to(DEVICE), numbers.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_number_is_exact(dtype: torch.dtype) -> None:
    values, scales, expected = all_numbers()
    found = dequantise(values, scales, dtype)
    assert found.dtype == dtype
    assert torch.equal(found.double(), expected)


def test_weights_of_the_format_are_quantised_to_themselves() -> None:
    expected = all_numbers()[2]
    again = dequantise(*quantise(expected), torch.float64)
    assert torch.equal(again, expected)


def test_elements_become_the_nearest_number() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, scales = quantise(weight)
    assert values.shape == (64, 48)
    assert scales.shape == (64, 3)
    scaled = weight.unflatten(1, (-1, MXFP4_GROUP)) * torch.exp2(127 - scales.double())[..., None]
    found = dequantise(values, torch.full_like(scales, 127), torch.float64).unflatten(1, (-1, MXFP4_GROUP))
    distances = (scaled.clamp(-6, 6)[..., None] - torch.tensor(VALUES, dtype=torch.float64)).abs().amin(-1)
    assert torch.equal((scaled.clamp(-6, 6) - found).abs(), distances)
    assert float(found.abs().amax(-1).min()) >= 4


@triton.jit
def _tiles(values_ptr, scales_ptr, out_ptr, num_rows, size_in, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * BLOCK_K
    tile = load_mxfp4(
        values_ptr, scales_ptr, rows, rows < num_rows, first, size_in, size_in // 2, size_in // 32, BLOCK_K,
        out_ptr.dtype.element_ty,
    )  # fmt: skip
    columns = first + tl.arange(0, BLOCK_K)
    ok = (rows < num_rows)[:, None] & (columns < size_in)[None, :]
    tl.store(out_ptr + rows[:, None] * size_in + columns[None, :], tile, mask=ok)


@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("dtype", TL_DTYPES)
def test_tiles(dtype: torch.dtype, block: int) -> None:
    values, scales, expected = all_numbers()
    rows = slice(0, None)
    if dtype == torch.float16:  # scales with which all numbers are in its range
        rows = slice(127 - 23, 127 + 13)
    elif dtype == torch.bfloat16 and not CUDA:
        rows = slice(2, None)  # the interpreter rounds subnormal numbers of bfloat16 to 0
    values, scales, expected = values[rows], scales[rows], expected[rows]
    num_rows, size_in = expected.shape
    out = torch.full((num_rows, size_in), torch.nan, dtype=dtype, device=DEVICE)
    grid = triton.cdiv(num_rows, 16), triton.cdiv(size_in, block)
    launch(_tiles, grid, values, scales, out, num_rows, size_in, BLOCK_N=16, BLOCK_K=block)
    assert torch.equal(out.double(), expected)


@triton.jit
def _packed_kernel(out, values, scales, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.arange(0, ROWS)
    for first in range(0, SIZE, BLOCK):
        tile = load_mxfp4_bfloat16(values, scales, rows, first, SIZE, SIZE // 2, SIZE // 32, BLOCK, SIZE % BLOCK != 0)
        cols = first + tl.arange(0, BLOCK)
        tl.store(out + rows[:, None] * SIZE + cols[None, :], tile, mask=(cols < SIZE)[None, :])


@pytest.mark.skipif(not CUDA, reason="the interpreter has no assembly")
def test_packed_instructions_are_exact() -> None:
    for first in (0, 100, 125):  # scale 0, too
        part = slice(first, first + 128)
        values, scales, expected = (t[part].repeat(1, 3).contiguous() for t in all_numbers())
        out = torch.empty(expected.shape, dtype=torch.bfloat16, device=DEVICE)
        _packed_kernel[(1,)](out, values, scales, ROWS=128, SIZE=expected.shape[1], BLOCK=128)
        assert torch.equal(out.double(), expected)
