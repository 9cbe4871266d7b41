# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Attention over a paged cache in one stage (Triton): decode, verification of chains and trees, and prefill.

Old and new tokens are treated alike: a program walks over a sequence's slots in blocks that start at multiples of
BLOCK_N and merges them in order (online softmax, Milakov and Gimelshein 2018). A block that a query does not see
changes no bit of its result. So with one tile, a token's output does not depend on how its sequence is divided into
prefix and new tokens. (The unified kernel of SGLang's pull request 11536 has the same aim.) Tiles of few and of many
rows can differ in a last bit; `invariant_attention.py` has kernels whose tiles do not.

Tokens that the sequences of a group share can be left to `prefixes.py`, which reads them once for all sequences. Then
a program begins after these tokens, and merges the sums of `prefixes.py`.

With splits, split s takes blocks s, s + NUM_SPLITS, ... The number of splits does not depend on lengths, so the host
plans nothing. The last split to finish merges all of them, in order, so that no second launch is needed. If a batch has
enough programs, only sequences that the device has listed as long are split.

Lengths, page tables and masks are read on the device, so that a captured graph follows them.

Shape suffixes as in `kernels/torch/model.py`; rows of a tile are (new token, query head of the group) pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.batch import PREFIX_UNIT, PagedBatch, PrefixParts
from specbatch.kernels.triton.parts.attention_tile import Tile, padded, tile_for
from specbatch.kernels.triton.parts.attention_walk import merge_prefix, walk
from specbatch.kernels.triton.parts.fp8 import half_queries
from specbatch.kernels.triton.parts.launch import await_former, dependent_launch, launch, launch_options
from specbatch.kernels.triton.parts.shared_memory import shared_bytes
from specbatch.kernels.triton.parts.sinks import sink_scores
from specbatch.kernels.triton.parts.soft_cap import scales
from specbatch.kernels.triton.workspace import Workspace


@triton.jit
def _result(acc, total, v_scale, IS_FP8: tl.constexpr):
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    return out * v_scale if IS_FP8 else out


@triton.jit(do_not_specialize=["num_seqs", "num_rows"])
def _attend(
    q_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    starts_ptr,
    query_starts_ptr,
    positions_ptr,
    mask_ptr,
    mask_starts_ptr,
    partial_ptr,
    sums_ptr,
    counter_ptr,
    index_ptr,
    listed_ptr,
    prefix_tokens_ptr,
    prefix_ptr,
    prefix_weights_ptr,
    sinks_ptr,
    scale_log2,
    cap_log2,
    window,
    stride_kv_head,
    stride_table,
    mask_words,
    num_seqs,
    num_rows,
    v_scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    LISTED: tl.constexpr,
    PREFIX_PARTS: tl.constexpr,
    PREFIX_UNIT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    PEELED: tl.constexpr,
    IS_FP8: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_former(PDL)
    NUM_KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    row_block, seq = tl.program_id(1), tl.program_id(2)
    if LISTED:
        # Each sequence has a program. The other splits of listed sequences come after all sequences.
        kv_head, other = tl.program_id(0), seq - num_seqs
        split = tl.where(other >= 0, 1 + other % (NUM_SPLITS - 1), 0)
        number = tl.maximum(other, 0) // (NUM_SPLITS - 1)
        seq = tl.where(other >= 0, tl.load(listed_ptr + number), seq)
        if seq < 0:
            return
        number = tl.load(index_ptr + seq)
        step = tl.where(number >= 0, NUM_SPLITS, 1)
    else:
        split, kv_head = tl.program_id(0) % NUM_SPLITS, tl.program_id(0) // NUM_SPLITS
        number, step = seq, NUM_SPLITS

    first = tl.load(query_starts_ptr + seq)
    num_queries = tl.load(query_starts_ptr + seq + 1) - first
    if row_block * BLOCK_M >= num_queries * GROUP:
        return
    start = tl.load(starts_ptr + seq)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    query = rows // GROUP
    row_ok = query < num_queries
    token = first + tl.minimum(query, num_queries - 1)
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    dim_ok = dims < D
    q_offsets = (token.to(tl.int64) * NUM_HEADS + head)[:, None] * D + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=row_ok[:, None] & dim_ok[None, :], other=0.0)

    if HAS_MASK:
        mask_start = tl.load(mask_starts_ptr + seq)
        end = start + num_queries
    else:
        mask_start = 0
        # Attention is causal, so the block's last row sees the most keys.
        end = start + tl.minimum(num_queries, (row_block * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
    begin_block = 0
    if HAS_WINDOW:
        position = tl.load(positions_ptr + token)
        oldest = tl.min(position, 0).to(tl.int32) - window + 1
        begin_block = tl.maximum(oldest, 0) // BLOCK_N
    else:
        position = token.to(tl.int64)
    # The first block is a multiple of the splits' step, so that a split's blocks do not depend on the window's begin.
    begin_block = begin_block // step * step + split
    if PREFIX_PARTS:
        prefix_units = tl.load(prefix_tokens_ptr + seq) // PREFIX_UNIT
        begin_block += prefix_units * (PREFIX_UNIT // BLOCK_N)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # A sink is a key without a value that is merged before all others. The first split has it.
        maximum = tl.where(split == 0, sink_scores(sinks_ptr, head), maximum)
        total += tl.where(split == 0, 1.0, 0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D // 2 if PAIRS else BLOCK_D], tl.float32)
    odd_acc = acc
    if HALF:
        q, unit = half_queries(q)
        scale_log2 = (unit * scale_log2)[:, None]
    k_base = k_ptr + kv_head.to(tl.int64) * stride_kv_head
    v_base = v_ptr + kv_head.to(tl.int64) * (stride_kv_head // 2 if PAIRS else stride_kv_head)
    table = table_ptr + seq.to(tl.int64) * stride_table

    stop_block = tl.cdiv(end, BLOCK_N)
    if PEELED:
        # Blocks that every row sees to their ends need no comparisons.
        num_seen = mask_start if HAS_MASK else start + row_block * BLOCK_M // GROUP + 1
        seen_by_all = num_seen // BLOCK_N
        acc, odd_acc, maximum, total = walk(
            acc, odd_acc, maximum, total, q, k_base, v_base, table, begin_block, seen_by_all, end, start, query, row_ok,
            token, position, mask_ptr, mask_start, mask_words, window, scale_log2, cap_log2, dims, dim_ok, step,
            D, PAGE, BLOCK_N, HAS_MASK, HAS_WINDOW, HAS_CAP, PRECISION, PAIRS, True,
        )  # fmt: skip
        begin_block += tl.cdiv(tl.maximum(seen_by_all - begin_block, 0), step) * step
    acc, odd_acc, maximum, total = walk(
        acc, odd_acc, maximum, total, q, k_base, v_base, table, begin_block, stop_block, end, start, query, row_ok,
        token, position, mask_ptr, mask_start, mask_words, window, scale_log2, cap_log2, dims, dim_ok, step,
        D, PAGE, BLOCK_N, HAS_MASK, HAS_WINDOW, HAS_CAP, PRECISION, PAIRS, False,
    )  # fmt: skip
    if PAIRS:
        acc = tl.interleave(acc, odd_acc)

    if PREFIX_PARTS:
        num_parts = tl.cdiv(prefix_units, tl.maximum(tl.cdiv(prefix_units, PREFIX_PARTS), 1))
        at = token.to(tl.int64) * NUM_HEADS + head
        acc, maximum, total = merge_prefix(
            acc, maximum, total, prefix_ptr, prefix_weights_ptr, tl.where(split == 0, num_parts, 0), num_rows, at,
            row_ok, dims, BLOCK_D,
        )  # fmt: skip

    out_ok = row_ok[:, None] & dim_ok[None, :]
    if NUM_SPLITS == 1 or (LISTED and step == 1):
        out = _result(acc, total, v_scale, IS_FP8)
        tl.store(out_ptr + q_offsets, out.to(out_ptr.dtype.element_ty), mask=out_ok)
    else:
        tile = (number * tl.num_programs(1) + row_block) * NUM_KV_HEADS + kv_head
        local = tl.arange(0, BLOCK_M)
        base = tile.to(tl.int64) * NUM_SPLITS
        cell = (local[:, None] * BLOCK_D + dims[None, :]).to(tl.int64)
        tl.store(partial_ptr + (base + split) * BLOCK_M * BLOCK_D + cell, acc)
        tl.store(sums_ptr + (base + split) * 2 * BLOCK_M + local, maximum)
        tl.store(sums_ptr + (base + split) * 2 * BLOCK_M + BLOCK_M + local, total)
        tl.debug_barrier()  # every thread has stored its part before the counter is raised
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == NUM_SPLITS - 1:
            tl.debug_barrier()
            # The loop is unrolled, so that the loads overlap. (In a reduction of a block of splits by rows, threads
            # would write equal values to the same words, which race detectors report.)
            peaks_ptr = sums_ptr + base * 2 * BLOCK_M + local
            peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
            for s in tl.static_range(NUM_SPLITS):
                peak = tl.maximum(peak, tl.load(peaks_ptr + s * 2 * BLOCK_M, cache_modifier=".cg"))
            peak = tl.where(peak == float("-inf"), 0.0, peak)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for s in tl.static_range(NUM_SPLITS):
                share = tl.exp2(tl.load(peaks_ptr + s * 2 * BLOCK_M, cache_modifier=".cg") - peak)
                total += share * tl.load(peaks_ptr + s * 2 * BLOCK_M + BLOCK_M, cache_modifier=".cg")
                acc += share[:, None] * tl.load(
                    partial_ptr + (base + s) * BLOCK_M * BLOCK_D + cell, cache_modifier=".cg"
                )
            out = _result(acc, total, v_scale, IS_FP8)
            tl.store(out_ptr + q_offsets, out.to(out_ptr.dtype.element_ty), mask=out_ok)
            tl.store(counter_ptr + tile, 0)  # ready for the next launch


def attend(
    q_THD: Tensor,
    kv_2KSD: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    num_splits: int = 1,
    workspace: Workspace | None = None,
    listed: tuple[Tensor, Tensor] | None = None,
    v_scale: float = 1.0,
    prefix: PrefixParts | None = None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See `kernels/torch/attention.py`. `num_splits`: a power of two; above 1 it needs a `workspace`. `listed`: only
    these sequences are split, see `long_sequences`; None: all are."""
    _, num_heads, head_dim = q_THD.shape
    num_rows = batch.max_queries * (num_heads // kv_2KSD.shape[1])
    is_fp8 = kv_2KSD.dtype == torch.float8_e4m3fn
    programs, itemsize = len(batch.starts_B) * kv_2KSD.shape[1], q_THD.element_size()
    tile = tile_for(num_rows, head_dim, itemsize, shared_bytes(q_THD), is_fp8=is_fp8, num_programs=programs)
    return attend_by(
        tile, q_THD, kv_2KSD, batch, scale, window, num_splits, workspace, listed, v_scale, prefix, soft_cap, sinks_H
    )


def attend_by(
    tile: Tile,
    q_THD: Tensor,
    kv_2KSD: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None,
    num_splits: int,
    workspace: Workspace | None,
    listed: tuple[Tensor, Tensor] | None = None,
    v_scale: float = 1.0,
    prefix: PrefixParts | None = None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Run `attend` with a given tile. Bits are comparable only between calls with equal tiles and splits."""
    _, num_heads, head_dim = q_THD.shape
    num_kv_heads = kv_2KSD.shape[1]
    group = num_heads // num_kv_heads
    block_m = tile.block_m
    row_blocks = triton.cdiv(batch.max_queries * group, block_m)
    num_seqs = batch.starts_B.shape[0]
    block_d = padded(head_dim)
    out = torch.empty_like(q_THD)
    partial = sums = counters = q_THD
    index, listed_K = listed or (batch.starts_B, batch.starts_B)
    prefix_parts, prefix_tokens, prefix_sums, prefix_weights = 0, batch.starts_B, q_THD, q_THD
    if prefix is not None:
        assert batch.groups is not None, "parts of no group"
        assert window is None, "a prefix is read as a whole"
        assert prefix.sums_PTHD.shape[3] == block_d, prefix.sums_PTHD.shape
        prefix_tokens, (prefix_sums, prefix_weights) = batch.groups.tokens_B, prefix
        prefix_parts = len(prefix_sums)
    if num_splits > 1:
        assert workspace is not None, "splits need a workspace"
        tiles = (num_seqs if listed is None else len(listed_K)) * row_blocks * num_kv_heads
        partial, sums, counters = workspace.reserve(tiles, num_splits, block_m, block_d)
    grid = num_splits * num_kv_heads, row_blocks, num_seqs
    if listed is not None:
        grid = num_kv_heads, row_blocks, num_seqs + (num_splits - 1) * len(listed_K)
    has_mask = batch.mask_TW is not None
    pdl = dependent_launch(q_THD)
    is_fp8 = kv_2KSD.dtype == torch.float8_e4m3fn
    is_half = is_fp8 and tile.fp8 != "widen"
    has_pairs = is_fp8 and tile.fp8 == "pairs"
    assert not is_half or q_THD.element_size() == 2, "wider queries would lose bits in float16"
    values = kv_2KSD[1].view(torch.int16) if has_pairs else kv_2KSD[1]
    launch(
        _attend,
        grid,
        q_THD,
        out,
        kv_2KSD[0],
        values,
        batch.page_table_BP,
        batch.starts_B,
        batch.query_starts,
        batch.positions_T,
        batch.mask_TW if has_mask else batch.starts_B,
        batch.mask_starts_B if has_mask else batch.starts_B,
        partial,
        sums,
        counters,
        index,
        listed_K,
        prefix_tokens,
        prefix_sums,
        prefix_weights,
        q_THD if sinks_H is None else sinks_H,
        *scales(scale, soft_cap),
        window or 0,
        kv_2KSD.stride(1),
        batch.page_table_BP.stride(0),
        batch.mask_TW.shape[1] if batch.mask_TW is not None else 0,
        num_seqs,
        q_THD.shape[0] * num_heads,
        v_scale,
        NUM_HEADS=num_heads,
        GROUP=group,
        D=head_dim,
        BLOCK_D=block_d,
        PAGE=batch.page_size,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        NUM_SPLITS=num_splits,
        LISTED=listed is not None,
        PREFIX_PARTS=prefix_parts,
        PREFIX_UNIT=PREFIX_UNIT,
        HAS_MASK=has_mask,
        HAS_WINDOW=window is not None,
        HAS_CAP=soft_cap is not None,
        HAS_SINKS=sinks_H is not None,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else "tf32",
        PEELED=(tile.peeled or has_mask) and window is None,
        IS_FP8=is_fp8,
        HALF=is_half,
        PAIRS=has_pairs,
        PDL=pdl,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(pdl),
    )
    return out
