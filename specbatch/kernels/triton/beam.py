# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The steps of drafting a tree, each in one launch (Triton).

Shape suffixes as in `steps.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbatch.batch import Beam, Candidates
from specbatch.kernels.triton.parts.launch import launch
from specbatch.kernels.triton.parts.ordering import LOWEST, pack, packed_index, packed_number


@triton.jit
def _own_bit(bit, words):
    return tl.where(words == (bit >> 5), tl.full((), 1, tl.int32) << (bit & 31), 0)


@triton.jit
def _beam_start(
    scores_ptr, ids_ptr, target_ids_ptr, cand_tokens_ptr, cand_scores_ptr, cand_parents_ptr,
    tokens_ptr, index_ptr, seen_ptr, num_candidates, num_words,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    branch, words = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_W)
    real = branch < K
    tokens = tl.load(ids_ptr + seq * K + branch, mask=real, other=0)
    if MAPPED:
        tokens = tl.load(target_ids_ptr + tokens, mask=real, other=0)
    at = seq * num_candidates + branch
    tl.store(cand_tokens_ptr + at, tokens, mask=real)
    tl.store(cand_scores_ptr + at, tl.load(scores_ptr + seq * K + branch, mask=real, other=0.0), mask=real)
    tl.store(cand_parents_ptr + at, tl.full((BLOCK_K,), -1, tl.int64), mask=real)
    tl.store(tokens_ptr + seq * K + branch, tokens, mask=real)
    tl.store(index_ptr + seq * K + branch, branch.to(tl.int64), mask=real)
    for i in range(K):
        tl.store(seen_ptr + (seq * K + i) * num_words + words, _own_bit(i, words), mask=words < num_words)


def beam_start(
    scores_BK: Tensor, ids_BK: Tensor, target_ids_W: Tensor | None, num_candidates: int, num_words: int
) -> tuple[Candidates, Beam]:
    """See `kernels/torch/beam.py`. Candidates that no step has filled can hold any value."""
    batch, k = ids_BK.shape
    device = ids_BK.device
    cand_tokens, cand_parents = torch.empty((2, batch, num_candidates), dtype=torch.int64, device=device)
    cand_scores = torch.empty((batch, num_candidates), dtype=torch.float32, device=device)
    tokens, index = torch.empty((2, batch, k), dtype=torch.int64, device=device)
    seen = torch.empty((batch, k, num_words), dtype=torch.int32, device=device)
    scores = scores_BK.contiguous()
    launch(
        _beam_start, (batch,),
        scores, ids_BK.contiguous(), ids_BK if target_ids_W is None else target_ids_W,
        cand_tokens, cand_scores, cand_parents, tokens, index, seen, num_candidates, num_words,
        K=k, BLOCK_K=triton.next_power_of_2(k), BLOCK_W=triton.next_power_of_2(max(num_words, 1)),
        MAPPED=target_ids_W is not None, num_warps=1,
    )  # fmt: skip
    return Candidates(cand_tokens, cand_scores, cand_parents), Beam(scores, tokens, index, index, seen)


@triton.jit(do_not_specialize=["step"])
def _beam_expand(
    scores_ptr, index_ptr, seen_ptr, step_scores_ptr, step_ids_ptr, target_ids_ptr,
    cand_tokens_ptr, cand_scores_ptr, cand_parents_ptr,
    new_scores_ptr, new_tokens_ptr, new_index_ptr, parent_ptr, new_seen_ptr, num_candidates, num_words, step,
    K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    children, words = tl.arange(0, BLOCK), tl.arange(0, BLOCK_W)
    real = children < K * K
    first = K + (step - 1) * K * K
    scores = tl.load(scores_ptr + seq * K + children // K, mask=real, other=0.0)
    scores += tl.load(step_scores_ptr + seq * K * K + children, mask=real, other=0.0)
    tokens = tl.load(step_ids_ptr + seq * K * K + children, mask=real, other=0)
    if MAPPED:
        tokens = tl.load(target_ids_ptr + tokens, mask=real, other=0)
    at = seq * num_candidates + first + children
    tl.store(cand_scores_ptr + at, scores, mask=real)
    tl.store(cand_tokens_ptr + at, tokens, mask=real)
    tl.store(cand_parents_ptr + at, tl.load(index_ptr + seq * K + children // K, mask=real, other=0), mask=real)
    packed = tl.where(real, pack(scores, children), LOWEST)
    for i in range(K):
        best = tl.max(packed)
        chosen = packed_index(best)
        parent = chosen // K
        out = seq * K + i
        tl.store(new_scores_ptr + out, packed_number(best))
        # The values are taken from registers, because another thread cannot read yet what was stored above.
        tl.store(new_tokens_ptr + out, tl.sum(tl.where(packed == best, tokens, 0)))
        tl.store(new_index_ptr + out, first + chosen)
        tl.store(parent_ptr + out, parent)
        inherited = tl.load(seen_ptr + (seq * K + parent) * num_words + words, mask=words < num_words, other=0)
        seen = inherited | _own_bit(step * K + i, words)
        tl.store(new_seen_ptr + out * num_words + words, seen, mask=words < num_words)
        packed = tl.where(packed == best, LOWEST, packed)


def beam_expand(
    candidates: Candidates,
    beam: Beam,
    step_scores_BKK: Tensor,
    step_ids_BKK: Tensor,
    target_ids_W: Tensor | None,
    step: int,
) -> Beam:
    """See `kernels/torch/beam.py`."""
    batch, k, num_words = beam.seen_BKW.shape
    device = beam.scores_BK.device
    scores = torch.empty((batch, k), dtype=torch.float32, device=device)
    tokens, index, parent = torch.empty((3, batch, k), dtype=torch.int64, device=device)
    seen = torch.empty_like(beam.seen_BKW)
    launch(
        _beam_expand, (batch,),
        beam.scores_BK, beam.index_BK, beam.seen_BKW, step_scores_BKK.contiguous(), step_ids_BKK.contiguous(),
        tokens if target_ids_W is None else target_ids_W,
        *candidates, scores, tokens, index, parent, seen, candidates.tokens_BC.shape[1], num_words, step,
        K=k, BLOCK=triton.next_power_of_2(k * k), BLOCK_W=triton.next_power_of_2(max(num_words, 1)),
        MAPPED=target_ids_W is not None, num_warps=1 if k <= 4 else 4,
    )  # fmt: skip
    return Beam(scores, tokens, index, parent, seen)
