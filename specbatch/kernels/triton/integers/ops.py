# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""GEMMs with weights of whole numbers: for few tokens kernels that dequantise tiles in registers, for many the
library's GEMM of a weight that is dequantised to memory.

`kernels/torch/integers.py` defines the results. Our kernels multiply exact differences of numbers and zero points,
and sums of a group by its scale. So it rounds less than the reference. Sums over parts of the input features
(`splits`) are added in fixed order by a second kernel; there are no atomics.

Shape suffixes: M tokens, I input features, O output features, S splits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from specbatch.kernels.activations import Activation
from specbatch.kernels.integers import UNIT, IntegerWeight
from specbatch.kernels.triton.gemm import gated_linear, linear
from specbatch.kernels.triton.integers.direct import direct_kernel
from specbatch.kernels.triton.integers.kernel import dequantise_kernel, integer_kernel
from specbatch.kernels.triton.integers.tile import (
    DirectTile,
    IntegerTile,
    Tile,
    can_fuse_norm,
    fitting,
    for_group,
    integer_tile_for,
    is_direct,
    step_for,
)
from specbatch.kernels.triton.model import rms_norm
from specbatch.kernels.triton.parts.launch import dependent_launch, launch, launch_options
from specbatch.kernels.triton.parts.shared_memory import shared_bytes
from specbatch.kernels.triton.skinny.dot import combine_kernel

_COMBINE_BLOCK = 512  # output features of one program that sums splits
_BLOCK_O, _STEP = 32, 128  # the tile of a program that dequantises
_STRIP_WORDS = 64  # words that a warp of the direct kernel multiplies at once
_NORM_BLOCK = 4096  # features of the norm that are read at once


