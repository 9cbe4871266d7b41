"""The steps of drafting a tree, in plain torch.

Shape suffixes as in `steps.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.batch import Beam, Candidates


def beam_start(
    scores_BK: Tensor, ids_BK: Tensor, target_ids_W: Tensor | None, num_candidates: int, num_words: int
) -> tuple[Candidates, Beam]:
    """Begin a tree. Its branches are the first K of `num_candidates` candidates. `ids_BK`: draft tokens.
    `target_ids_W`: the target token of each draft token; None: they are the same."""
    batch, k = ids_BK.shape
    device = ids_BK.device
    tokens = ids_BK if target_ids_W is None else target_ids_W[ids_BK]
    branch = torch.arange(k, device=device).expand(batch, k)
    candidates = Candidates(
        torch.zeros((batch, num_candidates), dtype=torch.int64, device=device),
        torch.zeros((batch, num_candidates), dtype=torch.float32, device=device),
        torch.full((batch, num_candidates), -1, dtype=torch.int64, device=device),
    )
    candidates.tokens_BC[:, :k] = tokens
    candidates.scores_BC[:, :k] = scores_BK
    seen = _own_bits(branch, num_words)
    return candidates, Beam(scores_BK, tokens, branch, branch, seen)


def beam_expand(
    candidates: Candidates,
    beam: Beam,
    step_scores_BKK: Tensor,
    step_ids_BKK: Tensor,
    target_ids_W: Tensor | None,
    step: int,
) -> Beam:
    """Do step 1, 2, .. of a tree (EAGLE-2, Li et al. 2024). The K children of each of K branches become candidates (in
    place). The K of them with the highest cumulative score become the next branches; of equal ones the earlier comes
    first.

    `step_scores_BKK`, `step_ids_BKK`: log-probabilities (float32) and draft tokens (int64) of each branch's children.
    `target_ids_W` as in `beam_start`.
    """
    batch, k = beam.scores_BK.shape
    first = k + (step - 1) * k * k
    tokens = (step_ids_BKK if target_ids_W is None else target_ids_W[step_ids_BKK]).reshape(batch, k * k)
    scores = (beam.scores_BK[:, :, None] + step_scores_BKK).reshape(batch, k * k)
    candidates.tokens_BC[:, first : first + k * k] = tokens
    candidates.scores_BC[:, first : first + k * k] = scores
    candidates.parents_BC[:, first : first + k * k] = beam.index_BK.repeat_interleave(k, dim=1)
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    parent = chosen // k
    branch = torch.arange(k, device=chosen.device).expand(batch, k)
    words = beam.seen_BKW.shape[2]
    inherited = beam.seen_BKW.gather(1, parent[:, :, None].expand(-1, -1, words))
    return Beam(
        scores.gather(1, chosen),
        tokens.gather(1, chosen),
        first + chosen,
        parent,
        inherited | _own_bits(step * k + branch, words),
    )


def _own_bits(bit_BK: Tensor, num_words: int) -> Tensor:
    """Return words (B, K, W) int32 with one bit set for each branch, or none if it is past the words."""
    words = torch.arange(num_words, device=bit_BK.device)
    own = torch.where((bit_BK >> 5)[:, :, None] == words, (1 << (bit_BK & 31))[:, :, None], 0)
    return torch.where(own >= 2**31, own - 2**32, own).int()  # bit 31 is the sign
