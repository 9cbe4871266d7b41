# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The kernels of `ops.py` for 2 to 128 tokens, on the tensor cores. Shape suffixes as there."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.parts.elementwise import gate_and_up
from specbatch.kernels.triton.parts.launch import await_former
from specbatch.kernels.triton.skinny.parts import load_weights, normalised, prefetch_rows, rounded


@triton.jit
def _row_scales(x, M, stride_x, IN: tl.constexpr, eps, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Return 1 / root mean square of each row, (BLOCK_M,)."""
    offs_m = tl.arange(0, BLOCK_M)
    squares = tl.zeros((BLOCK_M, BLOCK), tl.float32)
    for i0 in tl.range(0, IN, BLOCK, num_stages=2):
        offs = i0 + tl.arange(0, BLOCK)
        mask = (offs_m < M)[:, None] & (offs < IN)[None, :]
        v = tl.load(x + offs_m[:, None] * stride_x + offs[None, :], mask=mask, other=0.0).to(tl.float32)
        squares += v * v
    return tl.rsqrt(tl.sum(squares, 1) / IN + eps)


@triton.jit
def _x_tile(
    x_ptrs, norm_weight, scale, offs, mask_m, IN: tl.constexpr, dtype: tl.constexpr, NORM: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load columns `offs` of x, transposed. NORM: they are normalised."""
    v = tl.load(x_ptrs, mask=mask_m & (offs < IN)[:, None] if MASKED else mask_m, other=0.0)
    if NORM:
        n = tl.load(norm_weight + offs, mask=offs < IN, other=0.0) if MASKED else tl.load(norm_weight + offs)
        v = normalised(v.to(tl.float32), scale[None, :], n.to(tl.float32)[:, None], dtype)
    return v


@triton.jit(do_not_specialize=["M"])
def dot_kernel(
    y, x, weight, operand, norm_weight, bias, residual, partial, M, stride_x, eps,
    OUT: tl.constexpr, IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TMA: tl.constexpr, NORM_BLOCK: tl.constexpr,
    EARLY: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y (M, OUT), or its parts `partial` (S, M, OUT) if SPLITS > 1, on the tensor cores. The tile of weights is
    the first operand, and x transposed is the second. `operand`: the descriptor of the weight if TMA. Grid: OUT /
    BLOCK_O * SPLITS; neighbours share a tile."""
    dtype: tl.constexpr = y.dtype.element_ty
    STEPS: tl.constexpr = (IN + BLOCK_I - 1) // BLOCK_I
    STEPS_PER_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    MASKED: tl.constexpr = IN % BLOCK_I != 0
    row = tl.program_id(0) // SPLITS * BLOCK_O
    split = tl.program_id(0) % SPLITS
    begin = 0 if SPLITS == 1 else split * STEPS_PER_SPLIT
    end = STEPS if SPLITS == 1 else tl.minimum(begin + STEPS_PER_SPLIT, STEPS)
    cols = tl.arange(0, BLOCK_I)
    # The operand has rows of gate, then the same rows of up.
    ROWS: tl.constexpr = 2 * BLOCK_O if GATED else BLOCK_O
    local = tl.arange(0, ROWS)
    rows = row + local % BLOCK_O
    if OUT % BLOCK_O != 0:
        rows = tl.minimum(rows, OUT - 1)
    rows += (local // BLOCK_O) * OUT
    w_ptrs = weight + rows.to(tl.int64)[:, None] * IN + cols[None, :]
    offs = begin * BLOCK_I + cols
    if EARLY:
        first = load_weights(w_ptrs + begin * BLOCK_I, (offs < IN)[None, :], MASKED or SPLITS > 1)
    if PREFETCH > 0:
        i0 = (begin + 1 if EARLY else begin) * BLOCK_I
        prefetch_rows(weight, row, OUT, IN, i0, BLOCK_O, PREFETCH, THREADS)
        if GATED:
            prefetch_rows(weight + OUT * IN, row, OUT, IN, i0, BLOCK_O, PREFETCH, THREADS)
    await_former(PDL)
    scale = tl.zeros((BLOCK_M,), tl.float32)
    if NORM:
        scale = _row_scales(x, M, stride_x, IN, eps, BLOCK_M, NORM_BLOCK)
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = (offs_m < M)[None, :]
    x_ptrs = x + offs_m[None, :] * stride_x + cols[:, None]
    if EARLY:
        first_x = _x_tile(
            x_ptrs + begin * BLOCK_I, norm_weight, scale, offs, mask_m, IN, dtype, NORM, MASKED or SPLITS > 1
        )
    acc = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for step in tl.range(begin + 1 if EARLY else begin, end, num_stages=STAGES):
        i0 = step * BLOCK_I
        if TMA:
            w = operand.load([0, row, i0]).reshape(ROWS, BLOCK_I) if GATED else operand.load([row, i0])
        else:
            w = load_weights(w_ptrs + i0, (i0 + cols < IN)[None, :], MASKED)
        v = _x_tile(x_ptrs + i0, norm_weight, scale, i0 + cols, mask_m, IN, dtype, NORM, MASKED)
        acc = tl.dot(w, v, acc, input_precision="ieee")
    if EARLY:  # done last, so that the loop's first loads need not wait for x
        acc = tl.dot(first, first_x, acc, input_precision="ieee")
    offs_o = row + tl.arange(0, BLOCK_O)
    if SPLITS > 1:
        # (S, M, OUT), or (S, M, 2, OUT) if gated
        PARTS: tl.constexpr = 2 if GATED else 1
        at = (split * M + offs_m[None, :]) * (PARTS * OUT) + rows[:, None]
        inside = (row + local % BLOCK_O < OUT)[:, None]
        tl.store(partial + at, acc, mask=mask_m & inside)
    else:
        at = offs_m[None, :] * OUT + offs_o[:, None]
        mask = mask_m & (offs_o < OUT)[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_O, BLOCK_M)), (1, 2, 0)))
            tl.store(y + at, gate_and_up(gate, up, ACTIVATION, dtype), mask=mask)
        else:
            b = acc
            r = acc
            if HAS_BIAS:
                b = tl.load(bias + offs_o, mask=offs_o < OUT, other=0.0)[:, None]
            if HAS_RESIDUAL:
                r = tl.load(residual + at, mask=mask, other=0.0)
            tl.store(y + at, rounded(acc, b, r, HAS_BIAS, HAS_RESIDUAL, dtype), mask=mask)


@triton.jit(do_not_specialize=["M"])
def combine_kernel(
    y, partial, bias, residual, M, OUT: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum `partial` (S, M, OUT), or (S, M, 2, OUT) if GATED, over its splits in order. Grid: (M, OUT / BLOCK)."""
    m = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < OUT
    PARTS: tl.constexpr = 2 if GATED else 1
    dtype: tl.constexpr = y.dtype.element_ty
    await_former(PDL)
    acc = tl.zeros((BLOCK,), tl.float32)
    up = acc
    for s in tl.static_range(SPLITS):
        at = (s * M + m) * (PARTS * OUT) + offs
        acc += tl.load(partial + at, mask=mask, other=0.0)
        if GATED:
            up += tl.load(partial + at + OUT, mask=mask, other=0.0)
    if GATED:
        out = gate_and_up(acc, up, ACTIVATION, dtype)
    else:
        b = acc
        r = acc
        if HAS_BIAS:
            b = tl.load(bias + offs, mask=mask, other=0.0)
        if HAS_RESIDUAL:
            r = tl.load(residual + m * OUT + offs, mask=mask, other=0.0)
        out = rounded(acc, b, r, HAS_BIAS, HAS_RESIDUAL, dtype)
    tl.store(y + m * OUT + offs, out, mask=mask)
