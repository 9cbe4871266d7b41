# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Bit masks (Triton): tree masks as FlashInfer's kernels read them. Lengths are read on the device.

Shape suffixes as in `kernels/torch/mask.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.triton.parts.launch import await_former, dependent_launch, launch, launch_options

_BLOCK = 512  # bytes of one program


@triton.jit
def _tree_mask_bits(
    mask_ptr,
    mask_starts_ptr,
    starts_ptr,
    out_ptr,
    num_queries,
    num_words,
    num_bytes,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_former(PDL)
    seq, first = tl.program_id(1), tl.program_id(0) * BLOCK
    num_keys = tl.load(starts_ptr + seq) + num_queries
    num_bits = num_queries * num_keys
    if first * 8 >= num_bits:
        return
    mask_start = tl.load(mask_starts_ptr + seq)
    byte = first + tl.arange(0, BLOCK)
    bit_of_byte = tl.arange(0, 8)
    index = byte[:, None] * 8 + bit_of_byte[None, :]
    query = index // num_keys
    bit = index - query * num_keys - mask_start
    word = tl.load(
        mask_ptr + (seq.to(tl.int64) * num_queries + query) * num_words + bit // 32,
        mask=(index < num_bits) & (bit >= 0) & (bit < num_words * 32),
        other=0,
    )
    visible = (bit < 0) | (((word >> (bit & 31)) & 1) != 0)
    packed = tl.sum(visible.to(tl.int32) << bit_of_byte[None, :], 1)
    tl.store(out_ptr + seq.to(tl.int64) * num_bytes + byte, packed.to(tl.uint8), mask=byte < num_bytes)


def tree_mask_bits(mask_TW: Tensor, mask_starts_B: Tensor, starts_B: Tensor, num_queries: int, max_keys: int) -> Tensor:
    """See `kernels/torch/mask.py`."""
    batch = starts_B.shape[0]
    num_bytes = triton.cdiv(num_queries * max_keys, 8)
    out = torch.empty((batch, num_bytes), dtype=torch.uint8, device=mask_TW.device)
    pdl = dependent_launch(mask_TW)
    launch(
        _tree_mask_bits,
        (triton.cdiv(num_bytes, _BLOCK), batch),
        mask_TW,
        mask_starts_B,
        starts_B,
        out,
        num_queries,
        mask_TW.shape[1],
        num_bytes,
        BLOCK=_BLOCK,
        PDL=pdl,
        **launch_options(pdl),
    )
    return out
