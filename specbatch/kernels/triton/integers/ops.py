# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""GEMMs with weights of whole numbers: for few tokens a kernel that dequantises tiles in registers, for many the
library's GEMM of a weight that is dequantised to memory.

`kernels/torch/integers.py` defines the results. Our kernel multiplies exact differences of numbers and zero points,
and sums of a group by its scale. So it rounds less than the reference. Sums over parts of the input features
(`splits`) are added in fixed order by a second kernel; there are no atomics.

Shape suffixes: M tokens, I input features, O output features, S splits.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specbatch.kernels.activations import Activation
from specbatch.kernels.integers import UNIT, IntegerWeight
from specbatch.kernels.triton.gemm import gated_linear, linear
from specbatch.kernels.triton.integers.kernel import dequantise_kernel, integer_kernel
from specbatch.kernels.triton.integers.tile import IntegerTile, fitting, for_group, integer_tile_for, step_for
from specbatch.kernels.triton.parts.launch import dependent_launch, launch, launch_options
from specbatch.kernels.triton.parts.shared_memory import shared_bytes
from specbatch.kernels.triton.skinny.dot import combine_kernel

_COMBINE_BLOCK = 512  # output features of one program that sums splits
_BLOCK_O, _STEP = 32, 128  # the tile of a program that dequantises


def integer_linear(
    x_MI: Tensor, weight: IntegerWeight, bias_O: Tensor | None = None, residual_MO: Tensor | None = None
) -> Tensor:
    num_out = len(weight.words_OW)
    tile = integer_tile_for(x_MI.shape[0], num_out, weight.num_in, weight.bits, weight.group)
    if tile is None:
        return linear(x_MI, dequantised(weight, x_MI.dtype), bias_O, residual_MO)
    return multiply(x_MI, weight, bias_O, residual_MO, tile)


def integer_gated_linear(x_MI: Tensor, weight: IntegerWeight, activation: Activation = "silu") -> Tensor:
    tile = integer_tile_for(x_MI.shape[0], len(weight.words_OW), weight.num_in, weight.bits, weight.group)
    if tile is None:
        return gated_linear(x_MI, dequantised(weight, x_MI.dtype), activation)
    return multiply(x_MI, weight, None, None, tile, activation)


def dequantised(weight: IntegerWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight (O, I)."""
    num_out, num_words = weight.words_OW.shape
    y_OI = torch.empty((num_out, weight.num_in), dtype=dtype, device=weight.words_OW.device)
    pdl = dependent_launch(weight.words_OW)
    step = step_for(_STEP, weight.num_in, weight.bits, weight.group)
    launch(
        dequantise_kernel, (triton.cdiv(num_out, _BLOCK_O), num_words // step),
        y_OI, weight.words_OW, weight.scales_GO, weight.zeros_GO, OUT=num_out, IN=weight.num_in, UNIT=UNIT,
        BITS=weight.bits, GROUP=weight.group, BLOCK_O=_BLOCK_O, STEP=step, HAS_ZEROS=weight.zeros_GO is not None,
        PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return y_OI


def multiply(
    x_MI: Tensor,
    weight: IntegerWeight,
    bias_O: Tensor | None,
    residual_MO: Tensor | None,
    tile: IntegerTile,
    activation: Activation | None = None,
) -> Tensor:
    """Compute `integer_linear` by our kernel, or `integer_gated_linear` with this activation."""
    num_tokens, num_in = x_MI.shape
    parts = 1 if activation is None else 2
    num_out = len(weight.words_OW) // parts
    gating = {"GATED": activation is not None, "ACTIVATION": activation or "silu"}
    assert num_in == weight.num_in, (x_MI.shape, weight.num_in)
    assert x_MI.stride(1) == 1, x_MI.stride()
    assert weight.words_OW.is_contiguous(), weight.words_OW.stride()
    assert weight.scales_GO.is_contiguous(), weight.scales_GO.stride()
    assert residual_MO is None or residual_MO.is_contiguous()
    y_MO = torch.empty((num_tokens, num_out), dtype=x_MI.dtype, device=x_MI.device)
    if not num_tokens:
        return y_MO
    tile = fitting(for_group(tile, num_in, weight.bits, weight.group), weight.bits, shared_bytes(x_MI))
    pdl = dependent_launch(x_MI)
    options = launch_options(pdl)
    partial = None
    if tile.splits > 1:
        partial = torch.empty((tile.splits, num_tokens, parts * num_out), dtype=torch.float32, device=x_MI.device)
    # Only Hopper has the instruction, and no program may read past the end of a row.
    num_words = weight.words_OW.shape[1]
    last = (tile.splits - 1) * triton.cdiv(num_words // tile.step, tile.splits) * tile.step
    prefetch = tile.prefetch if pdl and last + tile.prefetch <= num_words else 0
    tiles = triton.cdiv(parts * num_out, tile.block_o) * triton.cdiv(num_tokens, tile.block_m)
    launch(
        integer_kernel, (tiles, tile.splits),
        y_MO, x_MI, weight.words_OW, weight.scales_GO, weight.zeros_GO, bias_O, residual_MO, partial, num_tokens,
        x_MI.stride(0), OUT=num_out, IN=num_in, UNIT=UNIT, BITS=weight.bits, GROUP=weight.group, BLOCK_M=tile.block_m,
        BLOCK_O=tile.block_o, STEP=tile.step, STAGES=tile.num_stages, SPLITS=tile.splits, SCALE_SUMS=tile.scale_sums,
        HAS_ZEROS=weight.zeros_GO is not None, HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_MO is not None,
        PREFETCH=prefetch, THREADS=32 * tile.num_warps, PDL=pdl, num_warps=tile.num_warps, **gating, **options,
    )  # fmt: skip
    if partial is not None:
        launch(
            combine_kernel, (num_tokens, triton.cdiv(num_out, _COMBINE_BLOCK)),
            y_MO, partial, bias_O, residual_MO, num_tokens, OUT=num_out, SPLITS=tile.splits,
            HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_MO is not None, BLOCK=_COMBINE_BLOCK, PDL=pdl,
            num_warps=4, **gating, **options,
        )  # fmt: skip
    return y_MO
