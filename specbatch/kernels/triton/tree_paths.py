# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The slots of the keys of each node of a draft tree (Triton).

Shape suffixes: B sequences, T packed tokens, W words of a mask, J = 32 * W bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.kernels.triton.parts.launch import launch


class TreePaths(NamedTuple):
    """The paths of the nodes of a masked `PagedBatch`."""

    limits_T: Tensor  # int32, the number of keys that a node sees: those before `mask_starts`, and its path
    leaves_T: Tensor  # int32, a leaf whose path has the node, by its index among the sequence's new tokens
    paths_TJ: Tensor  # int32, the mask bits of the nodes of the path, from the root down; the rest is not written


@triton.jit
def _tree_paths(
    mask_ptr, mask_starts_ptr, starts_ptr, query_starts_ptr, limits_ptr, leaves_ptr, paths_ptr, num_bits,
    BITS: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    query, seq = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - first
    if query >= num_queries:
        return
    mask_start = tl.load(mask_starts_ptr + seq)
    token, num_words = first + query, num_bits // 32
    bits = tl.arange(0, BITS)
    words = tl.load(mask_ptr + token * num_words + bits // 32, mask=bits < num_bits, other=0)
    seen = (words >> (bits & 31)) & 1
    tl.store(paths_ptr + token * num_bits + tl.cumsum(seen, 0) - 1, bits, mask=seen != 0)
    tl.store(limits_ptr + token, mask_start + tl.sum(seen))
    # Nodes come after their parents: the last node that sees this one has no child.
    own = tl.load(starts_ptr + seq) - mask_start + query
    others = tl.arange(0, QUERIES)
    words = tl.load(mask_ptr + (first + others) * num_words + own // 32, mask=others < num_queries, other=0)
    sees_this = ((words >> (own & 31)) & 1) != 0
    tl.store(leaves_ptr + token, tl.max(tl.where(sees_this, others, query)))


def tree_paths(batch: PagedBatch) -> TreePaths:
    """Find the paths of a batch with a mask, in which every token sees itself."""
    assert batch.mask_TW is not None
    num_tokens, num_words = batch.mask_TW.shape
    limits, leaves = torch.empty((2, num_tokens), dtype=torch.int32, device=batch.mask_TW.device)
    paths = torch.empty((num_tokens, num_words * 32), dtype=torch.int32, device=batch.mask_TW.device)
    launch(
        _tree_paths, (batch.max_queries, batch.starts_B.shape[0]),
        batch.mask_TW, batch.mask_starts_B, batch.starts_B, batch.query_starts, limits, leaves, paths, num_words * 32,
        BITS=triton.next_power_of_2(num_words * 32), QUERIES=triton.next_power_of_2(batch.max_queries), num_warps=1,
    )  # fmt: skip
    return TreePaths(limits, leaves, paths)
