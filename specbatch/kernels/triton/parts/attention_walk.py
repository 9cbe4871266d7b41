# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The loop of a program of `attention.py` over its blocks of keys (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.parts.fp8 import unpack_pairs
from specbatch.kernels.triton.parts.soft_cap import capped


@triton.jit
def walk(
    acc, odd_acc, maximum, total, q, k_base, v_base, table, first_block, stop_block, end, start, query, row_ok, token,
    position, mask_ptr, mask_start, mask_words, window, scale_log2, cap_log2, dims, dim_ok, step,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr,
    ALL_VISIBLE: tl.constexpr,
):  # fmt: skip
    """Merge every `step`-th block of keys in [first_block, stop_block). ALL_VISIBLE: each row sees all their keys; the
    bits are the same. PAIRS: values are read as pairs of columns, and `odd_acc` has the sums of the second ones."""
    if PAIRS:
        pairs = tl.arange(0, dims.shape[0] // 2)
        pair_ok = pairs < D // 2
    for block in range(first_block, stop_block, step):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        key_ok = keys < end
        if PAGE % BLOCK_N == 0:
            page = tl.load(table + block * BLOCK_N // PAGE).to(tl.int64)
            slots = page * PAGE + (block * BLOCK_N) % PAGE + tl.arange(0, BLOCK_N)
        else:
            page = tl.load(table + keys // PAGE, mask=key_ok, other=0).to(tl.int64)
            slots = page * PAGE + keys % PAGE
        k_ptrs = k_base + slots[None, :] * D + dims[:, None]
        k = tl.load(k_ptrs, mask=dim_ok[:, None] & (ALL_VISIBLE | key_ok[None, :]), other=0.0).to(q.dtype)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale_log2
        if HAS_CAP:
            scores = capped(scores, cap_log2)
        if not ALL_VISIBLE:
            if HAS_MASK:
                bit = keys - mask_start
                word = tl.load(
                    mask_ptr + token[:, None] * mask_words + (bit // 32)[None, :],
                    mask=((bit >= 0) & (bit < mask_words * 32))[None, :] & row_ok[:, None],
                    other=0,
                )
                visible = (bit < 0)[None, :] | (((word >> (bit & 31)[None, :]) & 1) != 0)
                visible = visible & key_ok[None, :]
            else:
                visible = keys[None, :] <= (start + query)[:, None]
            if HAS_WINDOW:
                visible = visible & (keys[None, :] > (position - window)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no key yet: any finite reference makes every weight an exact zero.
        reference = new_maximum if ALL_VISIBLE else tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(maximum - reference)
        total = total * decay + tl.sum(weights, 1)
        if PAIRS:
            v_ptrs = v_base + slots[:, None] * (D // 2) + pairs[None, :]
            packed = tl.load(v_ptrs, mask=pair_ok[None, :] & (ALL_VISIBLE | key_ok[:, None]), other=0)
            v, odd_v = unpack_pairs(packed)
            odd_acc = odd_acc * decay[:, None] + tl.dot(weights.to(q.dtype), odd_v)
        else:
            v_ptrs = v_base + slots[:, None] * D + dims[None, :]
            v = tl.load(v_ptrs, mask=dim_ok[None, :] & (ALL_VISIBLE | key_ok[:, None]), other=0.0).to(q.dtype)
        acc = acc * decay[:, None] + tl.dot(weights.to(q.dtype), v, input_precision=PRECISION)
        maximum = new_maximum
    return acc, odd_acc, maximum, total


@triton.jit
def merge_prefix(
    acc, maximum, total, prefix_ptr, weights_ptr, num_parts, num_rows, at, row_ok, dims, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Add the sums that `prefixes.py` has computed for the rows at `at`."""
    for part in range(num_parts):
        row = part * num_rows + at
        peak = tl.load(weights_ptr + row * 2, mask=row_ok, other=float("-inf"))
        weight = tl.load(weights_ptr + row * 2 + 1, mask=row_ok, other=0.0)
        sums = tl.load(prefix_ptr + row[:, None] * BLOCK_D + dims[None, :], mask=row_ok[:, None], other=0.0)
        new_maximum = tl.maximum(maximum, peak)
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay, share = tl.exp2(maximum - reference), tl.exp2(peak - reference)
        total = total * decay + weight * share
        acc = acc * decay[:, None] + sums * share[:, None]
        maximum = new_maximum
    return acc, maximum, total
