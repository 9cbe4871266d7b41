# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Matrix products of few rows, bound by reading the weights, with what surrounds them: norm, bias, residual, gate.

A program owns `block_o` rows of the weight and streams them once, in steps of `block_i` input features and in that
order, so that a row's bits depend on the configuration (`linear_config.Config`) and never on the other rows. Sums over
parts of the input features (`splits`) are added in fixed order by a second kernel; there are no atomics.

Programmatic dependent launch (`Config.pdl`): a program lets the next kernel start at once, reads its first weights
(`early`, `prefetch`), and only then waits (`gdc_wait`) until the kernel before it is complete. Nothing but weights,
which never change, is read before that, and nothing is written. Since each waits, a kernel's end implies the end of all
before it.

The operations of the same names in `kernels.torch_linear` say what is computed. Whether a product is one for this
module says `linear_config.is_skinny`; its configuration comes from `linear_config.config_for` unless one is given.

Shape suffixes: M rows, E hidden size (input of a norm), I input features, O output features, S splits.
In kernels, where sizes are names by themselves: OUT and IN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specbatch.kernels.launch import await_former, has_dependent_launch, launch_options
from specbatch.kernels.linear_config import Config, config_for, without_hopper

_COMBINE_BLOCK = 512  # output features of one program that sums splits


@triton.jit
def _prefetch_rows(
    weight, row, OUT, IN: tl.constexpr, i0, BLOCK_O: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr
):
    """Asks PREFETCH elements of each of BLOCK_O rows of the weight, from column i0 on, into L2: a row per thread."""
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
def _normalised(x, scale, weight, dtype: tl.constexpr):
    """x * scale rounded to dtype, times the norm's weight, rounded again; all in float32 but the result."""
    return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype)


