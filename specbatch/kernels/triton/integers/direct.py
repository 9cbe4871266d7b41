# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The kernel of `ops.py` for few tokens: weights go from memory to registers. Shape suffixes as there.

Each warp of a program sums every WARPS-th strip, and the sums of the warps are added at the end. A strip is 64 words of
a row (see `kernels/integers.py`): 256 neighbouring inputs with 4 bits; with 8 bits two times 64 inputs, 128 apart. A
lane loads 16 bytes of a row: 8 words, of which part j has 8 neighbouring inputs. Tensor cores may multiply the inputs
in any order, if both operands have the same one. So an operand has them in the order in which lanes have loaded them,
and no number moves between lanes. Zero points differ from half of the range by a number that multiplies the sum of the
inputs. Where 32 inputs of an operand are in two groups of 16, each group is multiplied with zeros for the other's
inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.integers.parts import prefetch_groups, store_sums
from specbatch.kernels.triton.parts.integers import unpack_bytes, unpack_nibbles
from specbatch.kernels.triton.parts.launch import await_former
from specbatch.kernels.triton.skinny.parts import load_weights, normalised, prefetch_rows, row_scale


@triton.jit
def _first_input(strip, BITS: tl.constexpr):
    """Return the first input of a strip."""
    return strip * 256 if BITS == 4 else strip // 2 * 256 + strip % 2 * 64


@triton.jit
def _load_pairs(w_ptrs, strip, half: tl.constexpr, mask, MASKED: tl.constexpr):
    """Load pairs of words of half a strip, (BLOCK_O / 8 * WARPS, 128). `strip`: that of each line."""
    return load_weights(w_ptrs + (strip * 32 + half * 16)[:, None], mask, MASKED)


@triton.jit
def _words_of(pairs):
    """Return pairs of words (N, 128) as words (N, 256). No bit moves."""
    words = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
    return tl.reshape(words, (pairs.shape[0], 2 * pairs.shape[1]))


