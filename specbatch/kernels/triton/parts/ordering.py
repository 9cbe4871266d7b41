# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Floats ordered as integers, for kernels (Triton). A number and its index are one integer, so that one comparison
finds the larger of two numbers and the earlier of equal ones.

NaN counts as -inf, so that rows of garbage, as in the padding of a captured graph, give no index out of range.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**63))  # below all packed numbers


@triton.jit
def ordered(x):
    """Return float32 numbers as int32 of the same order, with -0 as 0 and NaN as -inf."""
    x = tl.where(x == x, x, float("-inf"))
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def pack(x, index):
    """Return int64 that is larger for a larger x, and for equal x if the index is lower."""
    return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def packed_number(packed):
    key = (packed >> 32).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed_index(packed):
    return 0x7FFFFFFF - (packed & 0xFFFFFFFF)
