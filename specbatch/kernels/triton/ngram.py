# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""N-gram drafts (Triton): each round searches the texts again, in parallel chunks, which costs less than an index on
the device.

Shape suffixes as in `kernels/torch/ngram.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.triton.parts.launch import launch


@triton.jit
def _longest_of_chunk(
    tokens_ptr, predicted_ptr, req_idx_ptr, num_tokens_ptr, num_predicted_ptr, best_ptr, stride, predicted_stride,
    text_chunks, min_match, max_match, CHUNK: tl.constexpr,
):  # fmt: skip
    """Find the longest occurrence that ends in a chunk, and of equal ones the last. The result is (tokens matched) <<
    32 | its end, which is the index of the token after it; 0: there is none. The first `text_chunks` chunks are those
    of the text, and the others those of the prediction."""
    seq, chunk = tl.program_id(0), tl.program_id(1)
    req_idx = tl.load(req_idx_ptr + seq).to(tl.int64)
    length = tl.load(num_tokens_ptr + req_idx).to(tl.int32)
    text_ptr = tokens_ptr + req_idx * stride
    from_ptr, count, first = text_ptr, length, chunk * CHUNK
    if chunk >= text_chunks:
        from_ptr = predicted_ptr + req_idx * predicted_stride
        count = tl.load(num_predicted_ptr + req_idx).to(tl.int32)
        first = (chunk - text_chunks) * CHUNK
    ends = first + tl.arange(0, CHUNK)
    best = tl.full((), 0, tl.int64)
    if first < count:
        running = (ends >= 1) & (ends < count)
        matched = tl.zeros((CHUNK,), tl.int32)
        for back in range(1, max_match + 1):
            # A prediction can have more tokens than the text: before the text's beginning, nothing is equal.
            suffix = tl.load(text_ptr + length - back, mask=length >= back, other=-1)
            running = running & (ends >= back)
            before = tl.load(from_ptr + ends - back, mask=running, other=0)
            running = running & (before == suffix)
            matched += running.to(tl.int32)
        found = matched >= min_match
        index = ends - first + chunk * CHUNK
        best = tl.max(tl.where(found, (matched.to(tl.int64) << 32) | index.to(tl.int64), 0))
    tl.store(best_ptr + seq * tl.num_programs(1) + chunk, best)


@triton.jit
def _continue(
    tokens_ptr, predicted_ptr, req_idx_ptr, num_tokens_ptr, num_predicted_ptr, limit_ptr, best_ptr, drafts_ptr,
    num_drafts_ptr, matched_ptr, stride, predicted_stride, num_chunks, predicted_start, num_drafts,
    CHUNKS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    req_idx = tl.load(req_idx_ptr + seq).to(tl.int64)
    length = tl.load(num_tokens_ptr + req_idx).to(tl.int32)
    limit = tl.load(limit_ptr + req_idx).to(tl.int32)
    chunks = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(best_ptr + seq * num_chunks + chunks, mask=chunks < num_chunks, other=0))
    start = (best & 0xFFFFFFFF).to(tl.int32)
    count = tl.where(best > 0, tl.minimum(tl.maximum(limit - length, 0), num_drafts), 0)
    from_ptr, end = tokens_ptr + req_idx * stride, length
    if start >= predicted_start:
        from_ptr = predicted_ptr + req_idx * predicted_stride
        end = tl.load(num_predicted_ptr + req_idx).to(tl.int32)
        start -= predicted_start
    drafted = tl.arange(0, BLOCK_D)
    source = start + drafted % tl.maximum(end - start, 1)
    tokens = tl.load(from_ptr + source, mask=drafted < count, other=0)
    tl.store(drafts_ptr + seq * num_drafts + drafted, tokens.to(tl.int64), mask=drafted < num_drafts)
    tl.store(num_drafts_ptr + seq, count.to(tl.int64))
    tl.store(matched_ptr + seq, best >> 32)


def ngram_lookup(
    tokens_SL: Tensor,
    predicted_SL: Tensor,
    req_idx_B: Tensor,
    num_tokens_S: Tensor,
    num_predicted_S: Tensor,
    limit_S: Tensor,
    min_match: int,
    max_match: int,
    num_drafts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels/torch/ngram.py`. Counts and limits may be of any integer type."""
    assert 1 <= min_match <= max_match, (min_match, max_match)
    assert tokens_SL.stride(1) == 1
    # These may be columns of a wider table.
    req_idx_B, limit_S = req_idx_B.contiguous(), limit_S.contiguous()
    num_tokens_S, num_predicted_S = num_tokens_S.contiguous(), num_predicted_S.contiguous()
    batch, device = req_idx_B.shape[0], tokens_SL.device
    width = tokens_SL.shape[1]
    chunk = min(1024, triton.next_power_of_2(width))
    text_chunks = triton.cdiv(width, chunk)
    num_chunks = text_chunks + triton.cdiv(predicted_SL.shape[1], chunk)
    best = torch.empty((batch, num_chunks), dtype=torch.int64, device=device)
    drafts = torch.empty((batch, num_drafts), dtype=torch.int64, device=device)
    num_drafts_B, matched_B = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    launch(
        _longest_of_chunk, (batch, num_chunks),
        tokens_SL, predicted_SL, req_idx_B, num_tokens_S, num_predicted_S, best, tokens_SL.stride(0),
        predicted_SL.stride(0), text_chunks, min_match, max_match, CHUNK=chunk,
    )  # fmt: skip
    launch(
        _continue, (batch,),
        tokens_SL, predicted_SL, req_idx_B, num_tokens_S, num_predicted_S, limit_S, best, drafts, num_drafts_B,
        matched_B, tokens_SL.stride(0), predicted_SL.stride(0), num_chunks, text_chunks * chunk, num_drafts,
        CHUNKS=triton.next_power_of_2(num_chunks), BLOCK_D=max(16, triton.next_power_of_2(num_drafts)), num_warps=1,
    )  # fmt: skip
    return drafts, num_drafts_B, matched_B
