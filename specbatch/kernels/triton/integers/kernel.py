# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The kernels of `ops.py`, on the tensor cores. Shape suffixes as there.

A step reads STEP words of each row. Its parts are the tiles of numbers that are in the same bits of the words: four
with 4 bits, two with 8. Part p has STEP neighbouring inputs; those of part p + 1 are WORDS later.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.integers.parts import prefetch_groups, store_sums
from specbatch.kernels.triton.parts.integers import unpack_bytes, unpack_nibbles
from specbatch.kernels.triton.parts.launch import await_former
from specbatch.kernels.triton.skinny.parts import load_weights, prefetch_rows

_GROUP_TILES = tl.constexpr(8)  # tiles of tokens whose inputs stay in L2 while weights are read


@triton.jit
def _first_input(step, STEP: tl.constexpr, UNIT: tl.constexpr, WORDS: tl.constexpr):
    """Return the first input of part 0 of a step. WORDS: words of a UNIT."""
    return step * STEP // WORDS * UNIT + step * STEP % WORDS


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
    """Return zero points (BLOCK_O, 1)."""
    if HAS_ZEROS:
        found = _of_group(zeros, first, rows, OUT, GROUP, GROUPS)
    else:
        found = tl.full(rows.shape, 1 << (BITS - 1), tl.uint8)
    return found[:, None]


