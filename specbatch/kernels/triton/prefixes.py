# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Attention of groups of sequences over the first pages that they share (Triton): cascade attention.

The queries of all sequences of a group are rows of the same tiles, which fill tensor cores, and each tile reads the
shared keys and values once. Nothing is masked, because shared tokens come before all new ones. `attention.py` then
computes each sequence's own part and merges the sums (as FlashInfer's cascade and Hydragen, Juravsky et al. 2024, do).

Groups are read on the device. A fixed number of programs takes the tiles in turn, so a launch without groups ends at
once.

Shape suffixes as in `kernels/torch/model.py`; rows of a tile are (sequence, new token, query head) triples; P parts of
the shared keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.batch import PREFIX_UNIT, PagedBatch, PrefixParts
from specbatch.kernels.triton.parts.attention_tile import Tile, padded, prefix_tile_for
from specbatch.kernels.triton.parts.attention_walk import walk
from specbatch.kernels.triton.parts.fp8 import half_queries
from specbatch.kernels.triton.parts.launch import await_former, dependent_launch, launch, launch_options
from specbatch.kernels.triton.parts.shared_memory import shared_bytes
from specbatch.kernels.triton.parts.soft_cap import scales

_PROGRAMS = 264  # two for each multiprocessor of an H200; it changes no bit


@triton.jit
def _attend_prefixes(
    q_ptr, k_ptr, v_ptr, table_ptr, query_starts_ptr, sizes_ptr, firsts_ptr, tokens_ptr, members_ptr,
    sums_ptr, weights_ptr, scale_log2, cap_log2, stride_kv_head, stride_table, num_rows,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, UNIT: tl.constexpr,
    NUM_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_former(PDL)
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    ROWS: tl.constexpr = QUERIES * GROUP  # the rows of a sequence
    groups = tl.arange(0, BLOCK_G)
    tiles_G = tl.cdiv(tl.load(sizes_ptr + groups, mask=groups < NUM_GROUPS, other=0) * ROWS, BLOCK_M)
    ends_G = tl.cumsum(tiles_G, 0)
    num_jobs = tl.sum(tiles_G) * (NUM_KV_HEADS * PARTS)
    local, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    dim_ok = dims < D
    head_stride = tl.zeros((), tl.int64) + stride_kv_head
    for job in range(tl.program_id(0), num_jobs, tl.num_programs(0)):
        # Tiles that read the same keys follow each other, so that the second-level cache has them.
        part, kv_head = job % PARTS, job // PARTS % NUM_KV_HEADS
        tile = job // (PARTS * NUM_KV_HEADS)
        group = tl.sum((ends_G <= tile).to(tl.int32))
        tile -= tl.sum(tl.where(groups < group, tiles_G, 0))
        size, first = tl.load(sizes_ptr + group), tl.load(firsts_ptr + group)
        tokens = tl.load(tokens_ptr + group)
        part_blocks = tl.cdiv(tokens // UNIT, PARTS) * (UNIT // BLOCK_N)
        first_block = part * part_blocks
        stop_block = tl.minimum(first_block + part_blocks, tokens // BLOCK_N)
        if first_block < stop_block:
            rows = tile * BLOCK_M + local
            member = rows // ROWS
            row_ok = member < size
            seq = tl.load(members_ptr + first + tl.minimum(member, size - 1))
            first_query = tl.load(query_starts_ptr + seq)
            query = rows % ROWS // GROUP
            row_ok = row_ok & (query < tl.load(query_starts_ptr + seq + 1) - first_query)
            at = (first_query + query).to(tl.int64) * NUM_HEADS + kv_head * GROUP + rows % GROUP
            q = tl.load(q_ptr + at[:, None] * D + dims[None, :], mask=row_ok[:, None] & dim_ok[None, :], other=0.0)
            scores_scale = scale_log2
            if HALF:
                q, unit = half_queries(q)
                scores_scale = (unit * scale_log2)[:, None]
            # The shared pages are those of the group's first sequence.
            table = table_ptr + tl.load(members_ptr + first).to(tl.int64) * stride_table
            maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            acc, _, maximum, total = walk(
                acc, acc, maximum, total, q, k_ptr + kv_head * head_stride, v_ptr + kv_head * head_stride, table,
                first_block, stop_block, tokens, 0, query, row_ok, query, query, sizes_ptr, 0, 0, 0, scores_scale,
                cap_log2, dims, dim_ok, 1, D, PAGE, BLOCK_N, False, False, HAS_CAP, PRECISION, False, True,
            )  # fmt: skip
            row = part * num_rows + at
            tl.store(sums_ptr + row[:, None] * BLOCK_D + dims[None, :], acc, mask=row_ok[:, None])
            tl.store(weights_ptr + row * 2, maximum, mask=row_ok)
            tl.store(weights_ptr + row * 2 + 1, total, mask=row_ok)


def attend_prefixes(
    q_THD: Tensor,
    kv_2KSD: Tensor,
    batch: PagedBatch,
    scale: float,
    num_parts: int = 1,
    soft_cap: float | None = None,
) -> PrefixParts:
    """See `kernels/torch/prefixes.py`."""
    _, num_heads, head_dim = q_THD.shape
    rows = batch.max_queries * (num_heads // kv_2KSD.shape[1])
    tile = prefix_tile_for(rows, head_dim, q_THD.element_size(), shared_bytes(q_THD))
    return attend_prefixes_by(tile, _PROGRAMS, q_THD, kv_2KSD, batch, scale, num_parts, soft_cap)


def attend_prefixes_by(
    tile: Tile,
    programs: int,
    q_THD: Tensor,
    kv_2KSD: Tensor,
    batch: PagedBatch,
    scale: float,
    num_parts: int,
    soft_cap: float | None = None,
) -> PrefixParts:
    """Run `attend_prefixes` with a given tile and number of programs."""
    (num_tokens, num_heads, head_dim), num_kv_heads = q_THD.shape, kv_2KSD.shape[1]
    assert batch.groups is not None
    assert PREFIX_UNIT % tile.block_n == 0, tile
    groups, block_d = batch.groups, padded(head_dim)
    sums = torch.empty((num_parts, num_tokens, num_heads, block_d), dtype=torch.float32, device=q_THD.device)
    weights = torch.empty((num_parts, num_tokens, num_heads, 2), dtype=torch.float32, device=q_THD.device)
    num_groups, num_seqs = len(groups.sizes_G), len(groups.members_B)
    rows = num_seqs * batch.max_queries * (num_heads // num_kv_heads)
    max_jobs = (rows // tile.block_m + min(num_groups, num_seqs)) * num_kv_heads * num_parts
    pdl = dependent_launch(q_THD)
    launch(
        _attend_prefixes, (min(programs, max_jobs),),
        q_THD, kv_2KSD[0], kv_2KSD[1], batch.page_table_BP, batch.query_starts, groups.sizes_G, groups.firsts_G,
        groups.tokens_G, groups.members_B, sums, weights, *scales(scale, soft_cap), kv_2KSD.stride(1),
        batch.page_table_BP.stride(0), num_tokens * num_heads,
        NUM_HEADS=num_heads, GROUP=num_heads // num_kv_heads, QUERIES=batch.max_queries, D=head_dim, BLOCK_D=block_d,
        PAGE=batch.page_size, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, PARTS=num_parts, UNIT=PREFIX_UNIT,
        NUM_GROUPS=num_groups, BLOCK_G=triton.next_power_of_2(num_groups), HAS_CAP=soft_cap is not None,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        HALF=tile.fp8 != "widen", PDL=pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_options(pdl),
    )  # fmt: skip
    return PrefixParts(sums, weights)
