# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Attention whose bits depend on a row alone (Triton), and not on the batch, the number of new tokens, the prefill
chunk or the draft tree in which it is computed.

The operations for a query, and their order, are a function of its position:

- Keys are read in blocks that begin at multiples of BLOCK_N, and splits of blocks begin where `parts/attention_splits`
  says. Each split has a separate softmax. The splits are merged in order, by one program in registers, or by the last
  of several programs from memory, with the same arithmetic.
- Within a block only tensor cores add: scores, values, and also the weights, which are multiplied by ones. They add
  keys in order with every tile (see `models/linears/invariant.py`), while a sum over a tile's columns would depend on
  its layout. All other operations are exact (maxima, selections) or a function of single elements. No multiplication is
  fused with an addition, because the compiler could do so in one kernel and not in another.
- A key that a query does not see has the weight 0, wherever it is. A block that a query does not see keeps its bits.
- A node of a tree sees its ancestors in other slots than in plain decoding. From the block on in which the trees' slots
  begin, keys are read in the order of a path, for one leaf after the other: the nodes of that path take the result, and
  the others ignore it. This costs a block or two for each leaf.

Shape suffixes as in `kernels/torch/model.py`; rows of a tile are (new token, query head of the group) pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.kernels.triton.parts.attention_splits import SplitPlan, num_ones, stored_rows
from specbatch.kernels.triton.parts.attention_tile import Tile, padded
from specbatch.kernels.triton.parts.fp8 import half_queries
from specbatch.kernels.triton.parts.invariant_steps import (
    add_block,
    merge,
    merge_seen,
    nothing,
    sees_any,
    slots_of,
    store_split,
)
from specbatch.kernels.triton.parts.launch import await_former, dependent_launch, launch, launch_options
from specbatch.kernels.triton.parts.sinks import merge_sink, sink_scores
from specbatch.kernels.triton.parts.soft_cap import scales
from specbatch.kernels.triton.tree_paths import TreePaths
from specbatch.kernels.triton.workspace import Workspace


@triton.jit
def _store(
    out_ptrs, out_ok, acc, total, maximum, sinks_ptr, head, v_scale, HAS_SINKS: tl.constexpr, IS_FP8: tl.constexpr
):  # fmt: skip
    if HAS_SINKS:
        acc, total = merge_sink(acc, total, maximum, sink_scores(sinks_ptr, head))
    total_M = tl.max(total, 1)  # the columns are equal
    out = acc / tl.where(total_M == 0.0, 1.0, total_M)[:, None]
    if IS_FP8:
        out = out * v_scale
    tl.store(out_ptrs, out.to(out_ptrs.dtype.element_ty), mask=out_ok)


