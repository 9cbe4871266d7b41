# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The soft cap of attention scores, cap * tanh(score / cap) (Gemma 2), inside attention kernels (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def capped(exponents, cap_log2):
    """Return the capped scores times log2(e), from the exponents that `scales` makes of products.

    tanh(z) is 1 - 2 / (1 + exp(2 z)), and `exponents` are 2 z log2(e).
    """
    return cap_log2 - 2.0 * cap_log2 / (1.0 + tl.exp2(exponents))


def scales(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """Return the factor of products of queries and keys, and the cap, of scores in units of log2(e). A cap of 0 means
    that there is none."""
    return (scale * LOG2E, 0.0) if soft_cap is None else (2 * scale * LOG2E / soft_cap, soft_cap * LOG2E)
