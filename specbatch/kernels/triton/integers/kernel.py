# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The kernels of `ops.py`, on the tensor cores. Shape suffixes as there."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.parts.integers import unpack_bytes, unpack_nibbles
from specbatch.kernels.triton.parts.launch import await_former
from specbatch.kernels.triton.skinny.parts import load_weights, rounded

_GROUP_TILES = tl.constexpr(8)  # tiles of tokens whose inputs stay in L2 while weights are read


@triton.jit
def _inputs_of(step, STEP: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr):
    """Return the first input of the low numbers of a step. With 4 bits, those of the high ones are UNIT / 2 later."""
    if BITS == 8:
        return step * STEP
    return step * STEP // (UNIT // 2) * UNIT + step * STEP % (UNIT // 2)


@triton.jit
def _of_group(pointer, first, rows, OUT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Load the scales or zero points of the group of input `first`. After the last input the last group counts."""
    group = tl.minimum(first // GROUP, GROUPS - 1) if GROUPS > 1 else 0
    return tl.load(pointer + group * OUT + rows)


@triton.jit
def _zeros_of(
    zeros, first, rows, OUT: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    if HAS_ZEROS:
        found = _of_group(zeros, first, rows, OUT, GROUP, GROUPS)
    else:
        found = tl.full(rows.shape, 1 << (BITS - 1), tl.uint8)
    return found[:, None]


@triton.jit
def _x_tile(x_ptrs, first, offs, ok_m, IN: tl.constexpr, MASKED: tl.constexpr):
    mask = ok_m[None, :] & (first + offs < IN)[:, None] if MASKED else ok_m[None, :]
    return tl.load(x_ptrs + first, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["M"])
def integer_kernel(
    y, x, values, scales, zeros, bias, residual, partial, M, stride_x,
    OUT: tl.constexpr, IN: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, SCALE_SUMS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y (M, OUT), or its parts `partial` (S, M, OUT) if SPLITS > 1. The tile of weights is the first operand,
    and x transposed is the second. Grid: (tiles of outputs x tiles of tokens, SPLITS)."""
    dtype: tl.constexpr = y.dtype.element_ty
    ROW: tl.constexpr = (IN + UNIT - 1) // UNIT * UNIT * BITS // 8  # bytes of a row of the weight
    MASKED: tl.constexpr = IN % UNIT != 0
    HALF: tl.constexpr = UNIT // 2
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    STEPS: tl.constexpr = ROW // STEP
    STEPS_PER_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    TILES_O: tl.constexpr = (OUT + BLOCK_O - 1) // BLOCK_O
    # Programs go over groups of tiles of tokens, and in a group over one tile of weights after the other.
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.program_id(0) // (_GROUP_TILES * TILES_O) * _GROUP_TILES
    in_group = tl.minimum(tiles_m - first_tile, _GROUP_TILES)
    within = tl.program_id(0) % (_GROUP_TILES * TILES_O)
    token = (first_tile + within % in_group) * BLOCK_M
    row = within // in_group * BLOCK_O
    split = tl.program_id(1)
    begin = 0 if SPLITS == 1 else split * STEPS_PER_SPLIT
    end = STEPS if SPLITS == 1 else tl.minimum(begin + STEPS_PER_SPLIT, STEPS)
    offs = tl.arange(0, STEP)
    rows = row + tl.arange(0, BLOCK_O)
    ok_o = rows < OUT
    safe_rows = rows if OUT % BLOCK_O == 0 else tl.minimum(rows, OUT - 1)
    w_ptrs = values + safe_rows.to(tl.int64)[:, None] * ROW + offs[None, :]
    # Scales of a step are loaded during the one before it: these loads are not in the pipeline of the tiles.
    first = _inputs_of(begin, STEP, BITS, UNIT)
    low_scale = _of_group(scales, first, safe_rows, OUT, GROUP, GROUPS).to(tl.float32)
    high_scale = _of_group(scales, first + HALF, safe_rows, OUT, GROUP, GROUPS).to(tl.float32) if BITS == 4 else 0.0
    await_former(PDL)
    tokens = token + tl.arange(0, BLOCK_M)
    ok_m = tokens < M
    x_ptrs = x + tokens.to(tl.int64)[None, :] * stride_x + offs[:, None]
    acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        first = _inputs_of(step, STEP, BITS, UNIT)
        w = load_weights(w_ptrs + step * STEP, None, False)
        low_x = _x_tile(x_ptrs, first, offs, ok_m, IN, MASKED)
        low_zeros = _zeros_of(zeros, first, safe_rows, OUT, GROUP, GROUPS, BITS, HAS_ZEROS)
        if BITS == 4:
            high_x = _x_tile(x_ptrs, first + HALF, offs, ok_m, IN, MASKED)
            high_zeros = _zeros_of(zeros, first + HALF, safe_rows, OUT, GROUP, GROUPS, BITS, HAS_ZEROS)
            low, high = unpack_nibbles(w, low_zeros, high_zeros, dtype)
        else:
            low = unpack_bytes(w, low_zeros, dtype)
        after = _inputs_of(tl.minimum(step + 1, end - 1), STEP, BITS, UNIT)
        next_low = _of_group(scales, after, safe_rows, OUT, GROUP, GROUPS).to(tl.float32)
        if SCALE_SUMS and GROUPS == 1:
            acc = tl.dot(low, low_x, acc)
            if BITS == 4:
                acc = tl.dot(high, high_x, acc)
        elif SCALE_SUMS:
            acc += tl.dot(low, low_x) * low_scale[:, None]
            if BITS == 4:
                acc += tl.dot(high, high_x) * high_scale[:, None]
        else:
            acc = tl.dot(low * low_scale.to(dtype)[:, None], low_x, acc)
            if BITS == 4:
                acc = tl.dot(high * high_scale.to(dtype)[:, None], high_x, acc)
        low_scale = next_low
        if BITS == 4:
            high_scale = _of_group(scales, after + HALF, safe_rows, OUT, GROUP, GROUPS).to(tl.float32)
    if SCALE_SUMS and GROUPS == 1:
        acc = acc * low_scale[:, None]
    mask = ok_o[:, None] & ok_m[None, :]
    wide_tokens = tokens.to(tl.int64)[None, :]
    if SPLITS > 1:
        tl.store(partial + (split * M + wide_tokens) * OUT + rows[:, None], acc, mask=mask)
    else:
        at = wide_tokens * OUT + rows[:, None]
        b = acc
        r = acc
        if HAS_BIAS:
            b = tl.load(bias + rows, mask=ok_o, other=0.0)[:, None]
        if HAS_RESIDUAL:
            r = tl.load(residual + at, mask=mask, other=0.0)
        tl.store(y + at, rounded(acc, b, r, HAS_BIAS, HAS_RESIDUAL, dtype), mask=mask)


@triton.jit
def dequantise_kernel(
    y, values, scales, zeros, OUT: tl.constexpr, IN: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_O: tl.constexpr, STEP: tl.constexpr, HAS_ZEROS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the weight (OUT, IN). Grid: (OUT / BLOCK_O, bytes of a row / STEP)."""
    dtype: tl.constexpr = y.dtype.element_ty
    ROW: tl.constexpr = (IN + UNIT - 1) // UNIT * UNIT * BITS // 8
    HALF: tl.constexpr = UNIT // 2
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    rows = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    step = tl.program_id(1)
    offs = tl.arange(0, STEP)
    first = _inputs_of(step, STEP, BITS, UNIT)
    ok = rows < OUT
    rows = tl.minimum(rows, OUT - 1)
    at = rows.to(tl.int64)[:, None] * IN + offs[None, :] + first
    w = load_weights(values + rows.to(tl.int64)[:, None] * ROW + step * STEP + offs[None, :], None, False)
    low_scale = _of_group(scales, first, rows, OUT, GROUP, GROUPS).to(tl.float32)[:, None]
    low_zeros = _zeros_of(zeros, first, rows, OUT, GROUP, GROUPS, BITS, HAS_ZEROS)
    await_former(PDL)  # another kernel may still read the memory of y
    mask = ok[:, None] & (first + offs < IN)[None, :]
    if BITS == 4:
        high_scale = _of_group(scales, first + HALF, rows, OUT, GROUP, GROUPS).to(tl.float32)[:, None]
        high_zeros = _zeros_of(zeros, first + HALF, rows, OUT, GROUP, GROUPS, BITS, HAS_ZEROS)
        low, high = unpack_nibbles(w, low_zeros, high_zeros, dtype)
        high_mask = ok[:, None] & (first + HALF + offs < IN)[None, :]
        tl.store(y + at + HALF, (high.to(tl.float32) * high_scale).to(dtype), mask=high_mask)
    else:
        low = unpack_bytes(w, low_zeros, dtype)
    tl.store(y + at, (low.to(tl.float32) * low_scale).to(dtype), mask=mask)
