# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The shared parts of the kernels of `ops.py`: weights that are read once, norms, and the roundings around a GEMM.

Shape suffixes as in `ops.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_rows(
    weight, row, OUT, IN: tl.constexpr, i0, BLOCK_O: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr
):
    """Load PREFETCH elements of each of BLOCK_O rows of the weight, from column i0 on, into L2, with one row for each
    thread."""
    LANES: tl.constexpr = THREADS if THREADS > BLOCK_O else BLOCK_O
    lane = tl.arange(0, LANES)
    rows = tl.minimum(row + lane % BLOCK_O, OUT - 1).to(tl.int64)
    num_bytes = tl.full((LANES,), PREFETCH * (weight.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $3, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r",
        [weight + rows * IN + i0, num_bytes, (lane < BLOCK_O).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def row_scale(x_row, IN: tl.constexpr, eps, BLOCK: tl.constexpr):
    """Return 1 / root mean square of one row, a scalar."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for i0 in tl.static_range(0, IN, BLOCK):
        offs = i0 + tl.arange(0, BLOCK)
        v = tl.load(x_row + offs, mask=offs < IN, other=0.0).to(tl.float32)
        squares += v * v
    return tl.rsqrt(tl.sum(squares, 0) / IN + eps)


@triton.jit
def normalised(x, scale, weight, dtype: tl.constexpr):
    """Return x * scale rounded to dtype, times the norm's weight, rounded again; all in float32 but the result."""
    return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype)


@triton.jit
def rounded(acc, bias, residual, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, dtype: tl.constexpr):
    """Return a sum as it is stored: + bias, rounded, + residual, rounded."""
    if HAS_BIAS:
        acc += bias.to(tl.float32)
    y = acc.to(dtype)
    if HAS_RESIDUAL:
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(dtype)
    return y


@triton.jit
def load_weights(ptrs, mask, MASKED: tl.constexpr):
    """Load weights, each of which is read once."""
    if MASKED:
        v = tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        v = tl.load(ptrs, eviction_policy="evict_first")
    return v
