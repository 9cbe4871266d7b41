"""Norm, activation, rotary embedding with the cache write, and moves of slots, in plain torch: fixed shapes, no
synchronisation, any device and dtype.

The last slot of a cache is spare: no sequence has it. These functions write there what a Triton kernel does not write.

A cache has the model's dtype or float8_e4m3fn. In float8, a layer's keys and values are divided by a scale each (1,
unless the checkpoint has others), and numbers beyond +-448 then become +-448.

All values of a cache are finite. If a token's key or value in a head is not finite, its key there is stored as NaN, and
such a value as 0 (`storable`). So a query that sees the token gets NaN, and other queries are not disturbed: the score
of a hidden token is replaced, but its value is multiplied by a weight of 0, and 0 * NaN would be NaN.

Shape suffixes: T packed tokens, E hidden size, I intermediate size, H query heads, K key/value heads, D head dimension,
R dimensions of a head that rotate, S slots, B sequences, L slots of the longest page table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.activations import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation

_LARGEST_E4M3 = 448.0


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, out_TE: Tensor | None = None) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019), computed in float32 at least.

    The norm is rounded to the input's dtype, then scaled by the weight, as Llama does. A weight in float32 with inputs
    of a narrower dtype scales before the only rounding, as Gemma does. `out_TE`: a contiguous tensor to which the norm
    is written, and which is returned.
    """
    if out_TE is not None:
        return out_TE.copy_(rms_norm(x_TE, weight_E, eps))
    if x_TE.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x_TE, weight_E.shape, weight_E, eps)
    wide = x_TE.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight_E * (wide if weight_E.dtype == torch.float32 else wide.to(x_TE.dtype))).to(x_TE.dtype)


def norm_whole_heads(qkv_TZ: Tensor, q_norm_Q: Tensor, k_norm_K: Tensor, eps: float) -> Tensor:
    """Norm all heads of queries of a fused projection together, and all heads of keys (OLMo 2). The input may be
    overwritten."""
    q, k, v = qkv_TZ.split((len(q_norm_Q), len(k_norm_K), qkv_TZ.shape[1] - len(q_norm_Q) - len(k_norm_K)), dim=1)
    return torch.cat((rms_norm(q, q_norm_Q, eps), rms_norm(k, k_norm_K, eps), v), dim=1)