@triton.jit
def _w_operand(part, WARPS: tl.constexpr, BLOCK_O: tl.constexpr):
    """Return a part of half a strip, (BLOCK_O / 8 * WARPS, 256), as an operand (WARPS, BLOCK_O, 32)."""
    # The dimensions are rows / 8, warp, row, lane of a row, and bits of the word: half of the operand's inputs, half of
    # 16 inputs, input of a pair.
    apart = tl.reshape(part, (BLOCK_O // 8, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(apart, (1, 0, 2, 4, 5, 3, 6)), (WARPS, BLOCK_O, 32))


@triton.jit
def _x_operand(
    x_ptrs, inputs, first: tl.constexpr, IN: tl.constexpr, WARPS: tl.constexpr, BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr, HALF: tl.constexpr = None,
):  # fmt: skip
    """Load 32 inputs of each token and strip, (WARPS, 32, BLOCK_M). `first`: the first of them, less that of the
    strip. HALF: only the first or second 16 of them; the others are 0."""
    if HALF is not None:
        index = (tl.arange(0, 256) % 32)[None, :]
        mask = index < 16 if HALF == 0 else index >= 16  # Triton sees that neighbours have the same mask
        v = tl.load(x_ptrs + first, mask=mask & (inputs + first < IN) if MASKED else mask, other=0.0)
    else:
        v = tl.load(x_ptrs + first, mask=inputs + first < IN, other=0.0) if MASKED else tl.load(x_ptrs + first)
    apart = tl.reshape(v, (BLOCK_M // 8, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(apart, (1, 4, 5, 3, 6, 0, 2)), (WARPS, 32, BLOCK_M))


@triton.jit
def _normed_operand(
    x, norm_weight, scale, inputs, first: tl.constexpr, dtype: tl.constexpr, IN: tl.constexpr, WARPS: tl.constexpr,
    BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Load 128 inputs of the only token of each strip, normed. Each one is normed once, and then copied to the lanes
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
    pointer, base, first: tl.constexpr, row, OUT: tl.constexpr, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK_O: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Load the scales or zero points (WARPS, BLOCK_O) of input `first` of each strip, as float32. `base`: the first
    inputs of the strips. They are those of rows from LOCAL on of the program. A load of 16 rows has fewer elements than
    threads, so Triton loads them where they are used. Larger ones go through shared memory."""
    if BLOCK_O > 16:
        HALF: tl.constexpr = BLOCK_O // 2
        one = _of_group(pointer, base, first, row, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, HALF, LOCAL)
        other = _of_group(pointer, base, first, row, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, HALF, LOCAL + HALF)
        return tl.reshape(tl.permute(tl.join(one, other), (0, 2, 1)), (one.shape[0], BLOCK_O))
    else:
        rows = _rows_of(LOCAL + tl.arange(0, BLOCK_O), row, OUT, OUTPUTS)
        group = tl.minimum((base + first) // GROUP, GROUPS - 1) if GROUPS > 1 else base * 0
        return tl.load(pointer + (group * WIDTH)[:, None] + rows[None, :]).to(tl.float32)


@triton.jit
def _scaled(
    sums, x_sums, scales, zeros, base, row, first: tl.constexpr, OUT: tl.constexpr, OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Return the sums (WARPS, BLOCK_O, BLOCK_M) of the group of input `first`, less its zero point, times its scale."""
    BLOCK_O: tl.constexpr = sums.shape[1]
    if HAS_ZEROS:
        z = _of_group(zeros, base, first, row, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, BLOCK_O, 0)
        sums -= x_sums * (z - (1 << (BITS - 1)))[:, :, None]
    return sums * _of_group(scales, base, first, row, OUT, OUTPUTS, WIDTH, GROUP, GROUPS, BLOCK_O, 0)[:, :, None]


@triton.jit
def _add(
    acc, sums, x_sums, w, v, scales, zeros, base, row, first: tl.constexpr, OUT: tl.constexpr, OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, SUB: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
):  # fmt: skip
    """Add operands to the sums of their group. After the last ones of SUB inputs, add these to `acc`."""
    w = _fixed(w)
    is_first: tl.constexpr = first % SUB == 0
    sums = tl.dot(w, v) if is_first else tl.dot(w, v, sums)
    if HAS_ZEROS:
        ones = tl.full(w.shape, 1.0, w.dtype)
        x_sums = tl.dot(ones, v) if is_first else tl.dot(ones, v, x_sums)
    if (first + w.shape[2]) % SUB == 0:
        acc += _scaled(
            sums, x_sums, scales, zeros, base, row, first, OUT, OUTPUTS, WIDTH, BITS, GROUP, GROUPS, HAS_ZEROS
        )
    return acc, sums, x_sums


@triton.jit
def _add_groups_of_16(
    acc, w, x_ptrs, inputs, scales, zeros, base, row, first: tl.constexpr, OUT: tl.constexpr, OUTPUTS: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    IN: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add an operand whose 32 inputs are in two groups."""
    w = _fixed(w)
    ones = tl.full(w.shape, 1.0, w.dtype)
    for half in tl.static_range(2):
        v = _x_operand(x_ptrs, inputs, first, IN, w.shape[0], BLOCK_M, MASKED, half)
        sums = tl.dot(w, v)
        x_sums = tl.dot(ones, v) if HAS_ZEROS else sums
        acc += _scaled(
            sums, x_sums, scales, zeros, base, row, first + 16 * half, OUT, OUTPUTS, WIDTH, BITS, GROUP, GROUPS,
            HAS_ZEROS,
        )  # fmt: skip
    return acc


@triton.jit
def _add_part(
    acc, sums, x_sums, one, other, x_ptrs, inputs, scales, zeros, base, row, first: tl.constexpr, OUT: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    SUB: tl.constexpr, HAS_ZEROS: tl.constexpr, IN: tl.constexpr, BLOCK_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the same part of both halves of a strip: operands of the inputs from `first` and from `first` + 32 on."""
    if SUB == 16:
        acc = _add_groups_of_16(
            acc, one, x_ptrs, inputs, scales, zeros, base, row, first, OUT, OUTPUTS, WIDTH, BITS, GROUP, GROUPS,
            HAS_ZEROS, IN, BLOCK_M, MASKED,
        )  # fmt: skip
        acc = _add_groups_of_16(
            acc, other, x_ptrs, inputs, scales, zeros, base, row, first + 32, OUT, OUTPUTS, WIDTH, BITS, GROUP, GROUPS,
            HAS_ZEROS, IN, BLOCK_M, MASKED,
        )  # fmt: skip
    else:
        v = _x_operand(x_ptrs, inputs, first, IN, one.shape[0], BLOCK_M, MASKED)
        acc, sums, x_sums = _add(
            acc, sums, x_sums, one, v, scales, zeros, base, row, first, OUT, OUTPUTS, WIDTH, BITS, GROUP, GROUPS, SUB,
            HAS_ZEROS,
        )  # fmt: skip
        v = _x_operand(x_ptrs, inputs, first + 32, IN, one.shape[0], BLOCK_M, MASKED)
        acc, sums, x_sums = _add(
            acc, sums, x_sums, other, v, scales, zeros, base, row, first + 32, OUT, OUTPUTS, WIDTH, BITS, GROUP,
            GROUPS, SUB, HAS_ZEROS,
        )  # fmt: skip
    return acc, sums, x_sums


@triton.jit(do_not_specialize=["M"])
def direct_kernel(
    y, x, words, scales, zeros, norm_weight, bias, residual, partial, M, stride_x, eps,
    OUT: tl.constexpr, IN: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr, AHEAD: tl.constexpr, SPLITS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    NORM_BLOCK: tl.constexpr, PREFETCH: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y (M, OUT), or its parts `partial` (S, M, OUT) if SPLITS > 1, for M <= BLOCK_M tokens; (S, M, 2, OUT) if
    GATED. NORM: of the norm of x, for one token and 4 bits. AHEAD: weights of the next strips are loaded before these
    are multiplied, the first ones before the wait for x. Grid: (tiles of outputs, SPLITS)."""
    dtype: tl.constexpr = y.dtype.element_ty
    ROW: tl.constexpr = (IN + 256 - 1) // 256 * 16 * BITS
    STRIPS: tl.constexpr = ROW // 64
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    # Neighbouring inputs with the same scale, as far as a strip goes.
    NEIGHBOURS: tl.constexpr = 256 if BITS == 4 else 64
    SUB: tl.constexpr = NEIGHBOURS if GROUPS == 1 or GROUP % NEIGHBOURS == 0 else GROUP & -GROUP
    STEPS: tl.constexpr = (STRIPS + WARPS * SPLITS - 1) // (WARPS * SPLITS)
    RAGGED: tl.constexpr = STRIPS % (WARPS * SPLITS) != 0
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
    w_strip = start + line % WARPS
    if RAGGED:
        w_strip = tl.minimum(w_strip, STRIPS - 1)
    if AHEAD:
        w0 = _load_pairs(w_ptrs, w_strip, 0, None, False)
        w1 = _load_pairs(w_ptrs, w_strip, 1, None, False)
    if PDL:
        group = _first_input(start, BITS) // GROUP
        COUNT: tl.constexpr = (STEPS * WARPS * 1024 // BITS + GROUP - 1) // GROUP
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
    z = tl.full((1, 1), 1 << (BITS - 1), tl.uint8)
    for step in tl.range(STEPS, num_stages=1):
        strip = start + tl.arange(0, WARPS)
        base = _first_input(tl.minimum(strip, STRIPS - 1) if RAGGED else strip, BITS)
        if not AHEAD:
            w_strip = start + line % WARPS
            if RAGGED:
                w_strip = tl.minimum(w_strip, STRIPS - 1)
            w0 = _load_pairs(w_ptrs, w_strip, 0, None, False)
            w1 = _load_pairs(w_ptrs, w_strip, 1, None, False)
        else:
            w_strip = start + WARPS + line % WARPS
            more = (w_strip < tl.where(step + 1 < STEPS, STRIPS, 0))[:, None]
            next0 = _load_pairs(w_ptrs, w_strip, 0, more, True)
            next1 = _load_pairs(w_ptrs, w_strip, 1, more, True)
        x_first = _first_input(start + x_line % WARPS, BITS)[:, None]
        inputs = x_first + (lane % 32)[None, :]
        ptrs = x_ptrs + x_first
        if BITS == 4:
            p0, p1, p2, p3 = unpack_nibbles(_words_of(w0), z, z, z, z, dtype)
            q0, q1, q2, q3 = unpack_nibbles(_words_of(w1), z, z, z, z, dtype)
            p0, q0 = _w_operand(p0, WARPS, BLOCK_O), _w_operand(q0, WARPS, BLOCK_O)
            p1, q1 = _w_operand(p1, WARPS, BLOCK_O), _w_operand(q1, WARPS, BLOCK_O)
            p2, q2 = _w_operand(p2, WARPS, BLOCK_O), _w_operand(q2, WARPS, BLOCK_O)
            p3, q3 = _w_operand(p3, WARPS, BLOCK_O), _w_operand(q3, WARPS, BLOCK_O)
            if NORM:
                at = (strip * 256)[:, None] + tl.arange(0, 128)[None, :]
                v = _normed_operand(x, norm_weight, scale, at, 0, dtype, IN, WARPS, BLOCK_M, MASKED)
                w = _joined(_joined(p0, q0), _joined(p1, q1))
                acc, s, xs = _add(
                    acc, s, xs, w, v, scales, zeros, base, row, 0, OUT, OUTPUTS, WIDTH, BITS, GROUP, GROUPS, SUB,
                    HAS_ZEROS,
                )  # fmt: skip
                v = _normed_operand(x, norm_weight, scale, at, 128, dtype, IN, WARPS, BLOCK_M, MASKED)
                w = _joined(_joined(p2, q2), _joined(p3, q3))
                acc, s, xs = _add(
                    acc, s, xs, w, v, scales, zeros, base, row, 128, OUT, OUTPUTS, WIDTH, BITS, GROUP, GROUPS, SUB,
                    HAS_ZEROS,
                )  # fmt: skip
            else:
                acc, s, xs = _add_part(
                    acc, s, xs, p0, q0, ptrs, inputs, scales, zeros, base, row, 0, OUT, OUTPUTS, WIDTH, BITS, GROUP,
                    GROUPS, SUB, HAS_ZEROS, IN, BLOCK_M, MASKED,
                )  # fmt: skip
                acc, s, xs = _add_part(
                    acc, s, xs, p1, q1, ptrs, inputs, scales, zeros, base, row, 64, OUT, OUTPUTS, WIDTH, BITS, GROUP,
                    GROUPS, SUB, HAS_ZEROS, IN, BLOCK_M, MASKED,
                )  # fmt: skip
                acc, s, xs = _add_part(
                    acc, s, xs, p2, q2, ptrs, inputs, scales, zeros, base, row, 128, OUT, OUTPUTS, WIDTH, BITS, GROUP,
                    GROUPS, SUB, HAS_ZEROS, IN, BLOCK_M, MASKED,
                )  # fmt: skip
                acc, s, xs = _add_part(
                    acc, s, xs, p3, q3, ptrs, inputs, scales, zeros, base, row, 192, OUT, OUTPUTS, WIDTH, BITS, GROUP,
                    GROUPS, SUB, HAS_ZEROS, IN, BLOCK_M, MASKED,
                )  # fmt: skip
        else:
            b0, b1 = unpack_bytes(_words_of(w0), z, z, dtype)
            c0, c1 = unpack_bytes(_words_of(w1), z, z, dtype)
            b0, c0 = _w_operand(b0, WARPS, BLOCK_O), _w_operand(c0, WARPS, BLOCK_O)
            b1, c1 = _w_operand(b1, WARPS, BLOCK_O), _w_operand(c1, WARPS, BLOCK_O)
            acc, s, xs = _add_part(
                acc, s, xs, b0, c0, ptrs, inputs, scales, zeros, base, row, 0, OUT, OUTPUTS, WIDTH, BITS, GROUP,
                GROUPS, SUB, HAS_ZEROS, IN, BLOCK_M, MASKED,
            )  # fmt: skip
            acc, s, xs = _add_part(
                acc, s, xs, b1, c1, ptrs, inputs, scales, zeros, base, row, 128, OUT, OUTPUTS, WIDTH, BITS, GROUP,
                GROUPS, SUB, HAS_ZEROS, IN, BLOCK_M, MASKED,
            )  # fmt: skip
        if AHEAD:
            w0 = next0
            w1 = next1
        start += WARPS
    store_sums(
        tl.sum(acc, 0), y, bias, residual, partial, row, tl.arange(0, BLOCK_M), split, M, OUT, BLOCK_M, BLOCK_O, SPLITS,
        GATED, ACTIVATION, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip
