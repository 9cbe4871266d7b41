# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Log-probabilities of chosen and of the most likely tokens (Triton).

Shape suffixes as in `kernels/torch/logprobs.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.triton.parts.groups import NO_ID
from specbatch.kernels.triton.parts.launch import launch
from specbatch.kernels.triton.tree import draft_topk

_PART_ROWS = 64  # rows whose most likely tokens are found at once; their logits are copied


# The indices can be parts of larger tensors. One kernel takes them aligned or not.
@triton.jit(do_not_specialize_on_alignment=["index_ptr"])
def _sum_of_chunk(logits_ptr, index_ptr, peak_ptr, sum_ptr, id_ptr, stride, vocab, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    row_ptr = logits_ptr + tl.load(index_ptr + row) * stride
    x = tl.load(row_ptr + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    peak = tl.max(x)
    at = row * tl.num_programs(1) + chunk
    tl.store(peak_ptr + at, peak)
    tl.store(sum_ptr + at, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - peak))))
    tl.store(id_ptr + at, tl.min(tl.where(x == peak, ids, NO_ID)))


@triton.jit(do_not_specialize_on_alignment=["index_ptr", "tokens_ptr"])
def _logprobs_of_chunks(
    logits_ptr, index_ptr, tokens_ptr, peak_ptr, sum_ptr, id_ptr, peak_out_ptr, log_sum_ptr, chosen_ptr, best_ptr,
    stride, vocab, num_chunks, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    at, real = row * num_chunks + chunks, chunks < num_chunks
    peaks = tl.load(peak_ptr + at, mask=real, other=float("-inf"))
    sums = tl.load(sum_ptr + at, mask=real, other=0.0)
    ids = tl.load(id_ptr + at, mask=real, other=NO_ID)
    peak = tl.max(peaks)
    log_sum = tl.log(tl.sum(tl.where(peaks == float("-inf"), 0.0, sums * tl.exp(peaks - peak))))
    chosen = tl.load(logits_ptr + tl.load(index_ptr + row) * stride + tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(peak_out_ptr + row, peak)
    tl.store(log_sum_ptr + row, log_sum)
    # The peak is subtracted first, so that the most likely token never has a positive log-probability.
    tl.store(chosen_ptr + row, chosen - peak - log_sum)
    best = tl.min(tl.where(peaks == peak, ids, NO_ID))
    tl.store(best_ptr + row, tl.minimum(best, vocab - 1).to(tl.int64))  # a row of NaN gets any token


def logprobs(logits_TV: Tensor, index_R: Tensor, tokens_R: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """See `kernels/torch/logprobs.py`. For `num_top` 0 and 1 it makes one pass over the rows. Results are float32."""
    rows, vocab = index_R.shape[0], logits_TV.shape[1]
    assert logits_TV.stride(1) == 1
    num_top = min(num_top, vocab)
    chunk = min(4096, triton.next_power_of_2(vocab))
    num_chunks = triton.cdiv(vocab, chunk)
    device = logits_TV.device
    peaks, sums = (torch.empty((rows, num_chunks), dtype=torch.float32, device=device) for _ in range(2))
    ids = torch.empty((rows, num_chunks), dtype=torch.int32, device=device)
    peak, log_sum, chosen = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3))
    best = torch.empty(rows, dtype=torch.int64, device=device)
    index_R, tokens_R, stride = index_R.contiguous(), tokens_R.contiguous(), logits_TV.stride(0)
    launch(_sum_of_chunk, (rows, num_chunks), logits_TV, index_R, peaks, sums, ids, stride, vocab, CHUNK=chunk)
    launch(
        _logprobs_of_chunks, (rows,),
        logits_TV, index_R, tokens_R, peaks, sums, ids, peak, log_sum, chosen, best, stride, vocab, num_chunks,
        CHUNKS=triton.next_power_of_2(num_chunks), num_warps=1,
    )  # fmt: skip
    if num_top == 0:
        return chosen[:, None], best.new_empty((rows, 0))
    if num_top == 1:
        return torch.stack((chosen, -log_sum), dim=1), best[:, None]
    # torch.topk is not used: which of equal logits it takes depends on the number of rows.
    parts = [logits_TV[part] for part in index_R.split(_PART_ROWS)]
    tops = [draft_topk(part, num_top)[1] for part in parts]
    found = torch.cat([part.gather(1, top) for part, top in zip(parts, tops, strict=True)])
    values = found.float() - peak[:, None] - log_sum[:, None]
    return torch.cat((chosen[:, None], values), dim=1), torch.cat(tops)
