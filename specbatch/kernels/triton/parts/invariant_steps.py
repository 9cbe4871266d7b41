# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The steps of a program of `invariant_attention.py`: a block of keys, and the end of a split (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.parts.fp8 import operand
from specbatch.kernels.triton.parts.soft_cap import capped


@triton.jit
def add_block(
    acc, total, maximum, q, k_base, v_base, slots, key_ok, visible, sees, scale_log2, cap_log2, dims,
    dim_ok, D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
    ALL_VISIBLE: tl.constexpr,
):  # fmt: skip
    """Add the keys and values of `slots`. Rows whose `sees` is False see none of them, and keep their bits."""
    k_ok, v_ok = dim_ok[:, None], dim_ok[None, :]
    if not ALL_VISIBLE:
        k_ok, v_ok = k_ok & key_ok[None, :], v_ok & key_ok[:, None]
    k = operand(tl.load(k_base + slots[None, :] * D + dims[:, None], mask=k_ok, other=0.0), q)
    scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
    if HAS_CAP:
        scores = capped(scores, cap_log2)
    if not ALL_VISIBLE:
        scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # For a row that has seen no key yet, any finite reference makes every weight an exact zero.
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - reference[:, None]).to(q.dtype)
    decay = tl.exp2(maximum - reference)[:, None]
    v = operand(tl.load(v_base + slots[:, None] * D + dims[None, :], mask=v_ok, other=0.0), q)
    ones = tl.full([BLOCK_N, total.shape[1]], 1.0, q.dtype)
    new_acc = tl.dot(weights, v, acc * decay, input_precision=PRECISION)
    new_total = tl.dot(weights, ones, total * decay, input_precision=PRECISION)
    if not ALL_VISIBLE:
        new_acc = tl.where(sees[:, None], new_acc, acc)
        new_total = tl.where(sees[:, None], new_total, total)
        new_maximum = tl.where(sees, new_maximum, maximum)
    return new_acc, new_total, new_maximum


@triton.jit
def nothing(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ONES: tl.constexpr):
    """Return the sums of values and of weights, and the largest score, before any key."""
    acc, total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.zeros([BLOCK_M, ONES], tl.float32)
    return acc, total, tl.full([BLOCK_M], float("-inf"), tl.float32)


@triton.jit
def slots_of(table, block, columns, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Return the slots of a block of keys that ends before the sequence does."""
    keys = block * BLOCK_N + columns
    if PAGE % BLOCK_N == 0:
        page = tl.load(table + block * BLOCK_N // PAGE).to(tl.int64)
        return page * PAGE + (block * BLOCK_N) % PAGE + columns
    else:
        return tl.load(table + keys // PAGE).to(tl.int64) * PAGE + keys % PAGE


@triton.jit
def merge(acc, total, maximum, split_acc, split_total, split_maximum):
    """Add the result of a split."""
    new_maximum = tl.maximum(maximum, split_maximum)
    reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    share, split_share = tl.exp2(maximum - reference)[:, None], tl.exp2(split_maximum - reference)[:, None]
    return acc * share + split_acc * split_share, total * share + split_total * split_share, new_maximum


@triton.jit
def merge_seen(acc, total, maximum, split_acc, split_total, split_maximum, sees):
    """Add the result of a split to the rows that see any of its keys."""
    new_acc, new_total, new_maximum = merge(acc, total, maximum, split_acc, split_total, split_maximum)
    acc = tl.where(sees[:, None], new_acc, acc)
    return acc, tl.where(sees[:, None], new_total, total), tl.where(sees, new_maximum, maximum)


@triton.jit
def store_split(
    partial_ptr, sums_ptr, at, cell, local, row_ok, split_acc, split_total, split_maximum,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tl.store(partial_ptr + at * ROWS * BLOCK_D + cell, split_acc, mask=row_ok[:, None])
    tl.store(sums_ptr + at * 2 * ROWS + local, split_maximum, mask=row_ok)
    tl.store(sums_ptr + at * 2 * ROWS + ROWS + local, tl.max(split_total, 1), mask=row_ok)


@triton.jit
def sees_any(limit, oldest, low, high):
    """Return whether a row, which sees the keys [oldest, limit), sees a key of [low, high)."""
    return (limit > low) & (oldest < high)
