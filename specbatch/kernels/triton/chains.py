# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Chains of drafts from several sources, side by side (Triton).

Shape suffixes as in `kernels/torch/chains.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.chains import CORPUS, FORECAST, JOB, NETWORK, OF_NETWORK, ROW, UNKNOWN
from specbatch.kernels.triton.parts.launch import launch

_ROW, _JOB, _CORPUS = tl.constexpr(ROW), tl.constexpr(JOB), tl.constexpr(CORPUS)
_NETWORK, _FORECAST = tl.constexpr(NETWORK), tl.constexpr(FORECAST)
_UNKNOWN, _OF_NETWORK = tl.constexpr(UNKNOWN), tl.constexpr(OF_NETWORK)


@triton.jit
def _steps_of(probabilities, before):
    """Compute the probability of each step from that of all steps up to it, and up to the one before it."""
    is_draft = probabilities > 0.0
    return tl.where(is_draft, tl.div_rn(probabilities, tl.where(is_draft, before, 1.0)), 0.0)


@triton.jit
def _join_chains(
    row_ptr, num_row_ptr, matched_ptr, matches_ptr, shared_ptr, probabilities_ptr, loaded_ptr,
    network_ptr, scores_ptr, lengths_ptr, limit_ptr, likely_ptr, ids_ptr,
    tokens_ptr, estimates_ptr, sources_ptr, known_ptr,
    matches_stride, lengths_stride, limit_stride, num_drafts,
    STEPS: tl.constexpr, IS_DRAWN: tl.constexpr, HAS_IDS: tl.constexpr, CHAINS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    draft = tl.arange(0, BLOCK_D)
    real = draft < num_drafts
    later = real & (draft > 0)
    first = seq * num_drafts
    out = first * CHAINS + draft  # of the first chain

    row = tl.load(row_ptr + first + draft, mask=real, other=0)
    is_draft = real & (draft < tl.load(num_row_ptr + seq))
    line = matches_ptr + tl.load(matched_ptr + seq) * matches_stride + draft
    upto = tl.load(line, mask=is_draft, other=0.0)
    tl.store(tokens_ptr + out, row, mask=real)
    tl.store(estimates_ptr + out, _steps_of(upto, tl.load(line - 1, mask=later, other=1.0)), mask=real)
    tl.store(sources_ptr + seq * CHAINS, _ROW)

    shared = tl.load(shared_ptr + first + draft, mask=real, other=0)
    line = probabilities_ptr + first + draft
    upto = tl.load(line, mask=real, other=0.0)
    tl.store(tokens_ptr + out + num_drafts, shared, mask=real)
    before = tl.load(line - 1, mask=later, other=1.0)
    tl.store(estimates_ptr + out + num_drafts, _steps_of(upto, before), mask=real)
    tl.store(sources_ptr + seq * CHAINS + 1, tl.where(tl.load(loaded_ptr + seq), _CORPUS, _JOB))

    if STEPS > 0:
        last = out + (CHAINS - 1) * num_drafts
        node = seq * (STEPS + 1) + 1 + draft
        tokens = tl.load(network_ptr + node, mask=draft < STEPS, other=0)
        room = tl.load(limit_ptr + seq * limit_stride) - tl.load(lengths_ptr + seq * lengths_stride) - 1
        has_room = (draft < STEPS) & (draft < room)
        upto = tl.exp(tl.load(scores_ptr + node, mask=has_room, other=float("-inf")))
        # The root's score is 0.
        steps = _steps_of(upto, tl.exp(tl.load(scores_ptr + node - 1, mask=has_room & (draft > 0), other=0.0)))
        tl.store(tokens_ptr + last, tokens, mask=real)
        tl.store(estimates_ptr + last, steps, mask=real)
        tl.store(sources_ptr + seq * CHAINS + CHAINS - 1, _NETWORK)
        if IS_DRAWN:
            forecast = last - num_drafts
            tl.store(tokens_ptr + forecast, tokens, mask=real)
            of_first = tl.sum(tl.where(draft == 0, steps, 0.0))
            tl.store(estimates_ptr + forecast, tl.where(has_room, of_first, 0.0), mask=real)
            tl.store(sources_ptr + seq * CHAINS + CHAINS - 2, _FORECAST)
            likely = tl.load(likely_ptr + seq)
            if HAS_IDS:
                likely = tl.load(ids_ptr + likely)
            tl.store(known_ptr + out, row, mask=real)
            tl.store(known_ptr + out + num_drafts, shared, mask=real)
            tl.store(known_ptr + forecast, tl.where(draft == 0, likely, _UNKNOWN), mask=real)
            tl.store(known_ptr + last, tl.full((BLOCK_D,), _OF_NETWORK, tl.int64), mask=real)


def join_chains(
    row_BD: Tensor,
    num_row_B: Tensor,
    matched_B: Tensor,
    match_estimates_MD: Tensor,
    shared_BD: Tensor,
    probabilities_BD: Tensor,
    is_loaded_B: Tensor,
    network_BN: Tensor | None = None,
    scores_BN: Tensor | None = None,
    lengths_B: Tensor | None = None,
    limit_B: Tensor | None = None,
    likely_B: Tensor | None = None,
    target_ids_W: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """See `kernels/torch/chains.py`. Lengths and limits may be columns of a wider table."""
    (batch, num_drafts), device = row_BD.shape, row_BD.device
    steps, is_drawn = 0 if network_BN is None else network_BN.shape[1] - 1, likely_B is not None
    assert steps <= num_drafts, (steps, num_drafts)
    assert match_estimates_MD.stride(1) == 1
    chains = 2 + (network_BN is not None) + is_drawn
    tokens_BCD = torch.empty((batch, chains, num_drafts), dtype=torch.int64, device=device)
    estimates_BCD = torch.empty((batch, chains, num_drafts), dtype=torch.float32, device=device)
    sources_BC = torch.empty((batch, chains), dtype=torch.int64, device=device)
    known_BCD = torch.empty_like(tokens_BCD) if is_drawn else None
    # What is absent is not read.
    absent = (num_row_B if x is None else x for x in (network_BN, scores_BN, lengths_B, limit_B, likely_B))
    network, scores, lengths, limit, likely = absent
    launch(
        _join_chains, (batch,),
        row_BD.contiguous(), num_row_B.contiguous(), matched_B.contiguous(), match_estimates_MD,
        shared_BD.contiguous(), probabilities_BD.contiguous(), is_loaded_B.contiguous(),
        network.contiguous(), scores.contiguous(), lengths, limit, likely.contiguous(),
        num_row_B if target_ids_W is None else target_ids_W,
        tokens_BCD, estimates_BCD, sources_BC, tokens_BCD if known_BCD is None else known_BCD,
        match_estimates_MD.stride(0), lengths.stride(0), limit.stride(0), num_drafts,
        STEPS=steps, IS_DRAWN=is_drawn, HAS_IDS=target_ids_W is not None, CHAINS=chains,
        BLOCK_D=max(16, triton.next_power_of_2(num_drafts)), num_warps=1,
    )  # fmt: skip
    return tokens_BCD, estimates_BCD, sources_BC, known_BCD
