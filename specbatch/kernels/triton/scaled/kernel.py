# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The GEMM of `ops.py`, on the tensor cores. Shape suffixes as there."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.parts.launch import await_former
from specbatch.kernels.triton.skinny.parts import load_weights, prefetch_rows, rounded

_GROUP_TILES = tl.constexpr(16)  # tiles of tokens whose inputs stay in L2 while weights are read


@triton.jit(do_not_specialize=["M"])
def scaled_kernel(
    y, x, x_scale, weight, operand, weight_scale, bias, residual, partial, M,
    OUT: tl.constexpr, IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, GROUPED: tl.constexpr, IMPRECISE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TMA: tl.constexpr, PREFETCH: tl.constexpr,
    THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y (M, OUT), or its parts `partial` (S, M, OUT) if SPLITS > 1. The tile of weights is the first operand,
    and x transposed is the second. Hopper's tensor cores add FP8 with about 14 bits: they add IMPRECISE input features
    in this way, and these sums are added in float32. GROUPED: a scale belongs to BLOCK_I input features. Grid: (tiles
    of outputs x tiles of tokens, SPLITS)."""
    STEPS: tl.constexpr = (IN + BLOCK_I - 1) // BLOCK_I
    STEPS_PER_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    MASKED: tl.constexpr = IN % BLOCK_I != 0
    TILES_O: tl.constexpr = (OUT + BLOCK_O - 1) // BLOCK_O
    # Programs go over groups of tiles of tokens, and in a group over one tile of weights after the other.
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    first = tl.program_id(0) // (_GROUP_TILES * TILES_O) * _GROUP_TILES
    in_group = tl.minimum(tiles_m - first, _GROUP_TILES)
    within = tl.program_id(0) % (_GROUP_TILES * TILES_O)
    token = (first + within % in_group) * BLOCK_M
    row = within // in_group * BLOCK_O
    split = tl.program_id(1)
    begin = 0 if SPLITS == 1 else split * STEPS_PER_SPLIT
    end = STEPS if SPLITS == 1 else tl.minimum(begin + STEPS_PER_SPLIT, STEPS)
    cols = tl.arange(0, BLOCK_I)
    rows = row + tl.arange(0, BLOCK_O)
    ok_o = rows < OUT
    safe_rows = rows if OUT % BLOCK_O == 0 else tl.minimum(rows, OUT - 1)
    w_ptrs = weight + safe_rows.to(tl.int64)[:, None] * IN + cols[None, :]
    if PREFETCH > 0:
        prefetch_rows(weight, row, OUT, IN, begin * BLOCK_I, BLOCK_O, PREFETCH, THREADS)
    if not GROUPED:
        of_outputs = tl.load(weight_scale + safe_rows)
    await_former(PDL)
    tokens = token + tl.arange(0, BLOCK_M)
    ok_m = tokens < M
    wide_tokens = tokens.to(tl.int64)
    x_ptrs = x + wide_tokens[None, :] * IN + cols[:, None]
    acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        i0 = step * BLOCK_I
        if TMA:  # noqa: SIM108
            w = operand.load([row, i0])
        else:
            w = load_weights(w_ptrs + i0, (i0 + cols < IN)[None, :], MASKED)
        ok_x = ok_m[None, :] & (i0 + cols < IN)[:, None] if MASKED else ok_m[None, :]
        v = tl.load(x_ptrs + i0, mask=ok_x, other=0.0)
        if GROUPED:
            of_outputs = tl.load(weight_scale + safe_rows * STEPS + step)
            of_tokens = tl.load(x_scale + wide_tokens * STEPS + step, mask=ok_m, other=0.0)
            acc += tl.dot(w, v) * of_tokens[None, :] * of_outputs[:, None]
        elif IMPRECISE > 0:
            acc = tl.dot(w, v, acc, max_num_imprecise_acc=IMPRECISE)
        else:
            acc = tl.dot(w, v, acc)
    if not GROUPED:
        acc = acc * tl.load(x_scale + tokens, mask=ok_m, other=0.0)[None, :] * of_outputs[:, None]
    mask = ok_o[:, None] & ok_m[None, :]
    if SPLITS > 1:
        tl.store(partial + (split * M + wide_tokens[None, :]) * OUT + rows[:, None], acc, mask=mask)
    else:
        at = wide_tokens[None, :] * OUT + rows[:, None]
        b = acc
        r = acc
        if HAS_BIAS:
            b = tl.load(bias + rows, mask=ok_o, other=0.0)[:, None]
        if HAS_RESIDUAL:
            r = tl.load(residual + at, mask=mask, other=0.0)
        tl.store(y + at, rounded(acc, b, r, HAS_BIAS, HAS_RESIDUAL, y.dtype.element_ty), mask=mask)
