# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Norms and activations of single elements, with the roundings of the reference kernels (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.activations import SWIGLU_ALPHA, SWIGLU_LIMIT

_ALPHA, _LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def scaled_norm(x, weight, dtype: tl.constexpr):
    """Multiply a norm's float32 values by its weight. They are rounded to `dtype` first, as in Llama, unless the weight
    is in float32, as in Gemma."""
    if weight.dtype == tl.float32:
        return (x * weight).to(dtype)
    else:
        return (x.to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def gate_and_up(gate, up, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Compute `gated` of the reference kernels, with its roundings. Comparisons keep a NaN, which `tl.minimum` would
    replace."""
    g, u = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        g = tl.where(g > _LIMIT, _LIMIT, g)
        u = tl.where(u > _LIMIT, _LIMIT, tl.where(u < -_LIMIT, -_LIMIT, u))
        return (g / (1.0 + tl.exp(g * -_ALPHA)) * (u + 1.0)).to(dtype)
    z = g
    if ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(u)) is sigmoid(2 u), with u = sqrt(2 / pi) (g + 0.044715 g^3).
        z = 1.5957691216057308 * (g + 0.044715 * g * g * g)
    activated = (g / (1.0 + tl.exp(-z))).to(dtype).to(tl.float32)
    return (activated * u).to(dtype)


@triton.jit
def activation_of(x, ACTIVATION: tl.constexpr):
    """Compute `activated` of the reference kernels in float32."""
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == "relu":
        return tl.where(x < 0.0, 0.0, x)
    if ACTIVATION == "relu2":
        return tl.where(x < 0.0, 0.0, x * x)
    z = x
    if ACTIVATION == "gelu_tanh":
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-z))
