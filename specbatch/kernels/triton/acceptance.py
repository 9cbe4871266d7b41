# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Rejection sampling of a chain (Triton).

Shape suffixes as in `sampling.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.batch import NO_TOKEN
from specbatch.kernels.triton.parts.draws import block_sums, blocks_of, pick_block, pick_id, probabilities
from specbatch.kernels.triton.parts.launch import launch

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def _accept_chain(
    drafts_ptr, q_ptr, inverse_ptr, p_ptr, num_drafts_ptr, temperature_ptr, accept_ptr, residual_ptr, sample_ptr,
    index_ptr, given_ptr, num_path_ptr, next_token_ptr, num_broken_ptr, vocab, q_width,
    D: tl.constexpr, DRAWN: tl.constexpr, BLOCK_D: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_GIVEN: tl.constexpr,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    greedy = tl.load(temperature_ptr + seq) == 0.0
    sure = greedy  # q is 1 at the drafts
    if HAS_GIVEN:
        sure = greedy | (tl.load(given_ptr + seq) != 0)
    num_drafts = tl.load(num_drafts_ptr + seq).to(tl.int32)
    steps = tl.arange(0, BLOCK_D)
    real = (steps < num_drafts) & (steps < D)
    drafts = tl.load(drafts_ptr + seq * D + steps, mask=real, other=0)
    row = seq * (D + 1) + steps
    if HAS_INDEX:
        row = tl.load(index_ptr + row, mask=real, other=0)
    p = tl.load(p_ptr + row * vocab + drafts, mask=real, other=0.0).to(tl.float64)
    draft_id = drafts
    if MAPPED:
        draft_id = tl.load(inverse_ptr + drafts, mask=real, other=-1).to(tl.int64)
    known = real & (steps < DRAWN) & (draft_id >= 0) & (draft_id < q_width)
    q = tl.load(q_ptr + (seq * DRAWN + steps) * q_width + draft_id, mask=known, other=0.0).to(tl.float64)
    q = tl.where(sure, 1.0, q)
    broken = real & (q != q)  # the whole row is NaN, and the draft is rejected
    u = tl.load(accept_ptr + seq * D + steps, mask=real, other=0.0)
    accepted = real & (u * q < p)
    last = tl.min(tl.where(accepted, BLOCK_D, steps))  # the node after which the next token comes
    last = tl.minimum(last, D)
    rejected = last < num_drafts

    lanes, blocks = tl.arange(0, BLOCK), tl.arange(0, BLOCKS)
    row = seq * (D + 1) + last
    if HAS_INDEX:
        row = tl.load(index_ptr + row)
    p_row_ptr = p_ptr + row * vocab
    q_row_ptr = q_ptr + (seq * DRAWN + tl.minimum(last, DRAWN - 1)) * q_width
    sums = tl.zeros((BLOCKS,), tl.float64)
    none = tl.full((), -1, tl.int64)
    # Without a residual, p = q up to rounding, and a rejection has probability zero.
    subtract = rejected & (sure == 0) & (last < DRAWN) & (tl.max((broken & (steps == last)).to(tl.int32)) == 0)
    if subtract:
        sums = block_sums(p_row_ptr, q_row_ptr, inverse_ptr, vocab, q_width, True, MAPPED, BLOCK, BLOCKS)
        subtract = tl.sum(sums) > 0.0
    excluded = none
    if HAS_GIVEN:  # noqa: SIM102  # It is decided in compilation.
        if rejected & sure & (greedy == 0):
            excluded = tl.load(drafts_ptr + seq * D + last)
            sums = block_sums(
                p_row_ptr, q_row_ptr, inverse_ptr, vocab, q_width, False, MAPPED, BLOCK, BLOCKS, excluded
            )  # fmt: skip
            excluded = tl.where(tl.sum(sums) > 0.0, excluded, none)
    if (subtract == 0) & (excluded < 0):
        sums = block_sums(p_row_ptr, q_row_ptr, inverse_ptr, vocab, q_width, False, MAPPED, BLOCK, BLOCKS)
    u = tl.load(residual_ptr + seq * D + last, mask=rejected, other=0.0)
    u += tl.load(sample_ptr + seq * (D + 1) + last, mask=rejected == 0, other=0.0)
    target = u * tl.sum(sums)
    block, before = pick_block(sums, target, blocks)
    ids = block * BLOCK + lanes
    if subtract:
        weight = probabilities(p_row_ptr, q_row_ptr, inverse_ptr, ids, vocab, q_width, True, MAPPED)
    else:
        weight = probabilities(p_row_ptr, q_row_ptr, inverse_ptr, ids, vocab, q_width, False, MAPPED, excluded)
    # If no token has a probability, p is NaN.
    token = tl.where(tl.sum(sums) > 0.0, pick_id(weight, before, target, ids), _NO_TOKEN)
    tl.store(next_token_ptr + seq, token.to(tl.int64))
    tl.store(num_path_ptr + seq, last.to(tl.int64) + 1)
    tl.store(num_broken_ptr + seq, tl.sum(broken.to(tl.int64)))


def accept_chain(
    drafts_BD: Tensor,
    q_BSW: Tensor,
    target_ids_W: Tensor | None,
    p_BNV: Tensor,
    num_drafts_B: Tensor,
    temperature_B: Tensor,
    u_accept_BD: Tensor,
    u_residual_BD: Tensor,
    u_sample_BN: Tensor,
    index_BN: Tensor | None = None,
    is_given_B: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels/torch/acceptance.py`. It makes two passes over one row of p (and q) for each sequence."""
    (batch, num_drafts), (vocab, width) = drafts_BD.shape, (p_BNV.shape[-1], q_BSW.shape[2])
    device = drafts_BD.device
    num_path, next_token, num_broken = torch.empty((3, batch), dtype=torch.int64, device=device)
    inverse = num_path  # any tensor, which is not read
    if target_ids_W is not None:
        # The draft id of each target token, so that a program walks over the target's vocabulary alone.
        inverse = torch.full((vocab,), -1, dtype=torch.int32, device=device)
        inverse.scatter_(0, target_ids_W, torch.arange(width, dtype=torch.int32, device=device))
    block, blocks, num_warps = blocks_of(p_BNV)
    launch(
        _accept_chain, (batch,),
        drafts_BD.contiguous(), q_BSW.contiguous(), inverse, p_BNV.contiguous(), num_drafts_B.contiguous(),
        temperature_B.contiguous(), u_accept_BD.contiguous(), u_residual_BD.contiguous(), u_sample_BN.contiguous(),
        num_drafts_B if index_BN is None else index_BN.contiguous(),
        num_drafts_B if is_given_B is None else is_given_B.contiguous(), num_path, next_token, num_broken, vocab, width,
        D=num_drafts, DRAWN=q_BSW.shape[1], BLOCK_D=triton.next_power_of_2(num_drafts), HAS_INDEX=index_BN is not None,
        HAS_GIVEN=is_given_B is not None, MAPPED=target_ids_W is not None, BLOCK=block, BLOCKS=blocks,
        num_warps=num_warps,
    )  # fmt: skip
    return num_path, next_token, num_broken
