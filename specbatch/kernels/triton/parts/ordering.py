# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Floats ordered as integers, for kernels (Triton): a number and its index in one integer, so that the larger of two
and the earlier of equals are found by one comparison.

What is NaN counts as -inf: rows of garbage, as in the padding of a captured graph, give no index out of range.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**63))  # below all packed numbers


@triton.jit
def ordered(x):
    """float32 as int32 of the same order; -0 as 0, NaN as -inf."""
    x = tl.where(x == x, x, float("-inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pack(x, index):
    """int64 that is larger where x is, and of equal x where the index is lower."""
    return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def packed_number(packed):
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed_index(packed):
    return 0x7FFFFFFF - (packed & 0xFFFFFFFF)