def add_normed(
    y_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float, next_weight_E: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return x = residual + rms_norm(y), and rms_norm(x) with `next_weight_E` (None: without it): the end of a half of
    a layer whose outputs have norms (Gemma 2). Each step is rounded."""
    x_TE = residual_TE + rms_norm(y_TE, weight_E, eps)
    return x_TE, None if next_weight_E is None else rms_norm(x_TE, next_weight_E, eps)


def layer_norm(x_TE: Tensor, weight_E: Tensor, bias_E: Tensor | None, eps: float) -> Tensor:
    """Norm over the last dimension with its mean subtracted (Ba et al. 2016), computed in float32 at least and rounded
    once."""
    wide = torch.promote_types(x_TE.dtype, torch.float32)
    bias = None if bias_E is None else bias_E.to(wide)
    return F.layer_norm(x_TE.to(wide), weight_E.shape, weight_E.to(wide), bias, eps).to(x_TE.dtype)


def activated(x_TI: Tensor, activation: Activation) -> Tensor:
    """Return the activation of an MLP's gate, or of the inner features of an MLP without one. Not "clamped_swiglu"."""
    if activation == "silu":
        return F.silu(x_TI)
    if activation in ("relu", "relu2"):
        positive = F.relu(x_TI)
        return positive if activation == "relu" else positive * positive
    return F.gelu(x_TI, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return the inner features of a gated feed-forward (SwiGLU, GeGLU; Shazeer 2020), see `activations.py`. Each step
    is rounded; "clamped_swiglu" is rounded once, and an element's bits do not depend on where it lies."""
    if activation != "clamped_swiglu":
        return activated(gate, activation) * up
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate_wide, up_wide = gate.to(wide).clamp(max=SWIGLU_LIMIT), up.to(wide).clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate_wide / (1 + torch.exp(-SWIGLU_ALPHA * gate_wide)) * (up_wide + 1)).to(gate.dtype)


def act_mul(gate_up_T2I: Tensor, activation: Activation = "silu") -> Tensor:
    """Return `gated` of the two halves, (T, I)."""
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return gated(gate, up, activation)


def soft_capped(logits_RV: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap) in the dtype of the logits (Gemma 2). The logits may be overwritten."""
    return torch.tanh(logits_RV / cap) * cap


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
    """Split a fused projection, norm each head if the model does (Qwen3), rotate the first R dimensions of queries and
    keys (rotate-half; the sign is in `sin_PR`), and write keys and values to the cache at `slots_T` (-1: not written),
    in its dtype. Return queries (T, H, D). `k_scale`, `v_scale`: the scales of a cache in float8, by which keys and
    values are divided.
    `k_offset_KD`: it is first subtracted from all keys, in float32. `norms_last`: norms come after the rotation.
    """
    num_tokens, head_dim, rotary_dim = qkv_TZ.shape[0], kv_2KSD.shape[3], cos_PR.shape[1]
    heads = qkv_TZ.view(num_tokens, -1, head_dim)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    norms = None if q_norm_D is None or k_norm_D is None else (q_norm_D, k_norm_D)
    if norms is not None and not norms_last:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    cos, sin = cos_PR[positions_T].unsqueeze(1), sin_PR[positions_T].unsqueeze(1)
    turned = (x[..., :rotary_dim] for x in (q, k))
    turned = (x * cos + x.roll(rotary_dim // 2, dims=-1) * sin for x in turned)
    q, k = (torch.cat((first, x[..., rotary_dim:]), dim=-1) for first, x in zip(turned, (q, k), strict=True))
    if norms is not None and norms_last:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    slots = torch.where(slots_T >= 0, slots_T, kv_2KSD.shape[2] - 1)
    k, v = storable(k, v)
    if k_offset_KD is not None:
        k = k.to(torch.promote_types(k.dtype, torch.float32)) - k_offset_KD
    for plane_KSD, new_TKD, scale in zip(as_bytes(kv_2KSD), (k, v), (k_scale, v_scale), strict=True):
        plane_KSD.index_copy_(1, slots, as_bytes(_stored(new_TKD, kv_2KSD.dtype, scale)).transpose(0, 1))
    return q


def rotate(q_THD: Tensor, k_TKD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate whole heads of queries and keys by the angles of their tokens (rotate-half; the sign is not in `sin_TD`).
    Return new tensors. The last dimension of all arguments is contiguous."""
    cos, sin = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turned(q_THD), turned(k_TKD)


def storable(k_TKD: Tensor, v_TKD: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values as a cache holds them, see the module's text."""
    v_ok_TKD = v_TKD.isfinite().all(dim=-1, keepdim=True)
    ok_TKD = v_ok_TKD & k_TKD.isfinite().all(dim=-1, keepdim=True)
    return torch.where(ok_TKD, k_TKD, torch.nan), torch.where(v_ok_TKD, v_TKD, 0.0)


def _stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Return `x` as a cache of `dtype` holds it. The clamp comes first, because torch rounds numbers to NaN that float8
    cannot hold."""
    if dtype == torch.float8_e4m3fn:
        wide = x if x.dtype == torch.float64 else x.float()
        x = (wide * (1 / scale)).clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
    return x.to(dtype)


def as_bytes(x: Tensor) -> Tensor:
    """Return `x`, or its bytes if it is float8, because torch cannot index and copy float8 on every device."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def move_slots(kv_L2KSD: Tensor, source_BM: Tensor, target_BM: Tensor) -> None:
    """Copy slots `source_BM` to slots `target_BM` in all layers at once. -1 in `target_BM`: nothing is copied.

    No two sequences move the same slot, and none moves the spare one. Within a sequence, no target is the source of a
    later column, because paths of trees are moved towards their roots.
    """
    spare = kv_L2KSD.shape[3] - 1
    moves = (target_BM >= 0).view(-1)
    source, target = torch.where(moves, source_BM.view(-1), spare), torch.where(moves, target_BM.view(-1), spare)
    kv = as_bytes(kv_L2KSD)
    kv.index_copy_(3, target, kv.index_select(3, source))
