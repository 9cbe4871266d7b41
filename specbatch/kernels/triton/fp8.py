# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Linear layers in FP8 on CUDA: inputs are quantised in the norm's kernel, in the activation's, or by a separate one.

Results are those of `kernels/torch/fp8.py`. Shape suffixes as there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.activations import Activation
from specbatch.kernels.quantised import GROUP, SMALLEST_SCALE, Quantised
from specbatch.kernels.triton.parts.elementwise import gate_and_up, scaled_norm
from specbatch.kernels.triton.parts.launch import await_former, dependent_launch, launch, launch_options
from specbatch.kernels.triton.scaled import ops as scaled
from specbatch.kernels.triton.scaled.tile import scaled_tile_for

_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _scale_of(y, NUM: tl.constexpr):
    """Return scales (NUM,) for y (NUM, ...). Numbers without a sign have the order of their bits, and NaN comes last.
    So the largest of these integers is NaN if one number is, while a maximum of float32 need not be. The division is
    exact."""
    largest = tl.max(tl.abs(y).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full((NUM,), 448.0, tl.float32))
    return tl.maximum(scale, _SMALLEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store_quantised(
    y, columns, size, values, scales, row, static,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Quantise and store one row, which is float32, and 0 from `size` on. GROUP: the features that share a scale; 0:
    all."""
    if STATIC:
        scale = tl.full((1,), static, tl.float32)
        tl.store(scales + row + tl.arange(0, 1), scale)
        is_infinite = tl.abs(y) == float("inf")
        y = tl.where(is_infinite, float("nan"), y * tl.div_rn(tl.full((1,), 1.0, tl.float32), scale))
    elif GROUP == 0:
        scale = _scale_of(tl.reshape(y, (1, BLOCK)), 1)
        tl.store(scales + row + tl.arange(0, 1), scale)
        y = y * tl.div_rn(tl.full((1,), 1.0, tl.float32), scale)
    else:
        NUM: tl.constexpr = BLOCK // GROUP
        parts = tl.reshape(y, (NUM, GROUP))
        scale = _scale_of(parts, NUM)
        groups = tl.arange(0, NUM)
        num_groups = (size + GROUP - 1) // GROUP
        tl.store(scales + row * num_groups + groups, scale, mask=groups < num_groups)
        y = tl.reshape(parts * tl.div_rn(tl.full((NUM,), 1.0, tl.float32), scale)[:, None], (BLOCK,))
    y = tl.clamp(y, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values + row * size + columns, y.to(tl.float8e4nv), mask=columns < size)


@triton.jit
def _quantise(
    x, values, scales, static, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    await_former(PDL)
    y = tl.load(x + row * SIZE + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    _store_quantised(y, columns, SIZE, values, scales, row, static, BLOCK, GROUP, STATIC)


@triton.jit
def _rms_norm_quantised(
    x, weight, values, scales, static, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the bits of `_rms_norm` in model.py, and quantise them."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    ok = columns < SIZE
    w = tl.load(weight + columns, mask=ok, other=0.0)
    await_former(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    v = tl.load(x + row * SIZE + columns, mask=ok, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(v * v, 0) / SIZE + eps)
    y = scaled_norm(v * scale, w, dtype).to(tl.float32)
    _store_quantised(y, columns, SIZE, values, scales, row, static, BLOCK, GROUP, STATIC)


@triton.jit
def _act_mul_quantised(
    x, values, scales, static, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    STATIC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `_act_mul` of model.py and quantise it. SIZE: the size of the gate, and of the result."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    ok = columns < SIZE
    await_former(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    gate = tl.load(x + row * 2 * SIZE + columns, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * SIZE + SIZE + columns, mask=ok, other=0.0).to(tl.float32)
    y = gate_and_up(gate, up, ACTIVATION, dtype).to(tl.float32)
    _store_quantised(y, columns, SIZE, values, scales, row, static, BLOCK, GROUP, STATIC)


def quantise(x_TI: Tensor, static: float | None = None, grouped: bool = False) -> Quantised:
    return _launch(_quantise, x_TI, x_TI.shape[1], (), static, grouped)


def rms_norm_quantised(
    x_TE: Tensor, weight_E: Tensor, eps: float, static: float | None = None, grouped: bool = False
) -> Quantised:
    return _launch(_rms_norm_quantised, x_TE, x_TE.shape[1], (weight_E, eps), static, grouped)


def act_mul_quantised(
    gate_up_T2I: Tensor, static: float | None = None, grouped: bool = False, activation: Activation = "silu"
) -> Quantised:
    size = gate_up_T2I.shape[1] // 2
    return _launch(_act_mul_quantised, gate_up_T2I, size, (), static, grouped, ACTIVATION=activation)


def _launch(
    kernel, x: Tensor, size: int, norm: tuple, static: float | None, grouped: bool, **constants: str
) -> Quantised:
    """Launch one program for each token. `norm`: the norm's weight and its eps, or nothing. `constants`: further
    constants of the kernel."""
    num_tokens = x.shape[0]
    num_groups = triton.cdiv(size, GROUP) if grouped and static is None else 1
    values = torch.empty(num_tokens, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x.device)
    if num_tokens:
        block = max(triton.next_power_of_2(size), GROUP)
        pdl = dependent_launch(x)
        # A norm has the number of warps of `rms_norm`, because it decides the order of the sum.
        warps = min(8 if norm else 32, max(1, block // 512))
        weight, rest = norm[:1], norm[1:]
        launch(
            kernel, (num_tokens,),
            x.contiguous(), *weight, values, scales, 1.0 if static is None else static, *rest,
            **constants, SIZE=size, BLOCK=block, GROUP=GROUP if grouped else 0, STATIC=static is not None, PDL=pdl,
            num_warps=warps, **launch_options(pdl),
        )  # fmt: skip
    return Quantised(values, scales)


def scaled_linear(
    x: Quantised,
    weight_OI: Tensor,
    scale_OG: Tensor,
    dtype: torch.dtype,
    bias_O: Tensor | None = None,
    residual_TO: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    (num_tokens, num_in), num_out = x.values_TI.shape, weight_OI.shape[0]
    library_fits = scale_OG.shape[1] == 1 and scaled.library_takes(x.values_TI, num_out, dtype) and not invariant
    tile = scaled_tile_for(num_tokens, num_out, num_in, library_fits, scale_OG.shape[1] > 1, invariant)
    if tile is None:
        return scaled.library_linear(x, weight_OI, scale_OG, dtype, bias_O, residual_TO)
    return scaled.linear(x, weight_OI, scale_OG, dtype, bias_O, residual_TO, tile)
