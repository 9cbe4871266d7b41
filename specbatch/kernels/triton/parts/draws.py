# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Draws from (unnormalised) probabilities: first the block, then the token within it (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def pick_block(sums, target, blocks):
    """Return the first block at which the running sum exceeds `target`, and the sum before it."""
    hit = (sums > 0.0) & (tl.cumsum(sums, 0) > target)
    # If no sum exceeds it, because of a rounding, this is the last block that holds anything.
    block = tl.min(tl.where(hit, blocks, tl.max(tl.where(sums > 0.0, blocks, 0))))
    return block, tl.sum(tl.where(blocks < block, sums, 0.0))


@triton.jit
def pick_id(weight, before, target, ids):
    """Return the token within a block in the same way. It has a weight above 0, unless all are 0."""
    hit = (weight > 0.0) & (before + tl.cumsum(weight, 0) > target)
    return tl.min(tl.where(hit, ids, tl.max(tl.where(weight > 0.0, ids, 0))))


def blocks_of(x_RV: Tensor) -> tuple[int, int, int]:
    """Return the number of tokens in a block, of blocks in a row (rounded up to a power of two), and of warps."""
    assert x_RV.stride(-1) == 1
    vocab = x_RV.shape[-1]
    block = min(4096, triton.next_power_of_2(vocab))
    return block, triton.next_power_of_2(triton.cdiv(vocab, block)), 16 if block == 4096 else 4


@triton.jit
def probabilities(
    p_ptr, q_ptr, inverse_ptr, ids, vocab, q_width, SUBTRACT: tl.constexpr, MAPPED: tl.constexpr, excluded=-1
):  # fmt: skip
    """Return p, or max(p - q, 0), as float64. The token `excluded` has 0; -1: no token is excluded."""
    real = ids < vocab
    p = tl.load(p_ptr + ids, mask=real, other=0.0).to(tl.float64)
    if SUBTRACT:
        if MAPPED:
            draft_id = tl.load(inverse_ptr + ids, mask=real, other=-1)
            q = tl.load(q_ptr + draft_id, mask=draft_id >= 0, other=0.0)
        else:
            q = tl.load(q_ptr + ids, mask=ids < q_width, other=0.0)
        p = tl.maximum(p - q.to(tl.float64), 0.0)
    return tl.where((p > 0.0) & (ids != excluded), p, 0.0)


@triton.jit
def block_sums(
    p_ptr, q_ptr, inverse_ptr, vocab, q_width,
    SUBTRACT: tl.constexpr, MAPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, excluded=-1,
):  # fmt: skip
    lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.float64)
    for i in range(0, tl.cdiv(vocab, BLOCK)):
        p = probabilities(p_ptr, q_ptr, inverse_ptr, i * BLOCK + lanes, vocab, q_width, SUBTRACT, MAPPED, excluded)
        sums = tl.where(blocks == i, tl.sum(p), sums)
    return sums