def integer_linear(
    x_MI: Tensor,
    weight: IntegerWeight,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    tile = _tile_for(x_MI, weight)
    if tile is None:
        return linear(_normed(x_MI, norm), dequantised(weight, x_MI.dtype), bias_O, residual_MO)
    return multiply(x_MI, weight, bias_O, residual_MO, tile, norm=norm)


def integer_gated_linear(
    x_MI: Tensor, weight: IntegerWeight, activation: Activation = "silu", norm: tuple[Tensor, float] | None = None
) -> Tensor:
    tile = _tile_for(x_MI, weight)
    if tile is None:
        return gated_linear(_normed(x_MI, norm), dequantised(weight, x_MI.dtype), activation)
    return multiply(x_MI, weight, None, None, tile, activation, norm)


def _tile_for(x_MI: Tensor, weight: IntegerWeight) -> Tile | None:
    size = x_MI.shape[0], len(weight.words_OW), weight.num_in
    return integer_tile_for(*size, weight.bits, weight.group, has_whole_zeros=weight.has_whole_zeros)


def _normed(x_MI: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
    return x_MI if norm is None else rms_norm(x_MI, *norm)


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
        WHOLE_ZEROS=weight.has_whole_zeros, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
    return y_OI


def multiply(
    x_MI: Tensor,
    weight: IntegerWeight,
    bias_O: Tensor | None,
    residual_MO: Tensor | None,
    tile: Tile,
    activation: Activation | None = None,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Compute `integer_linear` by our kernels, or `integer_gated_linear` with this activation."""
    num_tokens, num_in = x_MI.shape
    parts = 1 if activation is None else 2
    num_out = len(weight.words_OW) // parts
    assert num_in == weight.num_in, (x_MI.shape, weight.num_in)
    assert x_MI.stride(1) == 1, x_MI.stride()
    assert weight.words_OW.is_contiguous(), weight.words_OW.stride()
    assert isinstance(tile, DirectTile) or weight.has_whole_zeros, tile
    assert weight.scales_GO.is_contiguous(), weight.scales_GO.stride()
    assert residual_MO is None or residual_MO.is_contiguous()
    y_MO = torch.empty((num_tokens, num_out), dtype=x_MI.dtype, device=x_MI.device)
    if not num_tokens:
        return y_MO
    if norm is not None and not _fuses_norm(tile, x_MI, weight, norm[0]):
        x_MI, norm = rms_norm(x_MI, *norm), None
    pdl = dependent_launch(x_MI)
    options: dict[str, Any] = {
        "OUT": num_out, "HAS_BIAS": bias_O is not None, "HAS_RESIDUAL": residual_MO is not None,
        "GATED": activation is not None, "ACTIVATION": activation or "silu", "SPLITS": tile.splits, "PDL": pdl,
        **launch_options(pdl),
    }  # fmt: skip
    partial = None
    if tile.splits > 1:
        partial = torch.empty((tile.splits, num_tokens, parts * num_out), dtype=torch.float32, device=x_MI.device)
    if isinstance(tile, DirectTile):
        _launch_direct(y_MO, x_MI, weight, norm, (bias_O, residual_MO, partial), tile, options)
    else:
        _launch_staged(y_MO, x_MI, weight, (bias_O, residual_MO, partial), tile, options)
    if partial is not None:
        launch(
            combine_kernel, (num_tokens, triton.cdiv(num_out, _COMBINE_BLOCK)),
            y_MO, partial, bias_O, residual_MO, num_tokens, BLOCK=_COMBINE_BLOCK, num_warps=4, **options,
        )  # fmt: skip
    return y_MO


def _fuses_norm(tile: Tile, x_MI: Tensor, weight: IntegerWeight, norm_weight_I: Tensor) -> bool:
    return (
        isinstance(tile, DirectTile)
        and tile.fuse_norm
        and x_MI.shape[0] == 1
        and norm_weight_I.dtype == x_MI.dtype
        and can_fuse_norm(weight.num_in, weight.bits, weight.group)
    )


_Others = tuple[Tensor | None, Tensor | None, Tensor | None]  # bias, residual, partial sums


def _launch_direct(
    y_MO: Tensor,
    x_MI: Tensor,
    weight: IntegerWeight,
    norm: tuple[Tensor, float] | None,
    others: _Others,
    tile: DirectTile,
    options: dict[str, Any],
) -> None:
    num_tokens, num_in = x_MI.shape
    assert num_tokens <= tile.block_m, (num_tokens, tile)
    assert is_direct(num_in, weight.group), weight
    assert num_tokens == 1 or x_MI.stride(0) % 8 == 0, x_MI.stride()  # rows begin at multiples of 16 bytes
    norm_weight, eps = norm or (None, 0.0)
    # No program may read past the end of a row.
    num_strips = weight.words_OW.shape[1] // _STRIP_WORDS
    steps = triton.cdiv(num_strips, tile.num_warps * tile.splits)
    begin = ((tile.splits - 1) * steps + tile.ahead) * tile.num_warps * _STRIP_WORDS
    prefetch = tile.prefetch if options["PDL"] and begin + tile.prefetch <= weight.words_OW.shape[1] else 0
    launch(
        direct_kernel, (triton.cdiv(len(weight.words_OW), tile.block_o), tile.splits),
        y_MO, x_MI, weight.words_OW, weight.scales_GO, weight.zeros_GO, norm_weight, *others, num_tokens,
        x_MI.stride(0), eps, IN=num_in, BITS=weight.bits, GROUP=weight.group, BLOCK_M=tile.block_m,
        BLOCK_O=tile.block_o, AHEAD=tile.ahead, NORM=norm is not None, HAS_ZEROS=weight.zeros_GO is not None,
        NORM_BLOCK=min(triton.next_power_of_2(num_in), _NORM_BLOCK), PREFETCH=prefetch, WARPS=tile.num_warps,
        num_warps=tile.num_warps, **({"maxnreg": tile.registers} if options["PDL"] else {}), **options,
    )  # fmt: skip


def _launch_staged(
    y_MO: Tensor, x_MI: Tensor, weight: IntegerWeight, others: _Others, tile: IntegerTile, options: dict[str, Any]
) -> None:
    num_tokens, num_in = x_MI.shape
    tile = fitting(for_group(tile, num_in, weight.bits, weight.group), weight.bits, shared_bytes(x_MI))
    # Only Hopper has the instruction, and no program may read past the end of a row.
    num_words = weight.words_OW.shape[1]
    last = (tile.splits - 1) * triton.cdiv(num_words // tile.step, tile.splits) * tile.step
    prefetch = tile.prefetch if options["PDL"] and last + tile.prefetch <= num_words else 0
    tiles = triton.cdiv(len(weight.words_OW), tile.block_o) * triton.cdiv(num_tokens, tile.block_m)
    launch(
        integer_kernel, (tiles, tile.splits),
        y_MO, x_MI, weight.words_OW, weight.scales_GO, weight.zeros_GO, *others, num_tokens, x_MI.stride(0), IN=num_in,
        UNIT=UNIT, BITS=weight.bits, GROUP=weight.group, BLOCK_M=tile.block_m, BLOCK_O=tile.block_o, STEP=tile.step,
        STAGES=tile.num_stages, SCALE_SUMS=tile.scale_sums, HAS_ZEROS=weight.zeros_GO is not None, PREFETCH=prefetch,
        THREADS=32 * tile.num_warps, num_warps=tile.num_warps, **options,
    )  # fmt: skip
