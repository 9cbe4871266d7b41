"""GEMMs in FP8: the library's (`torch._scaled_mm`), and our own kernel.

Ours is for few tokens, whose time is that of reading the weights, and for cases that the library does not have: scales
of groups, other dtypes than bfloat16, sizes that are no multiples of 16, and results that do not depend on the number
of tokens. Scales are applied to the float32 sum. Sums over parts of the input features (`splits`) are added in fixed
order by a second kernel; there are no atomics.

`kernels/torch/fp8.py` defines the results. With the library a residual is added after the result is rounded, as there,
but in place.

Shape suffixes: M tokens, I input features, O output features, G groups of input features, S splits.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specbatch.kernels.quantised import GROUP, Quantised
from specbatch.kernels.triton.parts.launch import dependent_launch, launch, launch_options
from specbatch.kernels.triton.parts.shared_memory import shared_bytes
from specbatch.kernels.triton.scaled.kernel import scaled_kernel
from specbatch.kernels.triton.scaled.tile import FAST_LIBRARY, ScaledTile, fitting
from specbatch.kernels.triton.skinny.dot import combine_kernel

_COMBINE_BLOCK = 512  # output features of one program that sums splits


def library_takes(values_MI: Tensor, num_out: int, dtype: torch.dtype) -> bool:
    return values_MI.is_cuda and dtype == torch.bfloat16 and num_out % 16 == 0 and values_MI.shape[1] % 16 == 0


def library_linear(
    x: Quantised,
    weight_OI: Tensor,
    scale_O1: Tensor,
    dtype: torch.dtype,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    fast: bool = FAST_LIBRARY,
) -> Tensor:
    """Compute `scaled_linear` by the library. `fast`: tensor cores keep the sums, with about 14 bits; otherwise partial
    sums are added in float32."""
    y_MO = torch._scaled_mm(
        x.values_TI, weight_OI.T, x.scale_TG, scale_O1.T, bias=bias_O, out_dtype=dtype, use_fast_accum=fast
    )
    return y_MO if residual_MO is None else residual_MO.add_(y_MO)


def linear(
    x: Quantised,
    weight_OI: Tensor,
    scale_OG: Tensor,
    dtype: torch.dtype,
    bias_O: Tensor | None,
    residual_MO: Tensor | None,
    tile: ScaledTile,
) -> Tensor:
    num_tokens, num_in = x.values_TI.shape
    num_out = weight_OI.shape[0]
    grouped = scale_OG.shape[1] > 1
    assert weight_OI.shape[1] == num_in, (x.values_TI.shape, weight_OI.shape)
    assert all(t.is_contiguous() for t in (x.values_TI, x.scale_TG, weight_OI, scale_OG)), weight_OI.stride()
    assert residual_MO is None or residual_MO.is_contiguous()
    assert not grouped or tile.block_i == GROUP, tile
    y_MO = torch.empty((num_tokens, num_out), dtype=dtype, device=weight_OI.device)
    if not num_tokens:
        return y_MO
    tile = fitting(tile, shared_bytes(weight_OI))
    pdl = dependent_launch(weight_OI)
    options = launch_options(pdl)
    partial = None
    if tile.splits > 1:
        partial = torch.empty((tile.splits, num_tokens, num_out), dtype=torch.float32, device=weight_OI.device)
    operand = None
    if tile.tma and pdl and num_in % 16 == 0:
        operand = TensorDescriptor.from_tensor(weight_OI, [tile.block_o, tile.block_i])
    prefetch = tile.prefetch if pdl and tile.prefetch * tile.splits <= num_in else 0
    tiles = triton.cdiv(num_out, tile.block_o) * triton.cdiv(num_tokens, tile.block_m)
    launch(
        scaled_kernel, (tiles, tile.splits),
        y_MO, x.values_TI, x.scale_TG, weight_OI, operand, scale_OG, bias_O, residual_MO, partial, num_tokens,
        OUT=num_out, IN=num_in, BLOCK_M=tile.block_m, BLOCK_O=tile.block_o, BLOCK_I=tile.block_i,
        STAGES=tile.num_stages, SPLITS=tile.splits, GROUPED=grouped, IMPRECISE=tile.imprecise,
        HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_MO is not None, TMA=operand is not None,
        PREFETCH=prefetch, THREADS=32 * tile.num_warps, PDL=pdl, num_warps=tile.num_warps, **options,
    )  # fmt: skip
    if partial is not None:
        launch(
            combine_kernel, (num_tokens, triton.cdiv(num_out, _COMBINE_BLOCK)),
            y_MO, partial, bias_O, residual_MO, num_tokens, OUT=num_out, SPLITS=tile.splits, GATED=False,
            ACTIVATION="silu", HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_MO is not None,
            BLOCK=_COMBINE_BLOCK, PDL=pdl, num_warps=4, **options,
        )  # fmt: skip
    return y_MO
