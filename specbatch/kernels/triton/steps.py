# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The small steps between the large operations of a round, each in one launch (Triton).

Shape suffixes as in `kernels/torch/steps.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.batch import (
    LIKELY_BITS,
    LIKELY_COLUMNS,
    LIKELY_KNOWN,
    LIKELY_PER_COLUMN,
    LOG_BOUNDS_K,
    MAX_STOP_IDS,
    NO_TOKEN,
    Committed,
    Field,
    Output,
    PackedNodes,
    Spans,
)
from specbatch.kernels.triton.parts.launch import launch

_NO_TOKEN = tl.constexpr(NO_TOKEN)
_LAST_KEY = tl.constexpr(-(1 << 63))
_NUM_NEW, _NUM_DRAFTED, _DEPTH, _NUM_BROKEN, _LIKELY, _TOKENS = (tl.constexpr(int(column)) for column in Output)
_FIRST_BOUND, _BOUND_RATIO = (tl.constexpr(float(x)) for x in (LOG_BOUNDS_K[0], LOG_BOUNDS_K[1] / LOG_BOUNDS_K[0]))
_LIKELY_COLUMNS, _PER_COLUMN = tl.constexpr(LIKELY_COLUMNS), tl.constexpr(LIKELY_PER_COLUMN)
_LIKELY_BITS, _LIKELY_KNOWN = tl.constexpr(LIKELY_BITS), tl.constexpr(LIKELY_KNOWN)
_MAX_LIKELY = tl.constexpr((1 << LIKELY_BITS) - 1)  # the largest number that has LIKELY_BITS


@triton.jit
def _slot_of(pages_ptr, index, num_pages, mask, PAGE: tl.constexpr):
    page = tl.load(pages_ptr + tl.minimum(index // PAGE, num_pages - 1), mask=mask, other=0)
    return page.to(tl.int64) * PAGE + index % PAGE


# These numbers change from step to step of a round, and one kernel takes them all.
@triton.jit(do_not_specialize=["total", "start", "position", "position_stride", "mask_start"])
def _span_layout(
    table_ptr, length_ptr, done_ptr, depths_ptr, written_ptr,
    slots_ptr, positions_ptr, starts_ptr, mask_starts_ptr, query_starts_ptr,
    stride_table, num_pages, stride_length, stride_done, stride_written, num_queries,
    total, start, position, position_stride, mask_start,
    HAS_DEPTHS: tl.constexpr, HAS_WRITTEN: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < total
    seq, query = (at // num_queries).to(tl.int64), at % num_queries
    length = tl.load(length_ptr + seq * stride_length, mask=real, other=0)
    written = tl.load(done_ptr + seq * stride_done, mask=real, other=1) == 0
    if HAS_WRITTEN:
        written = written & (query < tl.load(written_ptr + seq * stride_written, mask=real, other=0))
    slot = _slot_of(table_ptr + seq * stride_table, length + start + query, num_pages, real, PAGE)
    tl.store(slots_ptr + at, tl.where(written, slot, -1), mask=real)
    offset = tl.load(depths_ptr + at, mask=real, other=0) if HAS_DEPTHS else (query * position_stride).to(tl.int64)
    tl.store(positions_ptr + at, length + position + offset, mask=real)
    first = real & (query == 0)
    tl.store(starts_ptr + seq, (length + start).to(tl.int32), mask=first)
    tl.store(mask_starts_ptr + seq, (length + mask_start).to(tl.int32), mask=first)
    tl.store(query_starts_ptr + seq, at, mask=first)
    tl.store(query_starts_ptr + seq + 1, at + 1, mask=at == total - 1)


def span_layout(
    page_table_BP: Tensor,
    page_size: int,
    length_B: Tensor,
    done_B: Tensor,
    num_queries: int,
    *,
    start: int = 0,
    position: int = 0,
    position_stride: int = 1,
    depths_BQ: Tensor | None = None,
    num_written_B: Tensor | None = None,
    mask_start: int = 0,
) -> Spans:
    """See `kernels/torch/steps.py`."""
    batch, device = length_B.shape[0], length_B.device
    total = batch * num_queries
    slots, positions = torch.empty((2, total), dtype=torch.int64, device=device)
    ints = torch.empty(3 * batch + 1, dtype=torch.int32, device=device)
    starts, mask_starts, query_starts = ints[:batch], ints[batch : 2 * batch], ints[2 * batch :]
    launch(
        _span_layout, (triton.cdiv(total, 128),),
        page_table_BP, length_B, done_B,
        length_B if depths_BQ is None else depths_BQ.contiguous(),
        length_B if num_written_B is None else num_written_B,
        slots, positions, starts, mask_starts, query_starts,
        page_table_BP.stride(0), page_table_BP.shape[1], length_B.stride(0), done_B.stride(0),
        0 if num_written_B is None else num_written_B.stride(0), num_queries,
        total, start, position, position_stride, mask_start,
        HAS_DEPTHS=depths_BQ is not None, HAS_WRITTEN=num_written_B is not None, PAGE=page_size, BLOCK=128,
    )  # fmt: skip
    return Spans(slots, positions, starts, mask_starts, query_starts)


@triton.jit
def _order_keys(scores_ptr, done_ptr, at, batch, num_nodes, stride_done, real):
    """Return int64 keys of some nodes, which fall in the order in which nodes are chosen: by the score and then by the
    place. So one comparison says which of two nodes comes first."""
    seq, node = at // num_nodes, at % num_nodes
    score = tl.load(scores_ptr + at, mask=real, other=0.0)
    is_done = tl.load(done_ptr + seq.to(tl.int64) * stride_done, mask=real, other=1) != 0
    score = tl.where((score != score) | is_done, float("-inf"), score)
    score = tl.where(node == 0, float("inf"), score)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    # The bits of negative numbers rise where the numbers fall.
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(real, (bits << 32) - (node * batch + seq), _LAST_KEY)


@triton.jit
def _share_budget(
    scores_ptr, done_ptr, counts_ptr, batch, num_nodes, num_verified, stride_done,
    BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    nodes, total = tl.arange(0, BLOCK_N), batch * num_nodes
    real = nodes < num_nodes
    key = _order_keys(scores_ptr, done_ptr, seq * num_nodes + nodes, batch, num_nodes, stride_done, real)
    before = tl.zeros((BLOCK_N, BLOCK), tl.int32)
    for first in range(0, total, BLOCK):
        at = first + tl.arange(0, BLOCK)
        other = _order_keys(scores_ptr, done_ptr, at, batch, num_nodes, stride_done, at < total)
        before += (other[None, :] > key[:, None]).to(tl.int32)
    count = tl.sum((real & (tl.sum(before, 1) < num_verified)).to(tl.int32))
    tl.store(counts_ptr + seq, count.to(tl.int64))


def share_budget(scores_BN: Tensor, done_B: Tensor, num_verified: int) -> Tensor:
    """See `kernels/torch/steps.py`. Each program compares the nodes of one chain with all nodes of the batch."""
    batch, num_nodes = scores_BN.shape
    assert batch <= num_verified <= batch * num_nodes, (batch, num_verified, num_nodes)
    counts = torch.empty(batch, dtype=torch.int64, device=scores_BN.device)
    block_n = triton.next_power_of_2(num_nodes)
    launch(
        _share_budget, (batch,),
        scores_BN.contiguous(), done_B, counts, batch, num_nodes, num_verified, done_B.stride(0),
        BLOCK_N=block_n, BLOCK=max(128, min(1024, 8192 // block_n)), num_warps=8,
    )  # fmt: skip
    return counts


@triton.jit
def _pack_nodes(
    counts_ptr, tokens_ptr, slots_ptr, positions_ptr,
    nodes_ptr, index_ptr, packed_tokens_ptr, packed_slots_ptr, packed_positions_ptr, query_starts_ptr,
    num_nodes, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    sequences, nodes = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_N)
    before = tl.load(counts_ptr + sequences, mask=sequences < seq, other=0)
    first = tl.sum(before)
    count = tl.load(counts_ptr + seq)
    at = seq.to(tl.int64) * num_nodes + nodes
    place = first + nodes
    kept = nodes < count
    tl.store(nodes_ptr + place, at, mask=kept)
    tl.store(packed_tokens_ptr + place, tl.load(tokens_ptr + at, mask=kept, other=0), mask=kept)
    tl.store(packed_slots_ptr + place, tl.load(slots_ptr + at, mask=kept, other=0), mask=kept)
    tl.store(packed_positions_ptr + place, tl.load(positions_ptr + at, mask=kept, other=0), mask=kept)
    tl.store(index_ptr + at, first + tl.minimum(nodes, count - 1), mask=nodes < num_nodes)
    tl.store(query_starts_ptr + seq, first.to(tl.int32))
    tl.store(query_starts_ptr + seq + 1, (first + count).to(tl.int32), mask=seq == tl.num_programs(0) - 1)


def pack_nodes(
    counts_B: Tensor, tokens_BN: Tensor, slots_T: Tensor, positions_T: Tensor, num_verified: int
) -> PackedNodes:
    """See `kernels/torch/steps.py`."""
    (batch, num_nodes), device = tokens_BN.shape, tokens_BN.device
    index = torch.empty((batch, num_nodes), dtype=torch.int64, device=device)
    nodes, tokens, slots, positions = torch.empty((4, num_verified), dtype=torch.int64, device=device)
    query_starts = torch.empty(batch + 1, dtype=torch.int32, device=device)
    launch(
        _pack_nodes, (batch,),
        counts_B, tokens_BN.contiguous(), slots_T, positions_T, nodes, index, tokens, slots, positions, query_starts,
        num_nodes, BLOCK_N=triton.next_power_of_2(num_nodes), BLOCK_B=triton.next_power_of_2(batch),
    )  # fmt: skip
    return PackedNodes(nodes, index, tokens, slots, positions, query_starts)


@triton.jit
def _commit_round(
    ints_ptr, history_ptr, table_ptr, req_idx_ptr, eos_ptr,
    tokens_ptr, choice_ptr, parents_ptr, depths_ptr, num_nodes_ptr, given_path_ptr, given_num_path_ptr, given_next_ptr,
    num_broken_ptr, scores_ptr, margin_ptr,
    path_ptr, num_path_ptr, new_tokens_ptr, output_ptr, accept_index_ptr, source_ptr, target_ptr,
    num_fields, max_length, stride_table, num_pages, num_eos, num_nodes, max_path,
    LENGTH: tl.constexpr, ROOT: tl.constexpr, LIMIT: tl.constexpr, DONE: tl.constexpr, IGNORE_EOS: tl.constexpr,
    STOP: tl.constexpr, NUM_STOPS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    HAS_PARENTS: tl.constexpr, HAS_DEPTHS: tl.constexpr, HAS_COUNTS: tl.constexpr,
    HAS_PATH: tl.constexpr, HAS_NUM_PATH: tl.constexpr, HAS_NEXT: tl.constexpr, HAS_BROKEN: tl.constexpr,
    HAS_SCORES: tl.constexpr, HAS_MARGIN: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    req_idx = tl.load(req_idx_ptr + seq)
    offset = tl.arange(0, BLOCK)
    in_tree = offset < num_nodes
    first = seq * num_nodes
    real = num_nodes
    if HAS_COUNTS:
        real = tl.load(num_nodes_ptr + seq).to(tl.int32)

    # Acceptance: the path, and the token after each of its nodes.
    path = tl.zeros((BLOCK,), tl.int64)
    tokens = tl.zeros((BLOCK,), tl.int64)
    count = tl.full((), 0, tl.int32)
    next_token = tl.full((), 0, tl.int64)
    if HAS_NUM_PATH:
        count = tl.load(given_num_path_ptr + seq).to(tl.int32)
        child = (offset + 1).to(tl.int64)
        path = offset.to(tl.int64)
        if HAS_PATH:
            path = tl.load(given_path_ptr + first + offset, mask=in_tree, other=0)
            child = tl.load(given_path_ptr + first + offset + 1, mask=offset + 1 < num_nodes, other=0)
        path = tl.where(offset < count, path, 0)
        tokens = tl.load(tokens_ptr + first + child, mask=offset < count - 1, other=0)
        if HAS_NEXT:
            next_token = tl.load(given_next_ptr + seq)
        else:
            next_token = tl.load(choice_ptr + first + tl.sum(tl.where(offset == count - 1, path, 0)))
        tokens = tl.where(offset == count - 1, next_token, tokens)
    elif HAS_PARENTS:
        drafted = tl.load(tokens_ptr + first + offset, mask=in_tree, other=-1)
        parents = tl.load(parents_ptr + first + offset, mask=in_tree, other=-2)
        node = tl.full((), 0, tl.int32)
        while node < BLOCK:
            next_token = tl.load(choice_ptr + first + node)
            path = tl.where(offset == count, node, path)
            tokens = tl.where(offset == count, next_token, tokens)
            count += 1
            # The walk goes only to larger indices, so that it ends with any parents.
            is_child = (offset > node) & (parents == node) & (drafted == next_token)
            node = tl.min(tl.where(is_child, offset, BLOCK))
    else:
        choice = tl.load(choice_ptr + first + offset, mask=in_tree, other=0)
        drafted = tl.load(tokens_ptr + first + offset + 1, mask=offset + 1 < num_nodes, other=-1)
        matches = (offset + 1 < real) & (drafted == choice)
        count = 1 + tl.min(tl.where(matches, BLOCK, offset))
        path = tl.where(offset < count, offset.to(tl.int64), 0)
        tokens = tl.where(offset < count, choice, 0)
        next_token = tl.sum(tl.where(offset == count - 1, choice, 0))
    on_path = offset < count
    sampled = tokens
    failed = next_token == _NO_TOKEN
    tokens, next_token = tl.maximum(tokens, 0), tl.maximum(next_token, 0)

    # Commit.
    fields_ptr = ints_ptr + req_idx * num_fields
    length = tl.load(fields_ptr + LENGTH)
    limit = tl.load(fields_ptr + LIMIT)
    room = limit - length - 1
    live = tl.load(fields_ptr + DONE) == 0
    num_new = tl.where(live, count, 0)
    eos_counts = tl.load(fields_ptr + IGNORE_EOS) == 0
    counted = on_path & (offset < room)
    ends = counted & (offset < 0)
    for i in range(num_eos):
        ends = ends | (counted & (tokens == tl.where(eos_counts, tl.load(eos_ptr + i), -1)))
    for i in tl.static_range(NUM_STOPS):
        ends = ends | (counted & (tokens == tl.load(fields_ptr + STOP + i)))
    done = (tl.max(ends.to(tl.int32)) > 0) | failed | (count >= room)
    # All threads have read the fields.
    tl.debug_barrier()
    # The length stays below the limit, because a round that is already launched runs once more from here, without
    # effect.
    tl.store(fields_ptr + LENGTH, tl.minimum(length + count, limit - 1), mask=live)
    tl.store(fields_ptr + ROOT, next_token, mask=live)
    tl.store(fields_ptr + DONE, done.to(tl.int64), mask=live)
    index = length + 1 + offset
    kept = (offset < num_new) & (index < max_length)
    tl.store(history_ptr + req_idx * max_length + index, tokens.to(tl.int32), mask=kept)

    # The result.
    written = offset < max_path
    tl.store(path_ptr + seq * max_path + offset, path, mask=written)
    tl.store(new_tokens_ptr + seq * max_path + offset, tokens, mask=written)
    tl.store(num_path_ptr + seq, count.to(tl.int64))
    output = output_ptr + seq * (2 * max_path + _TOKENS)
    depth = real - 1
    if HAS_DEPTHS:
        depth = tl.max(tl.load(depths_ptr + first + offset, mask=in_tree, other=0)).to(tl.int32)
    tl.store(output + _NUM_NEW, num_new)
    tl.store(output + _NUM_DRAFTED, real - 1)
    tl.store(output + _DEPTH, depth)
    broken = tl.full((), 0, tl.int32)
    if HAS_BROKEN:
        broken = tl.load(num_broken_ptr + seq).to(tl.int32)
    tl.store(output + _NUM_BROKEN, broken)
    score = tl.full((BLOCK,), float("-inf"), tl.float32)
    if HAS_SCORES:
        score = tl.load(scores_ptr + first + offset, mask=in_tree & (offset > 0), other=float("-inf"))
    bound = tl.full((), _FIRST_BOUND, tl.float32)
    for column in tl.static_range(_LIKELY_COLUMNS):
        likely = tl.full((), 0, tl.int32)
        for i in tl.static_range(_PER_COLUMN):
            number = tl.minimum(tl.sum((score >= bound).to(tl.int32)), _MAX_LIKELY)
            likely |= number << (_LIKELY_BITS * i)
            bound *= _BOUND_RATIO
        if HAS_SCORES:
            likely |= _LIKELY_KNOWN
        tl.store(output + _LIKELY + column, likely)
    tl.store(output + _TOKENS + offset, sampled.to(tl.int32), mask=written)
    margin = tl.full((BLOCK,), float("inf"), tl.float32)
    if HAS_MARGIN:
        margin = tl.load(margin_ptr + first + path, mask=on_path, other=float("inf"))
    tl.store(output + _TOKENS + max_path + offset, margin.to(tl.int32, bitcast=True), mask=written)
    tl.store(accept_index_ptr + seq * max_path + offset, first + path, mask=written)
    pages_ptr = table_ptr + req_idx * stride_table
    source = _slot_of(pages_ptr, length + path, num_pages, written, PAGE)
    target = _slot_of(pages_ptr, length + offset, num_pages, written, PAGE)
    moves = (offset < num_new) & (path != offset)
    tl.store(source_ptr + seq * max_path + offset, source, mask=written)
    tl.store(target_ptr + seq * max_path + offset, tl.where(moves, target, -1), mask=written)


def commit_round(
    ints_SF: Tensor,
    tokens_SL: Tensor,
    page_table_SP: Tensor,
    req_idx_B: Tensor,
    page_size: int,
    eos_K: Tensor,
    max_path: int,
    tokens_BN: Tensor,
    choice_BN: Tensor | None = None,
    *,
    parents_BN: Tensor | None = None,
    depths_BN: Tensor | None = None,
    num_nodes_B: Tensor | None = None,
    path_BN: Tensor | None = None,
    num_path_B: Tensor | None = None,
    next_token_B: Tensor | None = None,
    num_broken_B: Tensor | None = None,
    scores_BN: Tensor | None = None,
    margin_BN: Tensor | None = None,
) -> Committed:
    """See `kernels/torch/steps.py`."""
    batch, num_nodes = tokens_BN.shape
    device = tokens_BN.device
    assert max_path <= num_nodes, f"a path of {max_path} in a tree of {num_nodes}"
    assert ints_SF.is_contiguous()
    assert tokens_SL.is_contiguous()
    path, tokens, accept_index, source, target = torch.empty((5, batch, max_path), dtype=torch.int64, device=device)
    count = torch.empty(batch, dtype=torch.int64, device=device)
    output = torch.empty((batch, Output.TOKENS + 2 * max_path), dtype=torch.int32, device=device)

    def given(x: Tensor | None) -> Tensor:
        return req_idx_B if x is None else x.contiguous()  # any tensor, which is not read

    launch(
        _commit_round, (batch,),
        ints_SF, tokens_SL, page_table_SP, req_idx_B, eos_K,
        tokens_BN.contiguous(), given(choice_BN), given(parents_BN), given(depths_BN), given(num_nodes_B),
        given(path_BN), given(num_path_B), given(next_token_B), given(num_broken_B), given(scores_BN),
        given(margin_BN),
        path, count, tokens, output, accept_index, source, target,
        ints_SF.shape[1], tokens_SL.shape[1], page_table_SP.stride(0), page_table_SP.shape[1], eos_K.shape[0],
        num_nodes, max_path,
        LENGTH=Field.LENGTH, ROOT=Field.ROOT, LIMIT=Field.LIMIT, DONE=Field.DONE,
        IGNORE_EOS=Field.IGNORE_EOS, STOP=Field.STOP, NUM_STOPS=MAX_STOP_IDS, PAGE=page_size,
        BLOCK=max(16, triton.next_power_of_2(num_nodes)),
        HAS_PARENTS=parents_BN is not None, HAS_DEPTHS=depths_BN is not None,
        HAS_COUNTS=num_nodes_B is not None, HAS_PATH=path_BN is not None, HAS_NUM_PATH=num_path_B is not None,
        HAS_NEXT=next_token_B is not None, HAS_BROKEN=num_broken_B is not None,
        HAS_SCORES=scores_BN is not None, HAS_MARGIN=margin_BN is not None, num_warps=1,
    )  # fmt: skip
    return Committed(path, count, tokens, output, accept_index.view(-1), source.view(-1), target.view(-1))