@triton.jit
def _x_tile(
    x_ptrs, first, ok_m, PARTS: tl.constexpr, STEP: tl.constexpr, WORDS: tl.constexpr, IN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Load the inputs of PARTS parts, (PARTS * STEP, BLOCK_M). `first`: the first input of the first part."""
    index = tl.arange(0, PARTS * STEP)
    offs = first + index // STEP * WORDS + index % STEP
    mask = ok_m[None, :] & (offs < IN)[:, None] if MASKED else ok_m[None, :]
    return tl.load(x_ptrs[None, :] + offs[:, None], mask=mask, other=0.0)


@triton.jit
def _joined(one, other):
    """Return two parts (BLOCK_O, N) as one (BLOCK_O, 2 N). In the arrangement of an operand no number moves."""
    return tl.reshape(tl.permute(tl.join(one, other), (0, 2, 1)), (one.shape[0], 2 * one.shape[1]))


@triton.jit
def _scaled(part, scale):
    return part * scale.to(part.dtype)[:, None]


@triton.jit(do_not_specialize=["M"])
def integer_kernel(
    y, x, words, scales, zeros, bias, residual, partial, M, stride_x,
    OUT: tl.constexpr, IN: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr,
    SCALE_SUMS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PREFETCH: tl.constexpr, THREADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute y (M, OUT), or its parts `partial` (S, M, OUT) if SPLITS > 1. GATED: the weight has OUT rows of gate,
    then OUT of up, and parts are (S, M, 2, OUT). The tile of weights is the first operand, and x transposed is the
    second. Grid: (tiles of outputs x tiles of tokens, SPLITS)."""
    dtype: tl.constexpr = y.dtype.element_ty
    WORDS: tl.constexpr = UNIT * BITS // 16
    ROW: tl.constexpr = (IN + UNIT - 1) // UNIT * WORDS
    MASKED: tl.constexpr = IN % UNIT != 0
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    SHARED: tl.constexpr = GROUP % (2 * WORDS) == 0
    STEPS: tl.constexpr = ROW // STEP
    STEPS_PER_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    WIDTH: tl.constexpr = 2 * OUT if GATED else OUT  # rows of the weight
    OUTPUTS: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O  # those of a program
    TILES_O: tl.constexpr = (OUT + OUTPUTS - 1) // OUTPUTS
    # Programs go over groups of tiles of tokens, and in a group over one tile of weights after the other.
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.program_id(0) // (_GROUP_TILES * TILES_O) * _GROUP_TILES
    in_group = tl.minimum(tiles_m - first_tile, _GROUP_TILES)
    within = tl.program_id(0) % (_GROUP_TILES * TILES_O)
    token = (first_tile + within % in_group) * BLOCK_M
    row = within // in_group * OUTPUTS
    split = tl.program_id(1)
    begin = 0 if SPLITS == 1 else split * STEPS_PER_SPLIT
    end = STEPS if SPLITS == 1 else tl.minimum(begin + STEPS_PER_SPLIT, STEPS)
    # The operand has rows of gate, then the same rows of up.
    local = tl.arange(0, BLOCK_O)
    rows = row + local % OUTPUTS
    rows = (rows if OUT % OUTPUTS == 0 else tl.minimum(rows, OUT - 1)) + local // OUTPUTS * OUT
    w_ptrs = words + rows.to(tl.int64)[:, None] * ROW + tl.arange(0, STEP)[None, :]
    if PDL:
        COUNT: tl.constexpr = (STEPS_PER_SPLIT * STEP * 16 // BITS + UNIT + GROUP - 1) // GROUP
        group = _first_input(begin, STEP, UNIT, WORDS) // GROUP
        prefetch_groups(scales, row, group, OUT, GROUPS, OUTPUTS, GATED, COUNT, THREADS)
        if HAS_ZEROS:
            prefetch_groups(zeros, row, group, OUT, GROUPS, OUTPUTS, GATED, COUNT, THREADS)
    if PREFETCH > 0:
        prefetch_rows(words, row, OUT, ROW, begin * STEP, OUTPUTS, PREFETCH, THREADS)
        if GATED:
            prefetch_rows(words + OUT * ROW, row, OUT, ROW, begin * STEP, OUTPUTS, PREFETCH, THREADS)
    first = _first_input(begin, STEP, UNIT, WORDS)
    s0 = _of_group(scales, first, rows, WIDTH, GROUP, GROUPS)
    s1 = s0 if SHARED else _of_group(scales, first + WORDS, rows, WIDTH, GROUP, GROUPS)
    s2 = s0
    s3 = s0
    if BITS == 4:
        s2 = _of_group(scales, first + 2 * WORDS, rows, WIDTH, GROUP, GROUPS)
        s3 = s2 if SHARED else _of_group(scales, first + 3 * WORDS, rows, WIDTH, GROUP, GROUPS)
    await_former(PDL)
    tokens = token + tl.arange(0, BLOCK_M)
    ok_m = tokens < M
    x_ptrs = x + tokens.to(tl.int64) * stride_x
    acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        first = _first_input(step, STEP, UNIT, WORDS)
        w = load_weights(w_ptrs + step * STEP, None, False)
        z0 = _zeros_of(zeros, first, rows, WIDTH, GROUP, GROUPS, BITS, HAS_ZEROS)
        z1 = z0 if SHARED else _zeros_of(zeros, first + WORDS, rows, WIDTH, GROUP, GROUPS, BITS, HAS_ZEROS)
        if BITS == 4:
            z2 = _zeros_of(zeros, first + 2 * WORDS, rows, WIDTH, GROUP, GROUPS, BITS, HAS_ZEROS)
            z3 = z2 if SHARED else _zeros_of(zeros, first + 3 * WORDS, rows, WIDTH, GROUP, GROUPS, BITS, HAS_ZEROS)
            p0, p1, p2, p3 = unpack_nibbles(w, z0, z1, z2, z3, dtype)
        else:
            p0, p1 = unpack_bytes(w, z0, z1, dtype)
        if GROUPS == 1 or not SCALE_SUMS:
            if GROUPS > 1:
                # Scales that are loaded here have the arrangement of the operand. Those of another step would not.
                c0 = _of_group(scales, first, rows, WIDTH, GROUP, GROUPS)
                c1 = c0 if SHARED else _of_group(scales, first + WORDS, rows, WIDTH, GROUP, GROUPS)
                p0 = _scaled(p0, c0)
                p1 = _scaled(p1, c1)
                if BITS == 4:
                    c2 = _of_group(scales, first + 2 * WORDS, rows, WIDTH, GROUP, GROUPS)
                    c3 = c2 if SHARED else _of_group(scales, first + 3 * WORDS, rows, WIDTH, GROUP, GROUPS)
                    p2 = _scaled(p2, c2)
                    p3 = _scaled(p3, c3)
            whole = _joined(p0, p1)
            if BITS == 4:
                whole = _joined(whole, _joined(p2, p3))
            acc = tl.dot(whole, _x_tile(x_ptrs, first, ok_m, 16 // BITS, STEP, WORDS, IN, MASKED), acc)
        else:
            # Scales of the next step are loaded here: these loads are not in the pipeline of the tiles. They are
            # converted where they are used, because a conversion here would wait for them in each step.
            after = _first_input(tl.minimum(step + 1, end - 1), STEP, UNIT, WORDS)
            n0 = _of_group(scales, after, rows, WIDTH, GROUP, GROUPS)
            n1 = n0 if SHARED else _of_group(scales, after + WORDS, rows, WIDTH, GROUP, GROUPS)
            if SHARED:
                acc += (
                    tl.dot(_joined(p0, p1), _x_tile(x_ptrs, first, ok_m, 2, STEP, WORDS, IN, MASKED))
                    * s0.to(tl.float32)[:, None]
                )
            else:
                acc += tl.dot(p0, _x_tile(x_ptrs, first, ok_m, 1, STEP, WORDS, IN, MASKED)) * s0.to(tl.float32)[:, None]
                acc += (
                    tl.dot(p1, _x_tile(x_ptrs, first + WORDS, ok_m, 1, STEP, WORDS, IN, MASKED))
                    * s1.to(tl.float32)[:, None]
                )
            s0 = n0
            s1 = n1
            if BITS == 4:
                n2 = _of_group(scales, after + 2 * WORDS, rows, WIDTH, GROUP, GROUPS)
                n3 = n2 if SHARED else _of_group(scales, after + 3 * WORDS, rows, WIDTH, GROUP, GROUPS)
                third = first + 2 * WORDS
                if SHARED:
                    x2 = _x_tile(x_ptrs, third, ok_m, 2, STEP, WORDS, IN, MASKED)
                    acc += tl.dot(_joined(p2, p3), x2) * s2.to(tl.float32)[:, None]
                else:
                    x2 = _x_tile(x_ptrs, third, ok_m, 1, STEP, WORDS, IN, MASKED)
                    x3 = _x_tile(x_ptrs, third + WORDS, ok_m, 1, STEP, WORDS, IN, MASKED)
                    acc += tl.dot(p2, x2) * s2.to(tl.float32)[:, None]
                    acc += tl.dot(p3, x3) * s3.to(tl.float32)[:, None]
                s2 = n2
                s3 = n3
    if GROUPS == 1:
        acc = acc * _of_group(scales, 0, rows, WIDTH, GROUP, GROUPS).to(tl.float32)[:, None]
    store_sums(
        acc, y, bias, residual, partial, row, tokens, split, M, OUT, BLOCK_M, BLOCK_O, SPLITS, GATED, ACTIVATION,
        HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def _store_part(
    y_ptrs, part, scales, zeros, first, rows, offs, OUT: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, HALF: tl.constexpr, WHOLE_ZEROS: tl.constexpr,
):  # fmt: skip
    """Store one part of the weight times its scales. Not WHOLE_ZEROS: zero points are still subtracted, less HALF."""
    safe = tl.minimum(rows, OUT - 1)
    scale = _of_group(scales, first, safe, OUT, GROUP, GROUPS).to(tl.float32)
    numbers = part.to(tl.float32)
    if not WHOLE_ZEROS:
        numbers -= (_of_group(zeros, first, safe, OUT, GROUP, GROUPS) - HALF)[:, None]
    mask = (rows < OUT)[:, None] & (first + offs < IN)[None, :]
    tl.store(y_ptrs + first, (numbers * scale[:, None]).to(y_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def dequantise_kernel(
    y, words, scales, zeros, OUT: tl.constexpr, IN: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_O: tl.constexpr, STEP: tl.constexpr, HAS_ZEROS: tl.constexpr,
    WHOLE_ZEROS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the weight (OUT, IN). Grid: (OUT / BLOCK_O, words of a row / STEP)."""
    dtype: tl.constexpr = y.dtype.element_ty
    WORDS: tl.constexpr = UNIT * BITS // 16
    ROW: tl.constexpr = (IN + UNIT - 1) // UNIT * WORDS
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP
    HALF: tl.constexpr = 1 << (BITS - 1)
    rows = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    safe = tl.minimum(rows, OUT - 1)
    step = tl.program_id(1)
    offs = tl.arange(0, STEP)
    first = _first_input(step, STEP, UNIT, WORDS)
    w = load_weights(words + safe.to(tl.int64)[:, None] * ROW + step * STEP + offs[None, :], None, False)
    z0 = _zeros_of(zeros, first, safe, OUT, GROUP, GROUPS, BITS, HAS_ZEROS and WHOLE_ZEROS)
    z1 = _zeros_of(zeros, first + WORDS, safe, OUT, GROUP, GROUPS, BITS, HAS_ZEROS and WHOLE_ZEROS)
    y_ptrs = y + rows.to(tl.int64)[:, None] * IN + offs[None, :]
    await_former(PDL)  # another kernel may still read the memory of y
    if BITS == 4:
        z2 = _zeros_of(zeros, first + 2 * WORDS, safe, OUT, GROUP, GROUPS, BITS, HAS_ZEROS and WHOLE_ZEROS)
        z3 = _zeros_of(zeros, first + 3 * WORDS, safe, OUT, GROUP, GROUPS, BITS, HAS_ZEROS and WHOLE_ZEROS)
        p0, p1, p2, p3 = unpack_nibbles(w, z0, z1, z2, z3, dtype)
        _store_part(y_ptrs, p2, scales, zeros, first + 2 * WORDS, rows, offs, OUT, IN, GROUP, GROUPS, HALF, WHOLE_ZEROS)
        _store_part(y_ptrs, p3, scales, zeros, first + 3 * WORDS, rows, offs, OUT, IN, GROUP, GROUPS, HALF, WHOLE_ZEROS)
    else:
        p0, p1 = unpack_bytes(w, z0, z1, dtype)
    _store_part(y_ptrs, p0, scales, zeros, first, rows, offs, OUT, IN, GROUP, GROUPS, HALF, WHOLE_ZEROS)
    _store_part(y_ptrs, p1, scales, zeros, first + WORDS, rows, offs, OUT, IN, GROUP, GROUPS, HALF, WHOLE_ZEROS)