@triton.jit(do_not_specialize=["num_seqs"])
def _attend(
    q_ptr, out_ptr, k_ptr, v_ptr, table_ptr, starts_ptr, query_starts_ptr, positions_ptr,
    mask_starts_ptr, limits_ptr, leaves_ptr, paths_ptr, bounds_ptr, ranks_ptr, listed_ptr,
    partial_ptr, sums_ptr, counter_ptr, sinks_ptr, scale_log2, cap_log2, window, stride_kv_head, stride_table, num_bits,
    num_seqs, v_scale,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BOUNDS: tl.constexpr, PARTS: tl.constexpr, LISTED: tl.constexpr,
    MAX_SPLITS: tl.constexpr, ROWS: tl.constexpr, ONES: tl.constexpr, FLAT: tl.constexpr, HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    IS_FP8: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_former(PDL)
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    kv_head, row_block, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # A sequence has `parts` programs. The first has the number of the sequence, and the others come after all
    # sequences.
    part, parts, rank = seq * 0, seq * 0 + PARTS, seq
    if PARTS > 1:
        other = seq - num_seqs
        part = tl.where(other >= 0, 1 + other % (PARTS - 1), 0)
        rank = tl.where(other >= 0, other // (PARTS - 1), seq)
        if LISTED:
            found = tl.load(listed_ptr + tl.where(other >= 0, rank, 0))
            own = tl.load(ranks_ptr + tl.minimum(seq, num_seqs - 1))
            seq = tl.where(other >= 0, found, seq)
            rank = tl.where(other >= 0, rank, own)
            parts = tl.where(rank >= 0, PARTS, 1)
            if seq < 0:
                return
        else:
            seq = rank

    first = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - first
    if row_block * BLOCK_M >= num_queries * GROUP:
        return
    start = tl.load(starts_ptr + seq)
    local = tl.arange(0, BLOCK_M)
    rows = row_block * BLOCK_M + local
    query = rows // GROUP
    row_ok = query < num_queries
    token = first + tl.minimum(query, num_queries - 1)
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < D
    # A row sees the keys [oldest, limit), by their position. Those before `num_shared` have one slot for all rows.
    if HAS_TREE:
        limit = tl.load(limits_ptr + token)
        leaf_of = tl.load(leaves_ptr + token)
        mask_start = tl.load(mask_starts_ptr + seq)
        num_shared = mask_start // BLOCK_N * BLOCK_N
        num_seen = num_shared  # the keys that every row sees
    else:
        limit = start + tl.minimum(query, num_queries - 1) + 1
        num_shared = tl.max(limit, 0)
        num_seen = start + row_block * BLOCK_M // GROUP + 1
    end = tl.max(limit, 0)
    oldest = limit * 0
    if HAS_WINDOW:
        oldest = tl.maximum(tl.load(positions_ptr + token).to(tl.int32) - window + 1, 0)
        num_seen = num_seen * 0
    begin = tl.min(oldest, 0) // BLOCK_N * BLOCK_N
    borders = tl.minimum(tl.load(bounds_ptr + tl.arange(0, BOUNDS)), end)
    num_splits = tl.sum((borders < end).to(tl.int32))
    parts = tl.minimum(parts, num_splits)
    if part >= parts:
        return
    # A program has the splits that begin in its share of the keys.
    split, stop_split = part * 0, num_splits
    if PARTS > 1:
        split = tl.sum((borders * parts < part * end).to(tl.int32))
        stop_split = tl.sum((borders * parts < (part + 1) * end).to(tl.int32))

    q_offsets = (token.to(tl.int64) * NUM_HEADS + head)[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_ok[:, None] & dim_ok[None, :], other=0.0)
    if HALF:
        q, unit = half_queries(q)
        scale_log2 = (unit * scale_log2)[:, None]
    k_base = k_ptr + kv_head.to(tl.int64) * stride_kv_head
    v_base = v_ptr + kv_head.to(tl.int64) * stride_kv_head
    table = table_ptr + seq.to(tl.int64) * stride_table
    columns = tl.arange(0, BLOCK_N)
    base = ((rank * tl.num_programs(1) + row_block) * NUM_KV_HEADS + kv_head).to(tl.int64) * MAX_SPLITS
    cell = local[:, None] * BLOCK_D + dims[None, :]

    acc, total, maximum = nothing(BLOCK_M, BLOCK_D, ONES)
    split_acc, split_total, split_maximum = nothing(BLOCK_M, BLOCK_D, ONES)
    # Blocks that every row sees to their ends need no comparisons. With few rows, one loop goes over those of all
    # splits, so that loads overlap; with many rows, its values would not fit in registers.
    stop_seen = begin // BLOCK_N
    if FLAT:
        split_high = tl.load(bounds_ptr + split + 1)
        first_block = tl.maximum(tl.load(bounds_ptr + split), begin) // BLOCK_N
        stop_seen = tl.maximum(tl.minimum(num_seen, tl.load(bounds_ptr + stop_split)) // BLOCK_N, first_block)
        for block in range(first_block, stop_seen):
            if block * BLOCK_N == split_high:
                if PARTS > 1 and parts > 1:
                    store_split(
                        partial_ptr, sums_ptr, base + split, cell, local, row_ok, split_acc, split_total,
                        split_maximum, ROWS, BLOCK_D,
                    )  # fmt: skip
                acc, total, maximum = merge(acc, total, maximum, split_acc, split_total, split_maximum)
                split += 1
                split_high = tl.load(bounds_ptr + split + 1)
                split_acc, split_total, split_maximum = nothing(BLOCK_M, BLOCK_D, ONES)
            split_acc, split_total, split_maximum = add_block(
                split_acc, split_total, split_maximum, q, k_base, v_base,
                slots_of(table, block, columns, BLOCK_N, PAGE), row_ok, row_ok, row_ok,
                scale_log2, cap_log2, dims, dim_ok, D, BLOCK_N, HAS_CAP, PRECISION, True,
            )  # fmt: skip
    for last in range(split, stop_split):
        split_low, split_high = tl.load(bounds_ptr + last), tl.load(bounds_ptr + last + 1)
        low, high = tl.maximum(split_low, begin), tl.minimum(split_high, end)
        next_block = tl.maximum(low // BLOCK_N, stop_seen)
        if not FLAT:
            stop_now = tl.maximum(tl.minimum(num_seen, high) // BLOCK_N, next_block)
            for block in range(next_block, stop_now):
                split_acc, split_total, split_maximum = add_block(
                    split_acc, split_total, split_maximum, q, k_base, v_base,
                    slots_of(table, block, columns, BLOCK_N, PAGE), row_ok, row_ok, row_ok,
                    scale_log2, cap_log2, dims, dim_ok, D, BLOCK_N, HAS_CAP, PRECISION, True,
                )  # fmt: skip
            next_block = stop_now
        stop_shared = tl.cdiv(tl.minimum(num_shared, high), BLOCK_N)
        for block in range(next_block, stop_shared):
            keys = block * BLOCK_N + columns
            key_ok = keys < end
            slots = tl.load(table + keys // PAGE, mask=key_ok, other=0).to(tl.int64) * PAGE + keys % PAGE
            visible = (keys[None, :] < limit[:, None]) & (keys[None, :] >= oldest[:, None])
            sees = sees_any(limit, oldest, block * BLOCK_N, block * BLOCK_N + BLOCK_N)
            split_acc, split_total, split_maximum = add_block(
                split_acc, split_total, split_maximum, q, k_base, v_base, slots, key_ok, visible, sees,
                scale_log2, cap_log2, dims, dim_ok, D, BLOCK_N, HAS_CAP, PRECISION, False,
            )  # fmt: skip
        if HAS_TREE:
            first_own = tl.maximum(low, num_shared) // BLOCK_N
            for leaf in range(0, num_queries):
                on_path = row_ok & (leaf_of == leaf)
                leaf_end = tl.minimum(tl.load(limits_ptr + first + leaf), split_high)
                has_rows = tl.max(on_path.to(tl.int32), 0) > 0
                stop_own = tl.where(has_rows, tl.cdiv(leaf_end, BLOCK_N), first_own)
                for block in range(first_own, stop_own):
                    keys = block * BLOCK_N + columns
                    key_ok = keys < leaf_end
                    depth = keys - mask_start
                    on_tree = key_ok & (depth >= 0)
                    bit = tl.load(paths_ptr + (first + leaf) * num_bits + depth, mask=on_tree, other=0)
                    index = tl.where(on_tree, mask_start + bit, keys)
                    slots = tl.load(table + index // PAGE, mask=key_ok, other=0).to(tl.int64) * PAGE + index % PAGE
                    visible = (keys[None, :] < limit[:, None]) & (keys[None, :] >= oldest[:, None])
                    sees = on_path & sees_any(limit, oldest, block * BLOCK_N, block * BLOCK_N + BLOCK_N)
                    split_acc, split_total, split_maximum = add_block(
                        split_acc, split_total, split_maximum, q, k_base, v_base, slots, key_ok, visible, sees,
                        scale_log2, cap_log2, dims, dim_ok, D, BLOCK_N, HAS_CAP, PRECISION, False,
                    )  # fmt: skip
        if PARTS > 1 and parts > 1:
            store_split(
                partial_ptr, sums_ptr, base + last, cell, local, row_ok, split_acc, split_total, split_maximum,
                ROWS, BLOCK_D,
            )  # fmt: skip
        sees = sees_any(limit, oldest, split_low, split_high)
        acc, total, maximum = merge_seen(acc, total, maximum, split_acc, split_total, split_maximum, sees)
        split_acc, split_total, split_maximum = nothing(BLOCK_M, BLOCK_D, ONES)

    out_ptrs, out_ok = out_ptr + q_offsets, row_ok[:, None] & dim_ok[None, :]
    if PARTS == 1 or parts == 1:
        _store(out_ptrs, out_ok, acc, total, maximum, sinks_ptr, head, v_scale, HAS_SINKS, IS_FP8)
    else:
        counter = counter_ptr + (rank * tl.num_programs(1) + row_block) * NUM_KV_HEADS + kv_head
        tl.debug_barrier()  # every thread has stored its part before the counter is raised
        arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if arrived == parts - 1:
            tl.debug_barrier()
            acc, total, maximum = nothing(BLOCK_M, BLOCK_D, ONES)
            for split in range(0, num_splits):
                at = base + split
                sums = sums_ptr + at * 2 * ROWS + local
                split_maximum = tl.load(sums, mask=row_ok, other=float("-inf"), cache_modifier=".cg")
                split_sum = tl.load(sums + ROWS, mask=row_ok, other=0.0, cache_modifier=".cg")
                split_total = tl.broadcast_to(split_sum[:, None], [BLOCK_M, ONES])
                split_acc = tl.load(
                    partial_ptr + at * ROWS * BLOCK_D + cell, mask=row_ok[:, None], other=0.0, cache_modifier=".cg"
                )
                sees = sees_any(limit, oldest, tl.load(bounds_ptr + split), tl.load(bounds_ptr + split + 1))
                acc, total, maximum = merge_seen(acc, total, maximum, split_acc, split_total, split_maximum, sees)
            _store(out_ptrs, out_ok, acc, total, maximum, sinks_ptr, head, v_scale, HAS_SINKS, IS_FP8)
            tl.store(counter, 0)  # ready for the next launch


def attend(
    tile: Tile,
    q_THD: Tensor,
    kv_2KSD: Tensor,
    batch: PagedBatch,
    paths: TreePaths | None,
    splits: SplitPlan,
    listed: tuple[Tensor, Tensor] | None,
    bounds: Tensor,
    workspace: Workspace,
    scale: float,
    window: int | None = None,
    v_scale: float = 1.0,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `kernels/torch/attention.py`. `paths`: the paths of a batch with a mask. `listed`: the long sequences, see
    `long_sequences`; None: all have `splits.parts` programs. `bounds`: int32, the first key of each split; their number
    is a power of two."""
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads = kv_2KSD.shape[1]
    group = num_heads // num_kv_heads
    block_d = padded(head_dim)
    row_blocks = triton.cdiv(batch.max_queries * group, tile.block_m)
    num_seqs = batch.starts_B.shape[0]
    rows = stored_rows(batch.max_queries * group, tile)
    assert (listed is None) == (splits.num_seqs == num_seqs), "some sequences are listed, or all have programs"
    assert (paths is None) == (batch.mask_TW is None), "the paths are those of the mask"
    tiles = splits.num_seqs * row_blocks * num_kv_heads if splits.parts > 1 else 0
    limits, leaves, nodes = (batch.starts_B,) * 3 if paths is None else paths
    out = torch.empty_like(q_THD)
    pdl = dependent_launch(q_THD)
    is_fp8 = kv_2KSD.dtype == torch.float8_e4m3fn
    assert tile.fp8 != "pairs", "this kernel does not read values as pairs"
    # The interpreter does not have this option.
    options = {**launch_options(pdl), **({"enable_fp_fusion": False} if q_THD.is_cuda else {})}
    launch(
        _attend, (num_kv_heads, row_blocks, num_seqs + (splits.parts - 1) * splits.num_seqs),
        q_THD, out, kv_2KSD[0], kv_2KSD[1], batch.page_table_BP, batch.starts_B, batch.query_starts,
        batch.positions_T, batch.starts_B if batch.mask_starts_B is None else batch.mask_starts_B,
        limits, leaves, nodes, bounds, *(listed or (batch.starts_B, batch.starts_B)),
        *workspace.reserve(tiles, splits.max_splits, rows, block_d),
        q_THD if sinks_H is None else sinks_H, *scales(scale, soft_cap), window or 0, kv_2KSD.stride(1),
        batch.page_table_BP.stride(0), nodes.stride(0), num_seqs, v_scale,
        NUM_HEADS=num_heads, GROUP=group, D=head_dim, BLOCK_D=block_d, PAGE=batch.page_size,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BOUNDS=bounds.shape[0], PARTS=splits.parts,
        LISTED=listed is not None, MAX_SPLITS=splits.max_splits, ROWS=rows, ONES=num_ones(tile), FLAT=tile.block_m < 64,
        HAS_TREE=paths is not None, HAS_WINDOW=window is not None, HAS_CAP=soft_cap is not None,
        HAS_SINKS=sinks_H is not None, PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        IS_FP8=is_fp8, HALF=is_fp8 and tile.fp8 != "widen", PDL=pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **options,
    )  # fmt: skip
    return out
