# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The kernel of `ops.py` for few tokens: weights of 4 bits go from memory to registers. Shape suffixes as there.

Each warp of a program sums every WARPS-th unit of 256 inputs (64 words of a row, see `kernels/integers.py`), and the
sums of the warps are added at the end. A lane loads 16 bytes of a row: 8 words, of which part j has 8 neighbouring
inputs. Tensor cores may multiply the inputs in any order, if both operands have the same one. So an operand has them in
the order in which lanes have loaded them, and no number moves between lanes. Zero points differ from 8 by a number that
multiplies the sum of the inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.integers.parts import prefetch_groups, store_sums
from specbatch.kernels.triton.parts.integers import unpack_nibbles
from specbatch.kernels.triton.parts.launch import await_former
from specbatch.kernels.triton.skinny.parts import load_weights, normalised, prefetch_rows, row_scale


@triton.jit
def _load_pairs(w_ptrs, unit, half: tl.constexpr, mask, MASKED: tl.constexpr):
    """Load pairs of words of half a unit, (BLOCK_O / 8 * WARPS, 128). `unit`: that of each line."""
    return load_weights(w_ptrs + (unit * 32 + half * 16)[:, None], mask, MASKED)


@triton.jit
def _words_of(pairs):
    """Return pairs of words (N, 128) as words (N, 256). No bit moves."""
    words = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(words, (pairs.shape[0], 2 * pairs.shape[1]))


