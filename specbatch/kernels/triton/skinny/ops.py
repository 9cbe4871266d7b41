# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""GEMMs of few tokens, whose time is that of reading the weights, with norm, bias, residual and gate.

A program owns `block_o` output features and streams their weights once, in steps of `block_i` input features and in
that order, so that a token's bits depend on the tile (`GemmTile`) and never on the other tokens. Sums over parts of the
input features (`splits`) are added in fixed order by a second kernel; there are no atomics.

Programmatic dependent launch (`GemmTile.pdl`): a program lets the next kernel start at once, reads its first weights
(`early`, `prefetch`), and only then waits (`gdc_wait`) until the kernel before it is complete. Before the wait it reads
only weights, which never change, and writes nothing. Since each kernel waits, the end of a kernel implies the end of
all kernels before it.

`kernels/torch/gemm.py` defines the results. `tile.is_skinny` decides which GEMMs run here. The tile comes from
`gemm_tile_for` unless one is given.

Shape suffixes: M tokens, E hidden size (input of a norm), I input features, O output features, S splits.
In kernels, where sizes are names by themselves: OUT and IN.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specbatch.kernels.activations import Activation
from specbatch.kernels.triton.model import rms_norm
from specbatch.kernels.triton.parts.launch import has_dependent_launch, launch, launch_options
from specbatch.kernels.triton.parts.shared_memory import shared_bytes
from specbatch.kernels.triton.parts.tma import can_use_tma
from specbatch.kernels.triton.skinny.dot import combine_kernel, dot_kernel
from specbatch.kernels.triton.skinny.fma import fma_kernel
from specbatch.kernels.triton.skinny.tile import GemmTile, fitting, gemm_tile_for, invariant_tile_for, without_hopper

_COMBINE_BLOCK = 512  # output features of one program that sums splits


def linear(
    x_MI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    tile: GemmTile | None = None,
) -> Tensor:
    """Return x W^T + bias, rounded to x's dtype, then + residual, rounded again; (M, O)."""
    tile = tile or _tile_for(x_MI, weight_OI)
    return _multiply(x_MI, None, 0.0, weight_OI, bias_O, residual_MO, False, tile)


def invariant_linear(x_MI: Tensor, weight_OI: Tensor, residual_MO: Tensor | None = None) -> Tensor:
    """Return x W^T, rounded, + residual, rounded, for at most MAX_TOKENS tokens. A token's bits do not depend on the
    number of tokens."""
    return linear(x_MI, weight_OI, None, residual_MO, _invariant_tile(x_MI, weight_OI))


def invariant_gated_linear(x_ME: Tensor, gate_up_2IE: Tensor, activation: Activation = "silu") -> Tensor:
    """Compute `gated_linear` of at most MAX_TOKENS tokens, with the bits of `invariant_linear` and `act_mul`."""
    return gated_linear(x_ME, gate_up_2IE, activation, _invariant_tile(x_ME, gate_up_2IE, gated=True))


def _invariant_tile(x_MI: Tensor, weight_OI: Tensor, *, gated: bool = False) -> GemmTile:
    tile = invariant_tile_for(x_MI.shape[0], weight_OI.shape[0])
    assert tile is not None, x_MI.shape
    return _on_this_gpu(tile, x_MI, gated)


def norm_linear(
    x_ME: Tensor,
    norm_weight_E: Tensor,
    eps: float,
    weight_OE: Tensor,
    bias_O: Tensor | None = None,
    tile: GemmTile | None = None,
) -> Tensor:
    """Return linear(rms_norm(x)), (M, O)."""
    tile = tile or _tile_for(x_ME, weight_OE)
    return _multiply(x_ME, norm_weight_E, eps, weight_OE, bias_O, None, False, tile)


def gated_linear(
    x_ME: Tensor, gate_up_2IE: Tensor, activation: Activation = "silu", tile: GemmTile | None = None
) -> Tensor:
    """Return activation(x G^T) * (x U^T), (M, I), each step rounded to x's dtype. G is the first half of the weight."""
    tile = tile or _tile_for(x_ME, gate_up_2IE, gated=True)
    return _multiply(x_ME, None, 0.0, gate_up_2IE, None, None, True, tile, activation)


def norm_gated_linear(
    x_ME: Tensor,
    norm_weight_E: Tensor,
    eps: float,
    gate_up_2IE: Tensor,
    activation: Activation = "silu",
    tile: GemmTile | None = None,
) -> Tensor:
    """Return gated_linear(rms_norm(x)), (M, I)."""
    tile = tile or _tile_for(x_ME, gate_up_2IE, gated=True)
    return _multiply(x_ME, norm_weight_E, eps, gate_up_2IE, None, None, True, tile, activation)


