# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The list of a batch's long sequences (Triton). The host reads no length.

Shape suffixes as in `kernels/torch/long_sequences.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.triton.parts.launch import launch


@triton.jit(do_not_specialize=["num_seqs"])
def _long_sequences(
    starts_ptr, query_starts_ptr, index_ptr, listed_ptr, num_seqs, min_tokens, count,
    SEQS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    seqs, indices = tl.arange(0, SEQS), tl.arange(0, COUNT)
    real = seqs < num_seqs
    queries = tl.load(query_starts_ptr + seqs + 1, mask=real, other=0) - tl.load(
        query_starts_ptr + seqs, mask=real, other=0
    )
    is_long = real & (tl.load(starts_ptr + seqs, mask=real, other=0) + queries >= min_tokens)
    index = tl.cumsum(is_long.to(tl.int32), 0) - 1
    is_listed = is_long & (index < count)
    tl.store(index_ptr + seqs, tl.where(is_listed, index, -1), mask=real)
    tl.store(listed_ptr + index, seqs, mask=is_listed)
    # Fill the end of the list, which no sequence has written.
    num_listed = tl.sum(is_listed.to(tl.int32))
    tl.store(listed_ptr + indices, tl.full((COUNT,), -1, tl.int32), mask=(indices >= num_listed) & (indices < count))


def long_sequences(starts_B: Tensor, query_starts: Tensor, min_tokens: int, count: int) -> tuple[Tensor, Tensor]:
    """See `kernels/torch/long_sequences.py`."""
    num_seqs = starts_B.shape[0]
    indices = torch.empty(num_seqs, dtype=torch.int32, device=starts_B.device)
    listed = torch.empty(count, dtype=torch.int32, device=starts_B.device)
    launch(
        _long_sequences, (1,),
        starts_B, query_starts, indices, listed, num_seqs, min_tokens, count,
        SEQS=triton.next_power_of_2(num_seqs), COUNT=triton.next_power_of_2(count), num_warps=4,
    )  # fmt: skip
    return indices, listed
