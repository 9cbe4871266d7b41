# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The kernel of `ops.py` for one or two tokens, on the ordinary units. Shape suffixes as there."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.parts.elementwise import gate_and_up
from specbatch.kernels.triton.parts.launch import await_former
from specbatch.kernels.triton.skinny.parts import load_weights, normalised, prefetch_rows, rounded, row_scale


@triton.jit
def _pair(v):
    """Unpack two bfloat16 numbers of an int32 to float32. The first is in the lower half."""
    return (v << 16).to(tl.float32, bitcast=True), (v & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _halves(v, PACKED: tl.constexpr):
    """Return float32 numbers: the first and the second of packed pairs, or, if they are not packed, the values
    twice."""
    if PACKED:
        lo, hi = _pair(v)
    else:
        lo = v.to(tl.float32)
        hi = lo
    return lo, hi


@triton.jit
def _row_halves(
    x_row, norm_weight, scale, offs, SIZE: tl.constexpr, dtype: tl.constexpr,
    NORM: tl.constexpr, PACKED: tl.constexpr, EVEN_I: tl.constexpr,
):  # fmt: skip
    """Load a part of one row of x as `_halves` returns it. NORM: it is normalised."""
    lo, hi = _halves(tl.load(x_row + offs) if EVEN_I else tl.load(x_row + offs, mask=offs < SIZE, other=0.0), PACKED)
    if NORM:
        n_ptrs = norm_weight + offs
        n = tl.load(n_ptrs) if EVEN_I else tl.load(n_ptrs, mask=offs < SIZE, other=0.0)
        n_lo, n_hi = _halves(n, PACKED)
        lo = normalised(lo, scale, n_lo, dtype).to(tl.float32)
        hi = normalised(hi, scale, n_hi, dtype).to(tl.float32) if PACKED else lo
    return lo[None, :], hi[None, :]


@triton.jit
def _add_products(acc, w_lo, w_hi, lo, hi, PACKED: tl.constexpr, ACC_SHAPE: tl.constexpr):
    if PACKED:
        acc += w_lo * lo
        acc += w_hi * hi
    else:
        acc += tl.sum(tl.reshape(w_lo * lo, (ACC_SHAPE[0], ACC_SHAPE[1], 8)), 2)
    return acc


@triton.jit
def _fma_step(
    a0, a1, u0, u1, w, up, x0, x1, norm_weight, s0, s1, offs,
    SIZE: tl.constexpr, BLOCK_M: tl.constexpr, dtype: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    PACKED: tl.constexpr, EVEN_I: tl.constexpr, ACC_SHAPE: tl.constexpr,
):  # fmt: skip
    """Add one tile of weights (of gate and up) times one or two rows of x."""
    w_lo, w_hi = _halves(w, PACKED)
    up_lo, up_hi = _halves(up, PACKED)
    lo, hi = _row_halves(x0, norm_weight, s0, offs, SIZE, dtype, NORM, PACKED, EVEN_I)
    a0 = _add_products(a0, w_lo, w_hi, lo, hi, PACKED, ACC_SHAPE)
    if GATED:
        u0 = _add_products(u0, up_lo, up_hi, lo, hi, PACKED, ACC_SHAPE)
    if BLOCK_M > 1:
        lo, hi = _row_halves(x1, norm_weight, s1, offs, SIZE, dtype, NORM, PACKED, EVEN_I)
        a1 = _add_products(a1, w_lo, w_hi, lo, hi, PACKED, ACC_SHAPE)
        if GATED:
            u1 = _add_products(u1, up_lo, up_hi, lo, hi, PACKED, ACC_SHAPE)
    return a0, a1, u0, u1


@triton.jit
def _finish_row(
    m, acc, acc_up, y, bias, residual, offs_o, M, OUT: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Reduce and store one row of `fma_kernel`."""
    mask = offs_o < tl.where(m < M, OUT, 0)
    dtype: tl.constexpr = y.dtype.element_ty
    total = tl.sum(acc, 1)
    if GATED:
        out = gate_and_up(total, tl.sum(acc_up, 1), ACTIVATION, dtype)
    else:
        b = total
        r = total
        if HAS_BIAS:
            b = tl.load(bias + offs_o, mask=offs_o < OUT, other=0.0)
        if HAS_RESIDUAL:
            r = tl.load(residual + m * OUT + offs_o, mask=mask, other=0.0)
        out = rounded(total, b, r, HAS_BIAS, HAS_RESIDUAL, dtype)
    tl.store(y + m * OUT + offs_o, out, mask=mask)


@triton.jit(do_not_specialize=["M"])
def fma_kernel(
    y, x, weight, norm_weight, bias, residual, M, stride_x, eps,
    OUT: tl.constexpr, IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, NORM_BLOCK: tl.constexpr, EARLY: tl.constexpr,
    PREFETCH: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y (M, OUT) from x (M, IN) and weights (OUT, IN), or (2 OUT, IN) if GATED, on the ordinary units.
    Grid: OUT / BLOCK_O."""
    # bfloat16 is read as pairs in an int32, so that a number is widened by a single shift or mask, and each thread adds
    # its own columns until the end. Other types are widened by conversion, and eight neighbours are added first.
    dtype: tl.constexpr = y.dtype.element_ty
    PACKED: tl.constexpr = dtype == tl.bfloat16
    WIDTH: tl.constexpr = 2 if PACKED else 1
    SIZE: tl.constexpr = IN // WIDTH
    STEP: tl.constexpr = BLOCK_I // WIDTH
    ACC_SHAPE: tl.constexpr = (BLOCK_O, STEP if PACKED else STEP // 8)
    EVEN_I: tl.constexpr = IN % BLOCK_I == 0
    row = tl.program_id(0) * BLOCK_O
    offs_o = row + tl.arange(0, BLOCK_O)
    rows = offs_o if OUT % BLOCK_O == 0 else tl.minimum(offs_o, OUT - 1)
    cols = tl.arange(0, STEP)
    base = weight.to(tl.pointer_type(tl.int32), bitcast=True) if PACKED else weight
    w_ptrs = base + rows.to(tl.int64)[:, None] * SIZE + cols[None, :]
    if EARLY:
        first = load_weights(w_ptrs, (cols < SIZE)[None, :], not EVEN_I)
        first_up = load_weights(w_ptrs + OUT * SIZE, (cols < SIZE)[None, :], not EVEN_I) if GATED else first
    if PREFETCH > 0:
        begin: tl.constexpr = BLOCK_I if EARLY else 0
        prefetch_rows(weight, row, OUT, IN, begin, BLOCK_O, PREFETCH, THREADS)
        if GATED:
            prefetch_rows(weight + OUT * IN, row, OUT, IN, begin, BLOCK_O, PREFETCH, THREADS)
    await_former(PDL)
    # A row past M repeats the last one, and is not stored.
    x0 = x
    x1 = x + tl.minimum(1, M - 1) * stride_x
    s0 = 1.0
    s1 = 1.0
    if NORM:
        s0 = row_scale(x0, IN, eps, NORM_BLOCK)
        if BLOCK_M > 1:
            s1 = row_scale(x1, IN, eps, NORM_BLOCK)
    if PACKED:
        x0 = x0.to(tl.pointer_type(tl.int32), bitcast=True)
        x1 = x1.to(tl.pointer_type(tl.int32), bitcast=True)
        if NORM:
            norm_weight = norm_weight.to(tl.pointer_type(tl.int32), bitcast=True)
    a0 = tl.zeros(ACC_SHAPE, tl.float32)
    a1 = a0
    u0 = a0
    u1 = a0
    if EARLY:
        a0, a1, u0, u1 = _fma_step(
            a0, a1, u0, u1, first, first_up, x0, x1, norm_weight, s0, s1, cols,
            SIZE, BLOCK_M, dtype, NORM, GATED, PACKED, EVEN_I, ACC_SHAPE,
        )  # fmt: skip
    for i0 in tl.range(STEP if EARLY else 0, SIZE, STEP, num_stages=STAGES):
        offs = i0 + cols
        w = load_weights(w_ptrs + i0, (offs < SIZE)[None, :], not EVEN_I)
        up = load_weights(w_ptrs + (OUT * SIZE + i0), (offs < SIZE)[None, :], not EVEN_I) if GATED else w
        a0, a1, u0, u1 = _fma_step(
            a0, a1, u0, u1, w, up, x0, x1, norm_weight, s0, s1, offs,
            SIZE, BLOCK_M, dtype, NORM, GATED, PACKED, EVEN_I, ACC_SHAPE,
        )  # fmt: skip
    _finish_row(0, a0, u0, y, bias, residual, offs_o, M, OUT, GATED, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)
    if BLOCK_M > 1:
        _finish_row(1, a1, u1, y, bias, residual, offs_o, M, OUT, GATED, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)