@triton.jit
def _row_scale(x_row, IN: tl.constexpr, eps, BLOCK: tl.constexpr):
    """1 / root mean square of one row, a scalar."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for i0 in tl.static_range(0, IN, BLOCK):
        offs = i0 + tl.arange(0, BLOCK)
        v = tl.load(x_row + offs, mask=offs < IN, other=0.0).to(tl.float32)
        squares += v * v
    return tl.rsqrt(tl.sum(squares, 0) / IN + eps)


@triton.jit
def _rounded(acc, bias, residual, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, dtype: tl.constexpr):
    """A sum as stored: + bias, rounded, + residual, rounded."""
    if HAS_BIAS:
        acc += bias.to(tl.float32)
    y = acc.to(dtype)
    if HAS_RESIDUAL:
        y = (residual.to(tl.float32) + y.to(tl.float32)).to(dtype)
    return y


@triton.jit
def _gate(gate, up, dtype: tl.constexpr):
    """silu(gate) * up with every step rounded."""
    g = gate.to(dtype).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    return (silu * up.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def _pair(v):
    """Two bfloat16 in an int32, the first in the lower half: as float32."""
    return (v << 16).to(tl.float32, bitcast=True), (v & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _load(ptrs, mask, MASKED: tl.constexpr):
    """Weights, each read once."""
    if MASKED:
        v = tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        v = tl.load(ptrs, eviction_policy="evict_first")
    return v


@triton.jit
def _halves(v, PACKED: tl.constexpr):
    """In float32: of packed pairs the first and the second of each, otherwise the values twice."""
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
    """Part of one row of x as `_halves`, normalised if asked for."""
    lo, hi = _halves(tl.load(x_row + offs) if EVEN_I else tl.load(x_row + offs, mask=offs < SIZE, other=0.0), PACKED)
    if NORM:
        n_ptrs = norm_weight + offs
        n = tl.load(n_ptrs) if EVEN_I else tl.load(n_ptrs, mask=offs < SIZE, other=0.0)
        n_lo, n_hi = _halves(n, PACKED)
        lo = _normalised(lo, scale, n_lo, dtype).to(tl.float32)
        hi = _normalised(hi, scale, n_hi, dtype).to(tl.float32) if PACKED else lo
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
    """Adds the products of one tile of weights (of gate and up) with one or two rows of x."""
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
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Reduces and stores one row of `_fma_kernel`."""
    mask = offs_o < tl.where(m < M, OUT, 0)
    dtype: tl.constexpr = y.dtype.element_ty
    total = tl.sum(acc, 1)
    if GATED:
        out = _gate(total, tl.sum(acc_up, 1), dtype)
    else:
        b = total
        r = total
        if HAS_BIAS:
            b = tl.load(bias + offs_o, mask=offs_o < OUT, other=0.0)
        if HAS_RESIDUAL:
            r = tl.load(residual + m * OUT + offs_o, mask=mask, other=0.0)
        out = _rounded(total, b, r, HAS_BIAS, HAS_RESIDUAL, dtype)
    tl.store(y + m * OUT + offs_o, out, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _fma_kernel(
    y, x, weight, norm_weight, bias, residual, M, stride_x, eps,
    OUT: tl.constexpr, IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    NORM_BLOCK: tl.constexpr, EARLY: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y (M, OUT) from x (M, IN) and weights (OUT, IN), or (2 OUT, IN) if GATED, on the ordinary units.
    Grid: OUT / BLOCK_O."""
    # bfloat16 is read as pairs in an int32: widening one is then a single shift or mask, and each thread adds up its
    # own columns until the end. Other types are widened by conversion, and eight neighbours are added up first.
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
        first = _load(w_ptrs, (cols < SIZE)[None, :], not EVEN_I)
        first_up = _load(w_ptrs + OUT * SIZE, (cols < SIZE)[None, :], not EVEN_I) if GATED else first
    if PREFETCH > 0:
        begin: tl.constexpr = BLOCK_I if EARLY else 0
        _prefetch_rows(weight, row, OUT, IN, begin, BLOCK_O, PREFETCH, THREADS)
        if GATED:
            _prefetch_rows(weight + OUT * IN, row, OUT, IN, begin, BLOCK_O, PREFETCH, THREADS)
    await_former(PDL)
    # A row past M is the last one again, and not stored.
    x0 = x
    x1 = x + tl.minimum(1, M - 1) * stride_x
    s0 = 1.0
    s1 = 1.0
    if NORM:
        s0 = _row_scale(x0, IN, eps, NORM_BLOCK)
        if BLOCK_M > 1:
            s1 = _row_scale(x1, IN, eps, NORM_BLOCK)
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
        w = _load(w_ptrs + i0, (offs < SIZE)[None, :], not EVEN_I)
        up = _load(w_ptrs + (OUT * SIZE + i0), (offs < SIZE)[None, :], not EVEN_I) if GATED else w
        a0, a1, u0, u1 = _fma_step(
            a0, a1, u0, u1, w, up, x0, x1, norm_weight, s0, s1, offs,
            SIZE, BLOCK_M, dtype, NORM, GATED, PACKED, EVEN_I, ACC_SHAPE,
        )  # fmt: skip
    _finish_row(0, a0, u0, y, bias, residual, offs_o, M, OUT, GATED, HAS_BIAS, HAS_RESIDUAL)
    if BLOCK_M > 1:
        _finish_row(1, a1, u1, y, bias, residual, offs_o, M, OUT, GATED, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _row_scales(x, M, stride_x, IN: tl.constexpr, eps, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """1 / root mean square of each row, (BLOCK_M,)."""
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
    """Columns `offs` of x, transposed, normalised if asked for."""
    v = tl.load(x_ptrs, mask=mask_m & (offs < IN)[:, None] if MASKED else mask_m, other=0.0)
    if NORM:
        n = tl.load(norm_weight + offs, mask=offs < IN, other=0.0) if MASKED else tl.load(norm_weight + offs)
        v = _normalised(v.to(tl.float32), scale[None, :], n.to(tl.float32)[:, None], dtype)
    return v


@triton.jit(do_not_specialize=["M"])
def _dot_kernel(
    y, x, weight, operand, norm_weight, bias, residual, partial, M, stride_x, eps,
    OUT: tl.constexpr, IN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, TMA: tl.constexpr, NORM_BLOCK: tl.constexpr, EARLY: tl.constexpr,
    PREFETCH: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y (M, OUT), or its parts `partial` (S, M, OUT) if SPLITS > 1, on the tensor cores: the tile of weights is the
    first operand, x transposed the second. `operand` describes the weight if TMA. Grid: OUT / BLOCK_O * SPLITS;
    neighbours share a tile."""
    dtype: tl.constexpr = y.dtype.element_ty
    STEPS: tl.constexpr = (IN + BLOCK_I - 1) // BLOCK_I
    STEPS_PER_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    MASKED: tl.constexpr = IN % BLOCK_I != 0
    row = tl.program_id(0) // SPLITS * BLOCK_O
    split = tl.program_id(0) % SPLITS
    begin = 0 if SPLITS == 1 else split * STEPS_PER_SPLIT
    end = STEPS if SPLITS == 1 else tl.minimum(begin + STEPS_PER_SPLIT, STEPS)
    cols = tl.arange(0, BLOCK_I)
    # Rows of gate, then the same rows of up: one operand.
    ROWS: tl.constexpr = 2 * BLOCK_O if GATED else BLOCK_O
    local = tl.arange(0, ROWS)
    rows = row + local % BLOCK_O
    if OUT % BLOCK_O != 0:
        rows = tl.minimum(rows, OUT - 1)
    rows += (local // BLOCK_O) * OUT
    w_ptrs = weight + rows.to(tl.int64)[:, None] * IN + cols[None, :]
    offs = begin * BLOCK_I + cols
    if EARLY:
        first = _load(w_ptrs + begin * BLOCK_I, (offs < IN)[None, :], MASKED or SPLITS > 1)
    if PREFETCH > 0:
        i0 = (begin + 1 if EARLY else begin) * BLOCK_I
        _prefetch_rows(weight, row, OUT, IN, i0, BLOCK_O, PREFETCH, THREADS)
        if GATED:
            _prefetch_rows(weight + OUT * IN, row, OUT, IN, i0, BLOCK_O, PREFETCH, THREADS)
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
            w = _load(w_ptrs + i0, (i0 + cols < IN)[None, :], MASKED)
        v = _x_tile(x_ptrs + i0, norm_weight, scale, i0 + cols, mask_m, IN, dtype, NORM, MASKED)
        acc = tl.dot(w, v, acc, input_precision="ieee")
    if EARLY:  # last, so that the loop's first loads need not wait for x
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
            tl.store(y + at, _gate(gate, up, dtype), mask=mask)
        else:
            b = acc
            r = acc
            if HAS_BIAS:
                b = tl.load(bias + offs_o, mask=offs_o < OUT, other=0.0)[:, None]
            if HAS_RESIDUAL:
                r = tl.load(residual + at, mask=mask, other=0.0)
            tl.store(y + at, _rounded(acc, b, r, HAS_BIAS, HAS_RESIDUAL, dtype), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _combine_kernel(
    y, partial, bias, residual, M, OUT: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums `partial` (S, M, OUT), or (S, M, 2, OUT) if GATED, over its splits in order. Grid: (M, OUT / BLOCK)."""
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
        out = _gate(acc, up, dtype)
    else:
        b = acc
        r = acc
        if HAS_BIAS:
            b = tl.load(bias + offs, mask=mask, other=0.0)
        if HAS_RESIDUAL:
            r = tl.load(residual + m * OUT + offs, mask=mask, other=0.0)
        out = _rounded(acc, b, r, HAS_BIAS, HAS_RESIDUAL, dtype)
    tl.store(y + m * OUT + offs, out, mask=mask)


@triton.jit
def _norm_kernel(y, x, weight, stride_x, eps, IN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Root-mean-square norm of one row of x (M, IN). Grid: M."""
    m = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < IN
    n = tl.load(weight + offs, mask=mask, other=0.0)
    await_former(PDL)
    wide = tl.load(x + m * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / IN + eps)
    tl.store(y + m * IN + offs, _normalised(wide, scale, n.to(tl.float32), y.dtype.element_ty), mask=mask)


def rms_norm(x_ME: Tensor, weight_E: Tensor, eps: float, pdl: bool = False) -> Tensor:
    """Root-mean-square norm of any number of rows, as `torch_linear.rms_norm`. Returns (M, E)."""
    num_rows, size = x_ME.shape
    y_ME = torch.empty((num_rows, size), dtype=x_ME.dtype, device=x_ME.device)
    block = triton.next_power_of_2(size)
    _norm_kernel[(num_rows,)](
        y_ME, x_ME, weight_E, x_ME.stride(0), eps, IN=size, BLOCK=block, PDL=pdl,
        num_warps=min(max(block // 512, 1), 16), **launch_options(pdl),
    )  # fmt: skip
    return y_ME


def linear(
    x_MI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """x W^T + bias, rounded to x's dtype, then + residual, rounded again. Returns (M, O)."""
    config = config or _config(x_MI, weight_OI)
    return _product(x_MI, None, 0.0, weight_OI, bias_O, residual_MO, False, config)


def norm_linear(
    x_ME: Tensor,
    norm_weight_E: Tensor,
    eps: float,
    weight_OE: Tensor,
    bias_O: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """linear(rms_norm(x)). Returns (M, O)."""
    config = config or _config(x_ME, weight_OE)
    return _product(x_ME, norm_weight_E, eps, weight_OE, bias_O, None, False, config)


def gated_linear(x_ME: Tensor, gate_up_2IE: Tensor, config: Config | None = None) -> Tensor:
    """silu(x G^T) * (x U^T), each step rounded to x's dtype; rows [0, I) of the weight are the gate. Returns (M, I)."""
    config = config or _config(x_ME, gate_up_2IE)
    return _product(x_ME, None, 0.0, gate_up_2IE, None, None, True, config)


def norm_gated_linear(
    x_ME: Tensor, norm_weight_E: Tensor, eps: float, gate_up_2IE: Tensor, config: Config | None = None
) -> Tensor:
    """gated_linear(rms_norm(x)). Returns (M, I)."""
    config = config or _config(x_ME, gate_up_2IE)
    return _product(x_ME, norm_weight_E, eps, gate_up_2IE, None, None, True, config)


def _config(x_MI: Tensor, weight_OI: Tensor) -> Config:
    config = config_for(x_MI.shape[0], weight_OI.shape[0], weight_OI.shape[1], x_MI.dtype)
    is_hopper = x_MI.is_cuda and has_dependent_launch(x_MI.get_device())
    return config if is_hopper else without_hopper(config)


def _product(
    x_MI: Tensor,
    norm_weight_I: Tensor | None,
    eps: float,
    weight: Tensor,  # (O, I), or (2 O, I) if gated
    bias_O: Tensor | None,
    residual_MO: Tensor | None,
    gated: bool,
    config: Config,
) -> Tensor:
    num_rows, size = x_MI.shape
    assert num_rows <= config.block_m, (num_rows, config)
    assert weight.shape[1] == size, (x_MI.shape, weight.shape)
    assert x_MI.stride(1) == 1, x_MI.stride()
    assert num_rows == 1 or x_MI.stride(0) % 8 == 0, x_MI.stride()  # rows begin at 16 bytes
    assert weight.is_contiguous(), weight.stride()
    assert residual_MO is None or residual_MO.is_contiguous()
    num_out = weight.shape[0] // 2 if gated else weight.shape[0]
    if norm_weight_I is not None and not config.fuse_norm:
        x_MI, norm_weight_I = rms_norm(x_MI, norm_weight_I, eps, config.pdl), None
    y_MO = torch.empty((num_rows, num_out), dtype=x_MI.dtype, device=x_MI.device)
    block_o = config.block_o // 2 if gated else config.block_o
    block_i = min(config.block_i, triton.next_power_of_2(size))
    tiles = triton.cdiv(num_out, block_o)
    threads = 32 * config.num_warps
    prefetch = config.prefetch
    if (prefetch + (block_i if config.early else 0)) * config.splits > size:  # past the last row's end
        prefetch = 0
    norm_block = min(triton.next_power_of_2(size), 64 * threads // config.block_m if config.kind == "dot" else 4096)
    options = launch_options(config.pdl)
    if config.kind == "fma":
        _fma_kernel[(tiles,)](
            y_MO, x_MI, weight, norm_weight_I, bias_O, residual_MO, num_rows, x_MI.stride(0), eps,
            OUT=num_out, IN=size, BLOCK_M=config.block_m, BLOCK_O=block_o, BLOCK_I=block_i,
            STAGES=config.num_stages, NORM=norm_weight_I is not None, GATED=gated, HAS_BIAS=bias_O is not None,
            HAS_RESIDUAL=residual_MO is not None, NORM_BLOCK=norm_block, EARLY=config.early, PREFETCH=prefetch,
            THREADS=threads, PDL=config.pdl, num_warps=config.num_warps, **options,
        )  # fmt: skip
        return y_MO
    parts = 2 if gated else 1
    partial = None
    if config.splits > 1:
        partial = torch.empty((config.splits, num_rows, parts * num_out), dtype=torch.float32, device=x_MI.device)
    operand = None
    if config.tma and gated:
        operand = TensorDescriptor.from_tensor(weight.view(2, num_out, size), [2, block_o, block_i])
    elif config.tma:
        operand = TensorDescriptor.from_tensor(weight, [block_o, block_i])
    _dot_kernel[(tiles * config.splits,)](
        y_MO, x_MI, weight, operand, norm_weight_I, bias_O, residual_MO, partial, num_rows, x_MI.stride(0), eps,
        OUT=num_out, IN=size, BLOCK_M=config.block_m, BLOCK_O=block_o, BLOCK_I=block_i,
        STAGES=config.num_stages, SPLITS=config.splits, NORM=norm_weight_I is not None, GATED=gated,
        HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_MO is not None, TMA=config.tma, NORM_BLOCK=norm_block,
        EARLY=config.early, PREFETCH=prefetch, THREADS=threads, PDL=config.pdl, num_warps=config.num_warps, **options,
    )  # fmt: skip
    if partial is not None:
        _combine_kernel[(num_rows, triton.cdiv(num_out, _COMBINE_BLOCK))](
            y_MO, partial, bias_O, residual_MO, num_rows, OUT=num_out, SPLITS=config.splits, GATED=gated,
            HAS_BIAS=bias_O is not None, HAS_RESIDUAL=residual_MO is not None, BLOCK=_COMBINE_BLOCK, PDL=config.pdl,
            num_warps=4, **options,
        )  # fmt: skip
    return y_MO
