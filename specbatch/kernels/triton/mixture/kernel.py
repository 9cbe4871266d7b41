# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The kernels of `ops.py`. Shape suffixes as there."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.mxfp4 import MXFP4_GROUP
from specbatch.kernels.quantised import GROUP
from specbatch.kernels.triton.parts.elementwise import gate_and_up, scaled_norm
from specbatch.kernels.triton.parts.fp8 import bfloat16_operand
from specbatch.kernels.triton.parts.fp8 import operand as exact_operand
from specbatch.kernels.triton.parts.launch import await_former
from specbatch.kernels.triton.parts.mxfp4 import load_mxfp4, load_mxfp4_bfloat16
from specbatch.kernels.triton.skinny.parts import load_weights, rounded

_GROUP = tl.constexpr(MXFP4_GROUP)
_FP8_GROUP = tl.constexpr(GROUP)


@triton.jit
def _largest(values, taken):
    """Return the largest number that is not taken."""
    return tl.max(tl.where(taken, float("-inf"), values), 0)


@triton.jit
def _index_of(value, values, ids, taken, SIZE: tl.constexpr):
    """Return the lowest index of a number among those that are not taken."""
    return tl.min(tl.where(taken | (values != value), SIZE, ids), 0)


@triton.jit
def _in_best_groups(
    choice, ids, X: tl.constexpr, X_POWER: tl.constexpr, GROUPS: tl.constexpr, GROUPS_POWER: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
):  # fmt: skip
    """Return whether each expert is in one of the groups whose two largest numbers have the largest sums."""
    size: tl.constexpr = X // GROUPS
    groups = tl.arange(0, GROUPS_POWER)
    sums = tl.zeros((GROUPS_POWER,), tl.float32)
    for group in tl.static_range(GROUPS):
        outside = (ids // size) != group
        first = _largest(choice, outside)
        second = _largest(choice, outside | (ids == _index_of(first, choice, ids, outside, X_POWER)))
        sums = tl.where(groups == group, first + second, sums)
    is_left = ids < 0
    taken = groups >= GROUPS
    for _ in tl.static_range(TOPK_GROUPS):
        best = _index_of(_largest(sums, taken), sums, groups, taken, GROUPS_POWER)
        is_left = is_left | (ids // size == best)
        taken = taken | (groups == best)
    return is_left


@triton.jit
def _norm_row(y, x, norm_weight, eps, SIZE: tl.constexpr, SIZE_POWER: tl.constexpr):
    """Store the norm of a row."""
    offs = tl.arange(0, SIZE_POWER)
    v = tl.load(x + offs, mask=offs < SIZE, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + offs, mask=offs < SIZE, other=0.0)
    scale = tl.rsqrt(tl.sum(v * v, 0) / SIZE + eps)
    tl.store(y + offs, scaled_norm(v * scale, weight, y.dtype.element_ty), mask=offs < SIZE)


@triton.jit
def route_kernel(
    logits, correction, weights, experts, x, norm_weight, normed, stride, eps,
    X: tl.constexpr, K: tl.constexpr, K_POWER: tl.constexpr, X_POWER: tl.constexpr, SCORING: tl.constexpr,
    NORM: tl.constexpr, GROUPS: tl.constexpr, GROUPS_POWER: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    SCALE: tl.constexpr, HAS_CORRECTION: tl.constexpr, SIZE: tl.constexpr, SIZE_POWER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the choice of one token, as `Routing` says. Grid: (T, 1). With SIZE > 0 the grid is (T, 2), and a token's
    second program computes `normed`, the norm of its row of x, which has SIZE elements."""
    token = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, X_POWER)
    ranks = tl.arange(0, K_POWER)
    await_former(PDL)
    if tl.program_id(1) == 1:
        if SIZE > 0:
            _norm_row(normed + token * SIZE, x + token * SIZE, norm_weight, eps, SIZE, SIZE_POWER)
        return
    scores = tl.load(logits + token * stride + ids, mask=ids < X, other=float("-inf")).to(tl.float32)
    if SCORING == "softmax":
        scores = tl.exp(scores - tl.max(scores, 0))
        scores = scores / tl.sum(scores, 0)
    elif SCORING == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if HAS_CORRECTION:
        choice = choice + tl.load(correction + ids, mask=ids < X, other=0.0)
    # NaN is like the highest score, as in the reference: its expert is chosen, so that no output hides it.
    choice = tl.where(choice == choice, choice, float("inf"))
    if GROUPS > 1:
        choice = tl.where(
            _in_best_groups(choice, ids, X, X_POWER, GROUPS, GROUPS_POWER, TOPK_GROUPS), choice, float("-inf")
        )
    best_score = tl.zeros((K_POWER,), tl.float32)
    best_id = tl.zeros((K_POWER,), tl.int32)
    taken = ids >= X
    for k in tl.static_range(K):
        value = _largest(choice, taken)
        number = _index_of(value, choice, ids, taken, X_POWER)
        if HAS_CORRECTION:
            value = tl.sum(tl.where(ids == number, scores, 0.0), 0)
        best_score = tl.where(ranks == k, value, best_score)
        best_id = tl.where(ranks == k, number, best_id)
        taken = taken | (ids == number)
    if SCORING == "softmax_of_chosen":
        best_score = tl.where(ranks < K, best_score, float("-inf"))
        best_score = tl.exp(best_score - tl.max(best_score, 0))
        best_score = best_score / tl.sum(best_score, 0)
    elif NORM:
        best_score = best_score / (tl.sum(best_score, 0) + 1e-20)
    if SCALE != 1.0:
        best_score = best_score * SCALE
    at = token * K + ranks
    tl.store(weights + at, best_score.to(weights.dtype.element_ty), mask=ranks < K)
    tl.store(experts + at, best_id, mask=ranks < K)


@triton.jit(do_not_specialize=["N", "B"])
def sort_kernel(
    experts, block_experts, members, N, B, FIRST: tl.constexpr, X_POWER: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Give the choices of one expert to blocks of BLOCK_M. Expert after expert has as many blocks as it needs. Experts
    count from FIRST on. `block_experts` (B,): the expert of each block; -1: none. `members` (B, BLOCK_M): numbers of
    choices, N where a block has no more. Grid: X."""
    expert = tl.program_id(0)
    bins = tl.arange(0, X_POWER)
    lanes = tl.arange(0, CHUNK)
    await_former(PDL)
    counts = tl.zeros((X_POWER,), tl.int32)
    for n0 in range(0, N, CHUNK):
        chosen = tl.load(experts + n0 + lanes, mask=n0 + lanes < N, other=-1) - FIRST
        is_here = (n0 + lanes < N) & (chosen >= 0) & (chosen < tl.num_programs(0))
        counts += tl.histogram(tl.where(is_here, chosen, 0), X_POWER, mask=is_here)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, blocks, 0), 0)
    num = tl.sum(tl.where(bins == expert, blocks, 0), 0)
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    seen = 0
    for n0 in range(0, N, CHUNK):
        chosen = tl.load(experts + n0 + lanes, mask=n0 + lanes < N, other=-1)
        mine = chosen == expert + FIRST
        rank = seen + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(members + first * BLOCK_M + rank, n0 + lanes, mask=mine)
        seen += tl.sum(mine.to(tl.int32), 0)
    for n0 in range(count, num * BLOCK_M, CHUNK):
        tl.store(members + first * BLOCK_M + n0 + lanes, N, mask=n0 + lanes < num * BLOCK_M)
    for b0 in range(0, num, CHUNK):
        tl.store(block_experts + first + b0 + lanes, expert, mask=b0 + lanes < num)
    if expert == tl.num_programs(0) - 1:
        for b0 in range(first + num, B, CHUNK):
            tl.store(block_experts + b0 + lanes, -1, mask=b0 + lanes < B)


@triton.jit(do_not_specialize=["N", "slice_size"])
def count_kernel(
    experts, counts, N, slice_size, FIRST: tl.constexpr, HELD: tl.constexpr, X_POWER: tl.constexpr,
    STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the choices of each of the HELD experts from FIRST on in a slice of the choices. `counts`: (slices,
    X_POWER). Grid: slices."""
    part = tl.program_id(0)
    lanes = tl.arange(0, STEP)
    end = tl.minimum(N, (part + 1) * slice_size)
    await_former(PDL)
    found = tl.zeros((X_POWER,), tl.int32)
    for n0 in range(part * slice_size, end, STEP):
        chosen = tl.load(experts + n0 + lanes, mask=n0 + lanes < end, other=-1) - FIRST
        is_here = (chosen >= 0) & (chosen < HELD)
        found += tl.histogram(tl.where(is_here, chosen, 0), X_POWER, mask=is_here)
    tl.store(counts + part * X_POWER + tl.arange(0, X_POWER), found)


@triton.jit(do_not_specialize=["N", "B", "slice_size"])
def place_kernel(
    experts, counts, block_experts, members, N, B, slice_size, FIRST: tl.constexpr, HELD: tl.constexpr,
    X_POWER: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the blocks that `sort_kernel` would write, after `count_kernel`. A program places the choices of its slice,
    and finishes the experts whose number it has, modulo the number of slices. ROWS: choices, or rows of `counts`, that
    are read at a time. Grid: slices."""
    part = tl.program_id(0)
    num_parts = tl.num_programs(0)
    bins = tl.arange(0, X_POWER)
    rows = tl.arange(0, ROWS)
    lanes = tl.arange(0, STEP)
    end = tl.minimum(N, (part + 1) * slice_size)
    await_former(PDL)
    of_all = tl.zeros((ROWS, X_POWER), tl.int32)
    of_former = tl.zeros((ROWS, X_POWER), tl.int32)
    for r0 in range(0, num_parts, ROWS):
        row = r0 + rows
        tile = tl.load(counts + row[:, None] * X_POWER + bins[None, :], mask=(row < num_parts)[:, None], other=0)
        of_all += tile
        of_former += tl.where((row < part)[:, None], tile, 0)
    totals = tl.sum(of_all, 0)
    blocks = (totals + BLOCK_M - 1) // BLOCK_M
    first = tl.cumsum(blocks, 0) - blocks
    # The place of the next choice of each expert.
    places = first * BLOCK_M + tl.sum(of_former, 0)
    for n0 in range(part * slice_size, end, ROWS):
        chosen = tl.load(experts + n0 + rows, mask=n0 + rows < end, other=-1) - FIRST
        is_here = (chosen >= 0) & (chosen < HELD)
        # The row of a choice whose expert is not held has no element that is set.
        mine = (chosen[:, None] == bins[None, :]) & is_here[:, None]
        ones = mine.to(tl.int32)
        place = tl.sum(tl.where(mine, places[None, :] + tl.cumsum(ones, 0) - 1, 0), 1)
        tl.store(members + place, n0 + rows, mask=is_here)
        places += tl.sum(ones, 0)
    for expert in range(part, HELD, num_parts):
        start = tl.sum(tl.where(bins == expert, first, 0), 0)
        num = tl.sum(tl.where(bins == expert, blocks, 0), 0)
        rest = tl.sum(tl.where(bins == expert, totals, 0), 0) + tl.arange(0, BLOCK_M)
        tl.store(members + start * BLOCK_M + rest, N, mask=rest < num * BLOCK_M)
        for b0 in range(0, num, STEP):
            tl.store(block_experts + start + b0 + lanes, expert, mask=b0 + lanes < num)
    if part == num_parts - 1:
        for b0 in range(tl.sum(blocks, 0), B, STEP):
            tl.store(block_experts + b0 + lanes, -1, mask=b0 + lanes < B)


@triton.jit
def _members_of_choice(
    experts, choice, N, FIRST: tl.constexpr, HELD: tl.constexpr, N_POWER: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return the expert of a choice, counted from FIRST on, and the numbers of all choices of it, filled up with N. The
    expert is -1 if it is not one of the HELD experts, or if a choice before this one is of the same expert."""
    lanes = tl.arange(0, N_POWER)
    chosen = tl.load(experts + lanes, mask=lanes < N, other=-1)
    expert = tl.load(experts + choice)
    mine = (chosen == expert) & (lanes < N)
    is_first = tl.min(tl.where(mine, lanes, N_POWER), 0) == choice
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    at = mine[:, None] & (rank[:, None] == tl.arange(0, BLOCK_M)[None, :])
    members = tl.min(tl.where(at, lanes[:, None], N), 0)
    expert -= FIRST
    return tl.where(is_first & (expert >= 0) & (expert < HELD), expert, -1), members


@triton.jit(do_not_specialize=["N"])
def expert_gemm(
    y, x, weight, scales, bias, operand, experts, block_experts, members, N,
    OUT: tl.constexpr, IN: tl.constexpr, DIVISOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, MXFP4: tl.constexpr, FP8: tl.constexpr, GROUPS: tl.constexpr, PACKED: tl.constexpr,
    TMA: tl.constexpr, SORTED: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, N_POWER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute y (N, OUT), a row for each choice of one of the HELD experts from FIRST on, from x (N / DIVISOR, IN) and
    the expert's weight (OUT, IN), or (2 OUT, IN) if GATED, and its `bias`. The tile of weights is the first
    operand, and x transposed is the second. `operand`: the descriptor of all weights if TMA. MXFP4: the weights
    have `scales`, see `parts/mxfp4.py`. FP8: a row of the weights has GROUPS of `scales`. With more than one, each
    belongs to _FP8_GROUP inputs, and so does a step of BLOCK_I, so that the order of the sums is the same with
    every tile. If PACKED, packed instructions make bfloat16 of quantised weights. SORTED: the choices are
    sorted into blocks; otherwise each of the N choices is a block. Grid: blocks * OUT / BLOCK_O; neighbours have
    the same block."""
    tl.static_assert(GROUPS <= 1 or BLOCK_I == _FP8_GROUP)
    dtype: tl.constexpr = y.dtype.element_ty
    TILES: tl.constexpr = (OUT + BLOCK_O - 1) // BLOCK_O
    MASKED: tl.constexpr = IN % BLOCK_I != 0
    block = tl.program_id(0) // TILES
    row = tl.program_id(0) % TILES * BLOCK_O
    await_former(PDL)
    if SORTED:
        expert = tl.load(block_experts + block)
        if expert < 0:
            return
        choices = tl.load(members + block * BLOCK_M + tl.arange(0, BLOCK_M))
    else:
        expert, choices = _members_of_choice(experts, block, N, FIRST, HELD, N_POWER, BLOCK_M)
        if expert < 0:
            return
    cols = tl.arange(0, BLOCK_I)
    # The operand has rows of gate, then the same rows of up.
    PARTS: tl.constexpr = 2 if GATED else 1
    ROWS: tl.constexpr = PARTS * BLOCK_O
    local = tl.arange(0, ROWS)
    rows = row + local % BLOCK_O
    if OUT % BLOCK_O != 0:
        rows = tl.minimum(rows, OUT - 1)
    rows += (local // BLOCK_O) * OUT
    if MXFP4:
        weight += expert.to(tl.int64) * (PARTS * OUT * IN // 2)
        scales += expert.to(tl.int64) * (PARTS * OUT * IN // _GROUP)
    else:
        w_ptrs = weight + expert.to(tl.int64) * (PARTS * OUT * IN) + (rows * IN)[:, None] + cols[None, :]
    if FP8:
        scales += expert.to(tl.int64) * (PARTS * OUT * GROUPS) + rows * GROUPS
    inside = choices < N
    x_ptrs = x + (tl.where(inside, choices, 0) // DIVISOR).to(tl.int64)[None, :] * IN + cols[:, None]
    acc = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for i0 in tl.range(0, IN, BLOCK_I, num_stages=STAGES):
        if TMA:
            w = operand.load([expert * PARTS, row, i0]).reshape(ROWS, BLOCK_I)
        elif MXFP4:
            if PACKED:
                w = load_mxfp4_bfloat16(weight, scales, rows, i0, IN, IN // 2, IN // _GROUP, BLOCK_I, MASKED)
            else:
                w = load_mxfp4(
                    weight, scales, rows, rows >= 0, i0, IN, IN // 2, IN // _GROUP, BLOCK_I, x.dtype.element_ty
                )
        else:
            w = load_weights(w_ptrs + i0, (i0 + cols < IN)[None, :], MASKED)
        mask = inside[None, :] & (i0 + cols < IN)[:, None] if MASKED else inside[None, :]
        v = tl.load(x_ptrs + i0, mask=mask, other=0.0)
        if FP8:
            w = bfloat16_operand(w) if PACKED else exact_operand(w, v)
        if GROUPS > 1:
            acc += tl.dot(w, v, input_precision="ieee") * tl.load(scales + i0 // _FP8_GROUP)[:, None]
        else:
            acc = tl.dot(w, v, acc, input_precision="ieee")
    if FP8 and GROUPS == 1:
        acc *= tl.load(scales)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + expert.to(tl.int64) * (PARTS * OUT) + rows).to(tl.float32)[:, None]
    offs_o = row + tl.arange(0, BLOCK_O)
    at = choices.to(tl.int64)[None, :] * OUT + offs_o[:, None]
    mask = inside[None, :] & (offs_o < OUT)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_O, BLOCK_M)), (1, 2, 0)))
        tl.store(y + at, gate_and_up(gate, up, ACTIVATION, dtype), mask=mask)
    else:
        tl.store(y + at, acc.to(dtype), mask=mask)


@triton.jit
def combine_kernel(
    y, of_experts, weights, residual, experts, SIZE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    FIRST: tl.constexpr, HELD: tl.constexpr, IS_PART: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one token's sum of `of_experts` (T K, SIZE), in the order of its choices. With IS_PART, choices of other
    `experts` than the HELD ones from FIRST on have no output, and are left out. Grid: (T, SIZE / BLOCK)."""
    dtype: tl.constexpr = y.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < SIZE
    await_former(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        weight = tl.load(weights + token * K + k).to(tl.float32)
        is_here = inside
        if IS_PART:
            expert = tl.load(experts + token * K + k) - FIRST + tl.zeros((BLOCK,), tl.int32)
            is_here = inside & (expert >= 0) & (expert < HELD)
            weight = tl.where(is_here, weight, 0.0)  # a weight that is NaN must not reach what is not here
        total += tl.load(of_experts + (token * K + k) * SIZE + offs, mask=is_here, other=0.0).to(tl.float32) * weight
    rest = total
    if HAS_RESIDUAL:
        rest = tl.load(residual + token * SIZE + offs, mask=inside, other=0.0)
    tl.store(y + token * SIZE + offs, rounded(total, total, rest, False, HAS_RESIDUAL, dtype), mask=inside)