def _tile_for(x_MI: Tensor, weight_OI: Tensor, *, gated: bool = False) -> GemmTile:
    tile = gemm_tile_for(x_MI.shape[0], weight_OI.shape[0], weight_OI.shape[1], x_MI.dtype)
    return _on_this_gpu(tile, x_MI, gated)


def _on_this_gpu(tile: GemmTile, x_MI: Tensor, gated: bool) -> GemmTile:
    is_hopper = x_MI.is_cuda and has_dependent_launch(x_MI.get_device())
    return fitting(tile if is_hopper else without_hopper(tile), shared_bytes(x_MI), gated=gated)


def _multiply(
    x_MI: Tensor,
    norm_weight_I: Tensor | None,
    eps: float,
    weight: Tensor,  # (O, I), or (2 O, I) if gated
    bias_O: Tensor | None,
    residual_MO: Tensor | None,
    gated: bool,
    tile: GemmTile,
    activation: Activation = "silu",
) -> Tensor:
    num_tokens, size = x_MI.shape
    assert num_tokens <= tile.block_m, (num_tokens, tile)
    assert weight.shape[1] == size, (x_MI.shape, weight.shape)
    assert x_MI.stride(1) == 1, x_MI.stride()
    assert num_tokens == 1 or x_MI.stride(0) % 8 == 0, x_MI.stride()  # rows begin at multiples of 16 bytes
    assert weight.is_contiguous(), weight.stride()
    assert residual_MO is None or residual_MO.is_contiguous()
    num_out = weight.shape[0] // 2 if gated else weight.shape[0]
    if norm_weight_I is not None and not (tile.fuse_norm and norm_weight_I.dtype == x_MI.dtype):
        x_MI, norm_weight_I = rms_norm(x_MI, norm_weight_I, eps), None
    y_MO = torch.empty((num_tokens, num_out), dtype=x_MI.dtype, device=x_MI.device)
    block_o = tile.block_o // 2 if gated else tile.block_o
    block_i = min(tile.block_i, triton.next_power_of_2(size))
    tiles = triton.cdiv(num_out, block_o)
    threads = 32 * tile.num_warps
    prefetch = tile.prefetch
    if (prefetch + (block_i if tile.early else 0)) * tile.splits > size:  # it would read past the last row's end
        prefetch = 0
    norm_block = min(triton.next_power_of_2(size), 64 * threads // tile.block_m if tile.kind == "dot" else 4096)
    options = launch_options(tile.pdl)
    if tile.kind == "fma":
        launch(
            fma_kernel, (tiles,),
            y_MO, x_MI, weight, norm_weight_I, bias_O, residual_MO, num_tokens, x_MI.stride(0), eps,
            OUT=num_out, IN=size, BLOCK_M=tile.block_m, BLOCK_O=block_o, BLOCK_I=block_i,
            STAGES=tile.num_stages, NORM=norm_weight_I is not None, GATED=gated, ACTIVATION=activation,
            HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_MO is not None, NORM_BLOCK=norm_block,
            EARLY=tile.early, PREFETCH=prefetch, THREADS=threads, PDL=tile.pdl, num_warps=tile.num_warps, **options,
        )  # fmt: skip
        return y_MO
    parts = 2 if gated else 1
    partial = None
    if tile.splits > 1:
        partial = torch.empty((tile.splits, num_tokens, parts * num_out), dtype=torch.float32, device=x_MI.device)
    operand = None
    if tile.tma and can_use_tma(tile.num_warps, to_registers=gated):
        shape, block = ((2, num_out, size), [2, block_o, block_i]) if gated else ((num_out, size), [block_o, block_i])
        operand = TensorDescriptor.from_tensor(weight.view(shape), block)
    launch(
        dot_kernel, (tiles * tile.splits,),
        y_MO, x_MI, weight, operand, norm_weight_I, bias_O, residual_MO, partial, num_tokens, x_MI.stride(0), eps,
        OUT=num_out, IN=size, BLOCK_M=tile.block_m, BLOCK_O=block_o, BLOCK_I=block_i,
        STAGES=tile.num_stages, SPLITS=tile.splits, NORM=norm_weight_I is not None, GATED=gated, ACTIVATION=activation,
        HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_MO is not None, TMA=operand is not None,
        NORM_BLOCK=norm_block, EARLY=tile.early, PREFETCH=prefetch, THREADS=threads, PDL=tile.pdl,
        num_warps=tile.num_warps, **options,
    )  # fmt: skip
    if partial is not None:
        launch(
            combine_kernel, (num_tokens, triton.cdiv(num_out, _COMBINE_BLOCK)),
            y_MO, partial, bias_O, residual_MO, num_tokens, OUT=num_out, SPLITS=tile.splits, GATED=gated,
            ACTIVATION=activation, HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_MO is not None,
            BLOCK=_COMBINE_BLOCK, PDL=tile.pdl, num_warps=4, **options,
        )  # fmt: skip
    return y_MO
