# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The model's memory-bound kernels (Triton): norm, activation, rotary embedding with the cache write, moves of slots.

Shape suffixes as in `kernels/torch/model.py`, which defines what each kernel computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.activations import Activation
from specbatch.kernels.triton.parts.elementwise import activation_of, gate_and_up, scaled_norm
from specbatch.kernels.triton.parts.launch import await_former, dependent_launch, launch, launch_options

_PLANES = 32  # (layer, key or value, head) triples of one program that moves a slot


@triton.jit
def _normed(x, weight, eps, E: tl.constexpr, dtype: tl.constexpr):
    """Compute the norm of a row in float32, with the roundings of the reference kernel."""
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / E + eps)
    return scaled_norm(x * scale, weight, dtype)


@triton.jit
def _rms_norm(x_ptr, weight_ptr, y_ptr, eps, E: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    ok = columns < E
    weight = tl.load(weight_ptr + columns, mask=ok, other=0.0)
    await_former(PDL)
    x = tl.load(x_ptr + row * E + columns, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * E + columns, _normed(x, weight, eps, E, y_ptr.dtype.element_ty), mask=ok)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, out_TE: Tensor | None = None) -> Tensor:
    size = x_TE.shape[-1]
    x_TE = x_TE.contiguous()
    y = torch.empty_like(x_TE) if out_TE is None else out_TE
    assert y.is_contiguous()
    num_rows = x_TE.numel() // size
    if num_rows:
        block = triton.next_power_of_2(size)
        pdl = dependent_launch(x_TE)
        launch(
            _rms_norm, (num_rows,),
            x_TE, weight_E, y, eps, E=size, BLOCK=block, PDL=pdl, num_warps=min(8, max(1, block // 512)),
            **launch_options(pdl),
        )  # fmt: skip
    return y


@triton.jit
def _norm_parts(
    x_ptr, first_ptr, second_ptr, eps, width,
    START: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm features START to START + E1 of a row in place, or in the second program of the row the E2 ones after."""
    at = x_ptr + tl.program_id(0).to(tl.int64) * width + START
    columns = tl.arange(0, BLOCK)
    dtype = x_ptr.dtype.element_ty
    await_former(PDL)
    if tl.program_id(1) == 0:
        ok = columns < E1
        weight = tl.load(first_ptr + columns, mask=ok, other=0.0)
        x = tl.load(at + columns, mask=ok, other=0.0).to(tl.float32)
        tl.store(at + columns, _normed(x, weight, eps, E1, dtype), mask=ok)
    else:
        ok = columns < E2
        weight = tl.load(second_ptr + columns, mask=ok, other=0.0)
        x = tl.load(at + E1 + columns, mask=ok, other=0.0).to(tl.float32)
        tl.store(at + E1 + columns, _normed(x, weight, eps, E2, dtype), mask=ok)


def norm_whole_heads(qkv_TZ: Tensor, q_norm_Q: Tensor, k_norm_K: Tensor, eps: float) -> Tensor:
    assert qkv_TZ.is_contiguous()
    sizes = len(q_norm_Q), len(k_norm_K)
    blocks = [triton.next_power_of_2(size) for size in sizes]
    if not len(qkv_TZ):
        return qkv_TZ
    # Each norm has the block of `rms_norm`, and with it its order of summation. Both have one launch if it is the same.
    launches = [(0, 2, blocks[0])] if blocks[0] == blocks[1] else [(0, 1, blocks[0]), (sizes[0], 1, blocks[1])]
    for start, count, block in launches:
        first, second = (q_norm_Q, k_norm_K) if start == 0 else (k_norm_K, k_norm_K)
        pdl = dependent_launch(qkv_TZ)
        launch(
            _norm_parts, (len(qkv_TZ), count),
            qkv_TZ, first, second, eps, qkv_TZ.shape[1],
            START=start, E1=len(first), E2=len(second), BLOCK=block, PDL=pdl,
            num_warps=min(8, max(1, block // 512)), **launch_options(pdl),
        )  # fmt: skip
    return qkv_TZ


@triton.jit
def _add_normed(
    y_ptr, residual_ptr, weight_ptr, next_weight_ptr, x_ptr, normed_ptr, eps,
    E: tl.constexpr, BLOCK: tl.constexpr, HAS_NEXT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * E
    columns = tl.arange(0, BLOCK)
    ok = columns < E
    dtype = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=ok, other=0.0)
    if HAS_NEXT:
        next_weight = tl.load(next_weight_ptr + columns, mask=ok, other=0.0)
    await_former(PDL)
    y = tl.load(y_ptr + at + columns, mask=ok, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + at + columns, mask=ok, other=0.0).to(tl.float32)
    x = (residual + _normed(y, weight, eps, E, dtype).to(tl.float32)).to(dtype)
    tl.store(x_ptr + at + columns, x, mask=ok)
    if HAS_NEXT:
        tl.store(normed_ptr + at + columns, _normed(x.to(tl.float32), next_weight, eps, E, dtype), mask=ok)


def add_normed(
    y_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, next_weight_E: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    num_rows, size = y_TE.shape
    assert y_TE.is_contiguous()
    assert residual_TE.is_contiguous()
    x = torch.empty_like(y_TE)
    normed = None if next_weight_E is None else torch.empty_like(y_TE)
    if num_rows:
        block = triton.next_power_of_2(size)
        pdl = dependent_launch(y_TE)
        launch(
            _add_normed, (num_rows,),
            y_TE, residual_TE, weight_E, weight_E if next_weight_E is None else next_weight_E,
            x, x if normed is None else normed, eps,
            E=size, BLOCK=block, HAS_NEXT=normed is not None, PDL=pdl, num_warps=min(8, max(1, block // 512)),
            **launch_options(pdl),
        )  # fmt: skip
    return x, normed


@triton.jit
def _layer_norm(
    x_ptr, weight_ptr, bias_ptr, y_ptr, eps,
    E: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * E
    columns = tl.arange(0, BLOCK)
    ok = columns < E
    weight = tl.load(weight_ptr + columns, mask=ok, other=0.0).to(tl.float32)
    bias = tl.zeros_like(weight)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + columns, mask=ok, other=0.0).to(tl.float32)
    await_former(PDL)
    x = tl.load(x_ptr + at + columns, mask=ok, other=0.0).to(tl.float32)
    x = tl.where(ok, x - tl.sum(x, 0) / E, 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / E + eps)
    tl.store(y_ptr + at + columns, (x * scale * weight + bias).to(y_ptr.dtype.element_ty), mask=ok)


def layer_norm(x_TE: Tensor, weight_E: Tensor, bias_E: Tensor | None, eps: float) -> Tensor:
    size = x_TE.shape[-1]
    x_TE = x_TE.contiguous()
    y = torch.empty_like(x_TE)
    num_rows = x_TE.numel() // size
    if num_rows:
        block = triton.next_power_of_2(size)
        pdl = dependent_launch(x_TE)
        launch(
            _layer_norm, (num_rows,),
            x_TE, weight_E, weight_E if bias_E is None else bias_E, y, eps,
            E=size, BLOCK=block, HAS_BIAS=bias_E is not None, PDL=pdl, num_warps=min(8, max(1, block // 512)),
            **launch_options(pdl),
        )  # fmt: skip
    return y


@triton.jit
def _activated(x_ptr, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_former(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    tl.store(x_ptr + at, activation_of(x.to(tl.float32), ACTIVATION).to(x.dtype), mask=at < size)


def activated(x_TI: Tensor, activation: Activation) -> Tensor:
    """Return the activation. The input is overwritten."""
    assert x_TI.is_contiguous()
    size = x_TI.numel()
    if size:
        pdl = dependent_launch(x_TI)
        launch(
            _activated, (triton.cdiv(size, 2048),), x_TI, size, ACTIVATION=activation, BLOCK=2048, PDL=pdl, num_warps=4,
            **launch_options(pdl),
        )  # fmt: skip
    return x_TI


@triton.jit
def _soft_capped(x_ptr, size, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_former(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    # tanh(z) = 1 - 2 / (1 + exp(2 z)); each step is rounded as in the reference kernel.
    z = (x.to(tl.float32) / cap).to(x.dtype).to(tl.float32)
    tanh = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * z))).to(x.dtype).to(tl.float32)
    tl.store(x_ptr + at, (tanh * cap).to(x.dtype), mask=at < size)


def soft_capped(logits_RV: Tensor, cap: float) -> Tensor:
    assert logits_RV.is_contiguous()
    size = logits_RV.numel()
    if size:
        pdl = dependent_launch(logits_RV)
        launch(
            _soft_capped, (triton.cdiv(size, 2048),), logits_RV, size, cap, BLOCK=2048, PDL=pdl, num_warps=4,
            **launch_options(pdl),
        )  # fmt: skip
    return logits_RV


@triton.jit
def _act_mul(x_ptr, y_ptr, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_former(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = columns < size
    dtype = y_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * 2 * size + columns, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + columns, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * size + columns, gate_and_up(gate, up, ACTIVATION, dtype), mask=ok)


def act_mul(gate_up_T2I: Tensor, activation: Activation = "silu") -> Tensor:
    num_rows, width = gate_up_T2I.shape
    y = torch.empty(num_rows, width // 2, dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    if num_rows:
        block = min(2048, triton.next_power_of_2(width // 2))
        pdl = dependent_launch(gate_up_T2I)
        launch(
            _act_mul,
            (num_rows, triton.cdiv(width // 2, block)),
            gate_up_T2I,
            y,
            width // 2,
            ACTIVATION=activation,
            BLOCK=block,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return y


@triton.jit
def _stored(x, inverse_scale, dtype: tl.constexpr):
    """Return `x` as a cache of `dtype` holds it, clamped as in the reference kernel, for every kind of conversion."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) * inverse_scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def _all_finite(x1, x2):
    """Return (rows, 1) bool: whether all numbers of a row are finite. It tests each number, because a maximum need not
    be NaN if one of them is."""
    finite = (tl.abs(x1) < float("inf")) & (tl.abs(x2) < float("inf"))
    return (tl.min(finite.to(tl.int32), 1) > 0)[:, None]


@triton.jit
def _normed_heads(
    y1, y2, q_norm_ptr, k_norm_ptr, dim1, dim2, pair_ok, is_query, eps, D: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Norm each head, given by its dimensions `dim1` and `dim2`."""
    scale = 1.0 / tl.sqrt_rn((tl.sum(y1 * y1, 1) + tl.sum(y2 * y2, 1)) / D + eps)
    wq1 = tl.load(q_norm_ptr + dim1, mask=pair_ok, other=0.0)[None, :]
    wq2 = tl.load(q_norm_ptr + dim2, mask=pair_ok, other=0.0)[None, :]
    wk1 = tl.load(k_norm_ptr + dim1, mask=pair_ok, other=0.0)[None, :]
    wk2 = tl.load(k_norm_ptr + dim2, mask=pair_ok, other=0.0)[None, :]
    y1 = scaled_norm(y1 * scale[:, None], tl.where(is_query, wq1, wk1), dtype).to(tl.float32)
    y2 = scaled_norm(y2 * scale[:, None], tl.where(is_query, wq2, wk2), dtype).to(tl.float32)
    return y1, y2


@triton.jit
def _rotary_write(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    k_offset_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    stride_qkv,
    stride_kv_head,
    k_inverse,
    v_inverse,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORMS_LAST: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    await_former(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pairs = tl.arange(0, HALF)
    half: tl.constexpr = D // 2
    turned: tl.constexpr = R // 2  # pairs that rotate; the others are dimensions after the R first ones
    dim1, dim2 = pairs, pairs + half
    if R < D:
        dim1 = tl.where(pairs < turned, pairs, pairs + turned)
        dim2 = tl.where(pairs < turned, pairs + turned, pairs + half)
    all_heads: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    pair_ok = pairs < half
    ok = (heads < all_heads)[:, None] & pair_ok[None, :]
    head = token * stride_qkv + heads[:, None] * D
    x1 = tl.load(qkv_ptr + head + dim1[None, :], mask=ok, other=0.0)
    x2 = tl.load(qkv_ptr + head + dim2[None, :], mask=ok, other=0.0)
    dtype = qkv_ptr.dtype.element_ty
    is_query = (heads < NUM_HEADS)[:, None]
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]

    y1, y2 = x1.to(tl.float32), x2.to(tl.float32)
    if HAS_NORM and not NORMS_LAST:
        y1, y2 = _normed_heads(y1, y2, q_norm_ptr, k_norm_ptr, dim1, dim2, pair_ok, is_query, eps, D, dtype)
    position = tl.load(positions_ptr + token)
    angle, rotates = position * R + pairs, pairs < turned
    cos1 = tl.load(cos_ptr + angle, mask=rotates, other=1.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_ptr + angle + turned, mask=rotates, other=1.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_ptr + angle, mask=rotates, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_ptr + angle + turned, mask=rotates, other=0.0).to(tl.float32)[None, :]
    # The table of sines has the sign of rotate-half.
    rotated1 = (y1 * cos1 + y2 * sin1).to(dtype)
    rotated2 = (y2 * cos2 + y1 * sin2).to(dtype)
    if HAS_NORM and NORMS_LAST:
        y1, y2 = rotated1.to(tl.float32), rotated2.to(tl.float32)
        y1, y2 = _normed_heads(y1, y2, q_norm_ptr, k_norm_ptr, dim1, dim2, pair_ok, is_query, eps, D, dtype)
        rotated1, rotated2 = y1.to(dtype), y2.to(dtype)
    out1 = tl.where(is_value, x1, rotated1)
    out2 = tl.where(is_value, x2, rotated2)

    q_head = (token * NUM_HEADS + heads)[:, None] * D
    tl.store(q_ptr + q_head + dim1[None, :], out1, mask=ok & is_query)
    tl.store(q_ptr + q_head + dim2[None, :], out2, mask=ok & is_query)
    slot = tl.load(slots_ptr + token)
    written = ok & (slot + pairs * 0 >= 0)[None, :]  # a block, because the interpreter has no scalar masks
    k_head, v_head = heads - NUM_HEADS, heads - NUM_HEADS - NUM_KV_HEADS
    k_slot = k_head[:, None].to(tl.int64) * stride_kv_head + slot * D
    v_slot = v_head[:, None].to(tl.int64) * stride_kv_head + slot * D
    is_key = (heads >= NUM_HEADS)[:, None] & (heads < NUM_HEADS + NUM_KV_HEADS)[:, None]
    # Keys become NaN if they or the values of the same head are not finite, see `storable` of the reference kernels.
    # Another program can write those values, so they are read here.
    of_keys = ok & is_key
    values = head + NUM_KV_HEADS * D
    v1 = tl.load(qkv_ptr + values + dim1[None, :], mask=of_keys, other=0.0).to(tl.float32)
    v2 = tl.load(qkv_ptr + values + dim2[None, :], mask=of_keys, other=0.0).to(tl.float32)
    finite = _all_finite(out1.to(tl.float32), out2.to(tl.float32)) & _all_finite(v1, v2)
    instead = tl.where(is_key, float("nan"), 0.0)
    cache: tl.constexpr = k_ptr.dtype.element_ty
    inverse_scale = tl.where(is_key, k_inverse, v_inverse)
    kept1 = tl.where(finite, out1.to(tl.float32), instead).to(dtype)
    kept2 = tl.where(finite, out2.to(tl.float32), instead).to(dtype)
    if HAS_OFFSET:
        k_offset = k_offset_ptr + k_head[:, None] * D
        kept1 = kept1.to(tl.float32) - tl.load(k_offset + dim1[None, :], mask=of_keys, other=0.0)
        kept2 = kept2.to(tl.float32) - tl.load(k_offset + dim2[None, :], mask=of_keys, other=0.0)
    stored1 = _stored(kept1, inverse_scale, cache)
    stored2 = _stored(kept2, inverse_scale, cache)
    tl.store(k_ptr + k_slot + dim1[None, :], stored1, mask=written & is_key)
    tl.store(k_ptr + k_slot + dim2[None, :], stored2, mask=written & is_key)
    tl.store(v_ptr + v_slot + dim1[None, :], stored1, mask=written & is_value)
    tl.store(v_ptr + v_slot + dim2[None, :], stored2, mask=written & is_value)


def rotary_write(
    qkv_TZ: Tensor,
    num_heads: int,
    num_kv_heads: int,
    cos_PR: Tensor,
    sin_PR: Tensor,
    positions_T: Tensor,
    slots_T: Tensor,
    kv_2KSD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    k_offset_KD: Tensor | None = None,
    *,
    norms_last: bool = False,
) -> Tensor:
    num_tokens, head_dim = qkv_TZ.shape[0], kv_2KSD.shape[3]
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv_TZ.dtype, device=qkv_TZ.device)
    if num_tokens == 0:
        return q
    block_h = 8 if num_tokens <= 64 else 16
    has_norm = q_norm_D is not None and k_norm_D is not None
    pdl = dependent_launch(qkv_TZ)
    launch(
        _rotary_write,
        (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, block_h)),
        qkv_TZ,
        q,
        kv_2KSD[0],
        kv_2KSD[1],
        cos_PR,
        sin_PR,
        positions_T,
        slots_T,
        cos_PR if k_offset_KD is None else k_offset_KD,
        q_norm_D if has_norm else cos_PR,
        k_norm_D if has_norm else cos_PR,
        eps,
        qkv_TZ.stride(0),
        kv_2KSD.stride(1),
        1 / k_scale,
        1 / v_scale,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_dim,
        R=cos_PR.shape[1],
        HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_H=block_h,
        HAS_NORM=has_norm,
        NORMS_LAST=norms_last,
        HAS_OFFSET=k_offset_KD is not None,
        PDL=pdl,
        num_warps=4 if num_tokens > 64 else 2,
        **launch_options(pdl),
    )
    return q


@triton.jit
def _rotate(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_cos, stride_sin,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    half: tl.constexpr = D // 2
    pairs = tl.arange(0, HALF)
    pair_ok = pairs < half
    cos1 = tl.load(cos_ptr + token * stride_cos + pairs, mask=pair_ok, other=0.0).to(tl.float32)[None, :]
    cos2 = tl.load(cos_ptr + token * stride_cos + pairs + half, mask=pair_ok, other=0.0).to(tl.float32)[None, :]
    sin1 = tl.load(sin_ptr + token * stride_sin + pairs, mask=pair_ok, other=0.0).to(tl.float32)[None, :]
    sin2 = tl.load(sin_ptr + token * stride_sin + pairs + half, mask=pair_ok, other=0.0).to(tl.float32)[None, :]
    k_heads = heads - NUM_HEADS
    is_q = (heads < NUM_HEADS)[:, None] & pair_ok[None, :]
    is_k = (heads >= NUM_HEADS)[:, None] & (k_heads < NUM_KV_HEADS)[:, None] & pair_ok[None, :]
    q = q_ptr + token * stride_qt + heads[:, None] * stride_qh + pairs[None, :]
    k = k_ptr + token * stride_kt + k_heads[:, None] * stride_kh + pairs[None, :]
    dtype = q_ptr.dtype.element_ty
    x1 = tl.where(is_q, tl.load(q, mask=is_q, other=0.0), tl.load(k, mask=is_k, other=0.0)).to(tl.float32)
    x2 = tl.where(is_q, tl.load(q + half, mask=is_q, other=0.0), tl.load(k + half, mask=is_k, other=0.0)).to(tl.float32)
    y1, y2 = (x1 * cos1 - x2 * sin1).to(dtype), (x2 * cos2 + x1 * sin2).to(dtype)
    q_out = q_out_ptr + (token * NUM_HEADS + heads)[:, None] * D + pairs[None, :]
    k_out = k_out_ptr + (token * NUM_KV_HEADS + k_heads)[:, None] * D + pairs[None, :]
    tl.store(q_out, y1, mask=is_q)
    tl.store(q_out + half, y2, mask=is_q)
    tl.store(k_out, y1, mask=is_k)
    tl.store(k_out + half, y2, mask=is_k)


def rotate(q_THD: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = k_TKD.shape[1]
    q = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    k = torch.empty(k_TKD.shape, dtype=k_TKD.dtype, device=k_TKD.device)
    if num_tokens:
        block_h = 8 if num_tokens <= 64 else 16
        launch(
            _rotate, (num_tokens, triton.cdiv(num_heads + num_kv_heads, block_h)),
            q_THD, k_TKD, cos_TD, sin_TD, q, k,
            *q_THD.stride()[:2], *k_TKD.stride()[:2], cos_TD.stride(0), sin_TD.stride(0),
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, D=head_dim, HALF=triton.next_power_of_2(head_dim // 2),
            BLOCK_H=block_h, num_warps=4 if num_tokens > 64 else 2,
        )  # fmt: skip
    return q, k


@triton.jit
def _move_slots(
    kv_ptr, source_ptr, target_ptr, num_planes, stride_plane,
    M: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    planes = (tl.program_id(1) * PLANES + tl.arange(0, PLANES)).to(tl.int64)[:, None]
    dims = tl.arange(0, BLOCK)[None, :]
    ok = (planes < num_planes) & (dims < D)
    # Columns are moved in order: no target is the source of a later column, but it may be the source of an earlier one.
    for i in range(M):
        target = tl.load(target_ptr + row * M + i)
        if target >= 0:
            source = tl.load(source_ptr + row * M + i)
            value = tl.load(kv_ptr + planes * stride_plane + source * D + dims, mask=ok)
            # In a small tile several warps have each element. None may write the next column before all have read this
            # one.
            tl.debug_barrier()
            tl.store(kv_ptr + planes * stride_plane + target * D + dims, value, mask=ok)


def move_slots(kv_L2KSD: Tensor, source_BM: Tensor, target_BM: Tensor) -> None:
    *planes, num_slots, head_dim = kv_L2KSD.shape
    num_planes = planes[0] * planes[1] * planes[2]
    num_rows, width = source_BM.shape
    launch(
        _move_slots, (num_rows, triton.cdiv(num_planes, _PLANES)),
        kv_L2KSD, source_BM, target_BM, num_planes, num_slots * head_dim,
        M=width, D=head_dim, BLOCK=triton.next_power_of_2(head_dim), PLANES=_PLANES, num_warps=4,
    )  # fmt: skip
