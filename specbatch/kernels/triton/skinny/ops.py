# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Matrix products of few rows, bound by reading the weights, with what surrounds them: norm, bias, residual, gate.

A program owns `block_o` rows of the weight and streams them once, in steps of `block_i` input features and in that
order, so that a row's bits depend on the configuration (`linear_config.Config`) and never on the other rows. Sums over
parts of the input features (`splits`) are added in fixed order by a second kernel; there are no atomics.

Programmatic dependent launch (`Config.pdl`): a program lets the next kernel start at once, reads its first weights
(`early`, `prefetch`), and only then waits (`gdc_wait`) until the kernel before it is complete. Nothing but weights,
which never change, is read before that, and nothing is written. Since each waits, a kernel's end implies the end of all
before it.

The operations of the same names in `kernels.torch_linear` say what is computed. Whether a product is one for this
module says `linear_config.is_skinny`; its configuration comes from `linear_config.config_for` unless one is given.

Shape suffixes: M rows, E hidden size (input of a norm), I input features, O output features, S splits.
In kernels, where sizes are names by themselves: OUT and IN.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specbatch.kernels.triton.model import rms_norm
from specbatch.kernels.triton.parts.launch import has_dependent_launch, launch_options
from specbatch.kernels.triton.parts.shared_memory import shared_bytes
from specbatch.kernels.triton.skinny.dot import combine_kernel, dot_kernel
from specbatch.kernels.triton.skinny.fma import fma_kernel
from specbatch.kernels.triton.skinny.tile import Config, config_for, fitting, without_hopper

_COMBINE_BLOCK = 512  # output features of one program that sums splits


def linear(
    x_MI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """x W^T + bias, rounded to x's dtype, then + residual, rounded again. Returns (M, O)."""
    config = config or _config(x_MI, weight_OI)
    return _product(x_MI, None, 0.0, weight_OI, bias_O, residual_MO, False, config)


def norm_linear(
    x_ME: Tensor,
    norm_weight_E: Tensor,
    eps: float,
    weight_OE: Tensor,
    bias_O: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """linear(rms_norm(x)). Returns (M, O)."""
    config = config or _config(x_ME, weight_OE)
    return _product(x_ME, norm_weight_E, eps, weight_OE, bias_O, None, False, config)


def gated_linear(x_ME: Tensor, gate_up_2IE: Tensor, config: Config | None = None) -> Tensor:
    """silu(x G^T) * (x U^T), each step rounded to x's dtype; rows [0, I) of the weight are the gate. Returns (M, I)."""
    config = config or _config(x_ME, gate_up_2IE)
    return _product(x_ME, None, 0.0, gate_up_2IE, None, None, True, config)


def norm_gated_linear(
    x_ME: Tensor, norm_weight_E: Tensor, eps: float, gate_up_2IE: Tensor, config: Config | None = None
) -> Tensor:
    """gated_linear(rms_norm(x)). Returns (M, I)."""
    config = config or _config(x_ME, gate_up_2IE)
    return _product(x_ME, norm_weight_E, eps, gate_up_2IE, None, None, True, config)


def _config(x_MI: Tensor, weight_OI: Tensor) -> Config:
    config = config_for(x_MI.shape[0], weight_OI.shape[0], weight_OI.shape[1], x_MI.dtype)
    is_hopper = x_MI.is_cuda and has_dependent_launch(x_MI.get_device())
    return fitting(config if is_hopper else without_hopper(config), shared_bytes(x_MI))


def _product(
    x_MI: Tensor,
    norm_weight_I: Tensor | None,
    eps: float,
    weight: Tensor,  # (O, I), or (2 O, I) if gated
    bias_O: Tensor | None,
    residual_MO: Tensor | None,
    gated: bool,
    config: Config,
) -> Tensor:
    num_rows, size = x_MI.shape
    assert num_rows <= config.block_m, (num_rows, config)
    assert weight.shape[1] == size, (x_MI.shape, weight.shape)
    assert x_MI.stride(1) == 1, x_MI.stride()
    assert num_rows == 1 or x_MI.stride(0) % 8 == 0, x_MI.stride()  # rows begin at 16 bytes
    assert weight.is_contiguous(), weight.stride()
    assert residual_MO is None or residual_MO.is_contiguous()
    num_out = weight.shape[0] // 2 if gated else weight.shape[0]
    if norm_weight_I is not None and not config.fuse_norm:
        x_MI, norm_weight_I = rms_norm(x_MI, norm_weight_I, eps), None
    y_MO = torch.empty((num_rows, num_out), dtype=x_MI.dtype, device=x_MI.device)
    block_o = config.block_o // 2 if gated else config.block_o
    block_i = min(config.block_i, triton.next_power_of_2(size))
    tiles = triton.cdiv(num_out, block_o)
    threads = 32 * config.num_warps
    prefetch = config.prefetch
    if (prefetch + (block_i if config.early else 0)) * config.splits > size:  # past the last row's end
        prefetch = 0
    norm_block = min(triton.next_power_of_2(size), 64 * threads // config.block_m if config.kind == "dot" else 4096)
    options = launch_options(config.pdl)
    if config.kind == "fma":
        fma_kernel[(tiles,)](
            y_MO, x_MI, weight, norm_weight_I, bias_O, residual_MO, num_rows, x_MI.stride(0), eps,
            OUT=num_out, IN=size, BLOCK_M=config.block_m, BLOCK_O=block_o, BLOCK_I=block_i,
            STAGES=config.num_stages, NORM=norm_weight_I is not None, GATED=gated, HAS_BIAS=bias_O is not None,
            HAS_RESIDUAL=residual_MO is not None, NORM_BLOCK=norm_block, EARLY=config.early, PREFETCH=prefetch,
            THREADS=threads, PDL=config.pdl, num_warps=config.num_warps, **options,
        )  # fmt: skip
        return y_MO
    parts = 2 if gated else 1
    partial = None
    if config.splits > 1:
        partial = torch.empty((config.splits, num_rows, parts * num_out), dtype=torch.float32, device=x_MI.device)
    operand = None
    if config.tma and gated:
        operand = TensorDescriptor.from_tensor(weight.view(2, num_out, size), [2, block_o, block_i])
    elif config.tma:
        operand = TensorDescriptor.from_tensor(weight, [block_o, block_i])
    dot_kernel[(tiles * config.splits,)](
        y_MO, x_MI, weight, operand, norm_weight_I, bias_O, residual_MO, partial, num_rows, x_MI.stride(0), eps,
        OUT=num_out, IN=size, BLOCK_M=config.block_m, BLOCK_O=block_o, BLOCK_I=block_i,
        STAGES=config.num_stages, SPLITS=config.splits, NORM=norm_weight_I is not None, GATED=gated,
        HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_MO is not None, TMA=config.tma, NORM_BLOCK=norm_block,
        EARLY=config.early, PREFETCH=prefetch, THREADS=threads, PDL=config.pdl, num_warps=config.num_warps, **options,
    )  # fmt: skip
    if partial is not None:
        combine_kernel[(num_rows, triton.cdiv(num_out, _COMBINE_BLOCK))](
            y_MO, partial, bias_O, residual_MO, num_rows, OUT=num_out, SPLITS=config.splits, GATED=gated,
            HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_MO is not None, BLOCK=_COMBINE_BLOCK, PDL=config.pdl,
            num_warps=4, **options,
        )  # fmt: skip
    return y_MO