@triton.jit
def _w_operand(part, WARPS: tl.constexpr, BLOCK_O: tl.constexpr):
    """Return a part of half a unit, (BLOCK_O / 8 * WARPS, 256), as an operand (WARPS, BLOCK_O, 32)."""
    # The dimensions are rows / 8, warp, row, lane of a row, and bits of the word: half of the operand's inputs, half of
    # 16 inputs, input of a pair.
    apart = tl.reshape(part, (BLOCK_O // 8, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(apart, (1, 0, 2, 4, 5, 3, 6)), (WARPS, BLOCK_O, 32))


@triton.jit
def _x_operand(
    x_ptrs, inputs, first: tl.constexpr, IN: tl.constexpr, WARPS: tl.constexpr, BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load 32 inputs of each token and unit, (WARPS, 32, BLOCK_M). `first`: the first of them in the unit."""
    v = tl.load(x_ptrs + first, mask=inputs + first < IN, other=0.0) if MASKED else tl.load(x_ptrs + first)
    apart = tl.reshape(v, (BLOCK_M // 8, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(apart, (1, 4, 5, 3, 6, 0, 2)), (WARPS, 32, BLOCK_M))


@triton.jit
def _normed_operand(
    x, norm_weight, scale, inputs, first: tl.constexpr, dtype: tl.constexpr, IN: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load 128 inputs of the only token of each unit, normed. Each one is normed once, and then copied to the lanes
    that multiply it."""
    at = inputs + first
    if MASKED:
        v = tl.load(x + at, mask=at < IN, other=0.0)
        n = tl.load(norm_weight + at, mask=at < IN, other=0.0)
    else:
        v = tl.load(x + at)
        n = tl.load(norm_weight + at)
    v = normalised(v.to(tl.float32), scale, n.to(tl.float32), dtype)
    apart = tl.permute(tl.reshape(v, (WARPS, 4, 4, 2, 2, 2)), (0, 1, 3, 4, 2, 5))
    return tl.broadcast_to(tl.reshape(apart, (WARPS, 128))[:, :, None], (WARPS, 128, BLOCK_M))


@triton.jit
def _joined(one, other):
    """Return two operands of weights as one with the inputs of both. No number moves."""
    joined = tl.permute(tl.join(one, other), (0, 1, 3, 2))
    return tl.reshape(joined, (one.shape[0], one.shape[1], 2 * one.shape[2]))


@triton.jit
def _rows_of(local, row, OUT: tl.constexpr, OUTPUTS: tl.constexpr):
    """Return rows of the weight, of which a program has outputs from `row` on; then those of up after those of gate."""
    rows = row + local % OUTPUTS
    return (rows if OUT % OUTPUTS == 0 else tl.minimum(rows, OUT - 1)) + local // OUTPUTS * OUT


@triton.jit
def _fixed(w):
    """Return the operand. Triton does not look past this function for the types from which numbers were made: it would
    arrange operands by them."""
    if _IS_COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=w.dtype, is_pure=False, pack=2)
    return w


_IS_COMPILED = tl.constexpr(isinstance(_fixed, triton.JITFunction))  # the interpreter has no assembler


@triton.jit
def _of_group(
    pointer, unit, first: tl.constexpr, row, OUT: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_O: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Load the scales or zero points (WARPS, BLOCK_O) of an input of each unit, as float32. They are those of rows from
    LOCAL on of the program. A load of 16 rows has fewer elements than threads, so Triton loads them where they are
    used. Larger ones go through shared memory."""
    if BLOCK_O > 16:
        HALF: tl.constexpr = BLOCK_O // 2
        one = _of_group(pointer, unit, first, row, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, HALF, LOCAL)
        other = _of_group(pointer, unit, first, row, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, HALF, LOCAL + HALF)
        return tl.reshape(tl.permute(tl.join(one, other), (0, 2, 1)), (one.shape[0], BLOCK_O))
    else:
        rows = _rows_of(LOCAL + tl.arange(0, BLOCK_O), row, OUT, OUTPUTS)
        group = tl.minimum((unit * 256 + first) // GROUP, GROUPS - 1) if GROUPS > 1 else unit * 0
        return tl.load(pointer + (group * WIDTH)[:, None] + rows[None, :]).to(tl.float32)


@triton.jit
def _add(
    acc, sums, x_sums, w, v, scales, zeros, unit, row, first: tl.constexpr, OUT: tl.constexpr, OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SUB: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Add operands to the sums of their group. After the last ones of SUB inputs, add these to `acc`."""
    BLOCK_O: tl.constexpr = w.shape[1]
    w = _fixed(w)
    is_first: tl.constexpr = first % SUB == 0
    sums = tl.dot(w, v) if is_first else tl.dot(w, v, sums)
    if HAS_ZEROS:
        ones = tl.full(w.shape, 1.0, w.dtype)
        x_sums = tl.dot(ones, v) if is_first else tl.dot(ones, v, x_sums)
    if (first + w.shape[2]) % SUB == 0:
        total = sums
        if HAS_ZEROS:
            z = _of_group(zeros, unit, first, row, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, BLOCK_O, 0)
            total -= x_sums * (z - 8.0)[:, :, None]
        scale = _of_group(scales, unit, first, row, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, BLOCK_O, 0)
        acc += total * scale[:, :, None]
    return acc, sums, x_sums


@triton.jit(do_not_specialize=["M"])
def direct_kernel(
    y, x, words, scales, zeros, norm_weight, bias, residual, partial, M, stride_x, eps,
    OUT: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
    AHEAD: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, NORM_BLOCK: tl.constexpr,
    PREFETCH: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y (M, OUT), or its parts `partial` (S, M, OUT) if SPLITS > 1, for M <= BLOCK_M tokens; (S, M, 2, OUT) if
    GATED. NORM: of the norm of x, for one token. AHEAD: weights of the next units are loaded before these are
    multiplied, the first ones before the wait for x. Grid: (tiles of outputs, SPLITS)."""
    dtype: tl.constexpr = y.dtype.element_ty
    UNITS: tl.constexpr = (IN + 256 - 1) // 256
    ROW: tl.constexpr = UNITS * 64
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    # Neighbouring inputs with the same scale, as far as a unit goes.
    SUB: tl.constexpr = 256 if GROUPS == 1 or GROUP % 256 == 0 else GROUP & -GROUP
    STEPS: tl.constexpr = (UNITS + WARPS * SPLITS - 1) // (WARPS * SPLITS)
    RAGGED: tl.constexpr = UNITS % (WARPS * SPLITS) != 0
    MASKED: tl.constexpr = RAGGED or IN % 256 != 0
    WIDTH: tl.constexpr = 2 * OUT if GATED else OUT
    OUTPUTS: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    row = tl.program_id(0) * OUTPUTS
    split = tl.program_id(1)
    # Tiles have two dimensions, of which neighbours in the first are for neighbouring warps.
    # Pairs of words are loaded as one number, which takes one register.
    line = tl.arange(0, BLOCK_O // 8 * WARPS)
    pair = tl.arange(0, 128)
    rows = _rows_of((line // WARPS)[:, None] * 8 + (pair // 16)[None, :], row, OUT, OUTPUTS)
    w_ptrs = words.to(tl.pointer_type(tl.int32), bitcast=True) + rows.to(tl.int64) * (ROW // 2) + (pair % 16)[None, :]
    start = split * STEPS * WARPS
    w_unit = start + line % WARPS
    if RAGGED:
        w_unit = tl.minimum(w_unit, UNITS - 1)
    if AHEAD:
        w0 = _load_pairs(w_ptrs, w_unit, 0, None, False)
        w1 = _load_pairs(w_ptrs, w_unit, 1, None, False)
    if PDL:
        group = split * STEPS * WARPS * 256 // GROUP
        COUNT: tl.constexpr = (STEPS * WARPS * 256 + GROUP - 1) // GROUP
        prefetch_groups(scales, row, group, OUT, GROUPS, OUTPUTS, GATED, COUNT, 32 * WARPS)
        if HAS_ZEROS:
            prefetch_groups(zeros, row, group, OUT, GROUPS, OUTPUTS, GATED, COUNT, 32 * WARPS)
    if PREFETCH > 0:
        begin = (split * STEPS + (1 if AHEAD else 0)) * WARPS * 64
        prefetch_rows(words, row, OUT, ROW, begin, OUTPUTS, PREFETCH, 32 * WARPS)
        if GATED:
            prefetch_rows(words + OUT * ROW, row, OUT, ROW, begin, OUTPUTS, PREFETCH, 32 * WARPS)
    await_former(PDL)
    scale = 0.0
    if NORM:
        scale = row_scale(x, IN, eps, NORM_BLOCK)
    # A token past M repeats the last one, and is not stored.
    x_line = tl.arange(0, BLOCK_M // 8 * WARPS)
    lane = tl.arange(0, 256)
    tokens = (x_line // WARPS)[:, None] * 8 + (lane // 32)[None, :]
    x_ptrs = x + tl.minimum(tokens, M - 1).to(tl.int64) * stride_x + (lane % 32)[None, :]
    acc = tl.zeros((WARPS, BLOCK_O, BLOCK_M), tl.float32)
    s = acc
    xs = acc
    z = tl.full((1, 1), 8, tl.uint8)
    for step in tl.range(STEPS, num_stages=1):
        unit = start + tl.arange(0, WARPS)
        safe = tl.minimum(unit, UNITS - 1) if RAGGED else unit
        if not AHEAD:
            w_unit = start + line % WARPS
            if RAGGED:
                w_unit = tl.minimum(w_unit, UNITS - 1)
            w0 = _load_pairs(w_ptrs, w_unit, 0, None, False)
            w1 = _load_pairs(w_ptrs, w_unit, 1, None, False)
        else:
            w_unit = start + WARPS + line % WARPS
            more = (w_unit < tl.where(step + 1 < STEPS, UNITS, 0))[:, None]
            next0 = _load_pairs(w_ptrs, w_unit, 0, more, True)
            next1 = _load_pairs(w_ptrs, w_unit, 1, more, True)
        p0, p1, p2, p3 = unpack_nibbles(_words_of(w0), z, z, z, z, dtype)
        q0, q1, q2, q3 = unpack_nibbles(_words_of(w1), z, z, z, z, dtype)
        p0, q0 = _w_operand(p0, WARPS, BLOCK_O), _w_operand(q0, WARPS, BLOCK_O)
        p1, q1 = _w_operand(p1, WARPS, BLOCK_O), _w_operand(q1, WARPS, BLOCK_O)
        p2, q2 = _w_operand(p2, WARPS, BLOCK_O), _w_operand(q2, WARPS, BLOCK_O)
        p3, q3 = _w_operand(p3, WARPS, BLOCK_O), _w_operand(q3, WARPS, BLOCK_O)
        if NORM:
            inputs = (unit * 256)[:, None] + tl.arange(0, 128)[None, :]
            v = _normed_operand(x, norm_weight, scale, inputs, 0, dtype, IN, WARPS, BLOCK_M, MASKED)
            w = _joined(_joined(p0, q0), _joined(p1, q1))
            acc, s, xs = _add(
                acc, s, xs, w, v, scales, zeros, safe, row, 0, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, SUB, HAS_ZEROS
            )
            v = _normed_operand(x, norm_weight, scale, inputs, 128, dtype, IN, WARPS, BLOCK_M, MASKED)
            w = _joined(_joined(p2, q2), _joined(p3, q3))
            acc, s, xs = _add(
                acc, s, xs, w, v, scales, zeros, safe, row, 128, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, SUB, HAS_ZEROS
            )
        else:
            x_unit = start + x_line % WARPS
            inputs = (x_unit * 256)[:, None] + (lane % 32)[None, :]
            ptrs = x_ptrs + (x_unit * 256)[:, None]
            v = _x_operand(ptrs, inputs, 0, IN, WARPS, BLOCK_M, MASKED)
            acc, s, xs = _add(
                acc, s, xs, p0, v, scales, zeros, safe, row, 0, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, SUB, HAS_ZEROS
            )
            v = _x_operand(ptrs, inputs, 32, IN, WARPS, BLOCK_M, MASKED)
            acc, s, xs = _add(
                acc, s, xs, q0, v, scales, zeros, safe, row, 32, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, SUB, HAS_ZEROS
            )
            v = _x_operand(ptrs, inputs, 64, IN, WARPS, BLOCK_M, MASKED)
            acc, s, xs = _add(
                acc, s, xs, p1, v, scales, zeros, safe, row, 64, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, SUB, HAS_ZEROS
            )
            v = _x_operand(ptrs, inputs, 96, IN, WARPS, BLOCK_M, MASKED)
            acc, s, xs = _add(
                acc, s, xs, q1, v, scales, zeros, safe, row, 96, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, SUB, HAS_ZEROS
            )
            v = _x_operand(ptrs, inputs, 128, IN, WARPS, BLOCK_M, MASKED)
            acc, s, xs = _add(
                acc, s, xs, p2, v, scales, zeros, safe, row, 128, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, SUB, HAS_ZEROS
            )
            v = _x_operand(ptrs, inputs, 160, IN, WARPS, BLOCK_M, MASKED)
            acc, s, xs = _add(
                acc, s, xs, q2, v, scales, zeros, safe, row, 160, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, SUB, HAS_ZEROS
            )
            v = _x_operand(ptrs, inputs, 192, IN, WARPS, BLOCK_M, MASKED)
            acc, s, xs = _add(
                acc, s, xs, p3, v, scales, zeros, safe, row, 192, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, SUB, HAS_ZEROS
            )
            v = _x_operand(ptrs, inputs, 224, IN, WARPS, BLOCK_M, MASKED)
            acc, s, xs = _add(
                acc, s, xs, q3, v, scales, zeros, safe, row, 224, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, SUB, HAS_ZEROS
            )
        if AHEAD:
            w0 = next0
            w1 = next1
        start += WARPS
    store_sums(
        tl.sum(acc, 0), y, bias, residual, partial, row, tl.arange(0, BLOCK_M), split, M, OUT, BLOCK_M, BLOCK_O, SPLITS,
        GATED, ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
