"""Chains from a draft network: each draft is the network's own choice after the one before it.

If a request samples, its drafts are drawn at random. Usually drafting has separate random numbers, and acceptance
compares the distributions of the target and the network. *Coupled* drafts are drawn with the random numbers that the
target uses at the same positions. So both often draw the same token, and a draft is accepted if it is that token, as in
trees. The text is then that of plain decoding with every draft method (drafter-invariant speculative decoding, Daliri
et al. 2024, who use Gumbel noise).

Shape suffixes: B requests, E hidden size, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import SteppedNet
from specbatch.draft.rng import Draw
from specbatch.draft.shape import DraftShape, num_lookahead

_STEP_SHIFT = 24  # positions are smaller than 2 ** 24, and draws take 32 bits of them


class ChainDraft(DraftMethod):
    """Chains of num_steps drafts; topk is not read. In a batch with sampled requests drafts are drawn, else they are
    the most likely tokens."""

    def __init__(self, net: SteppedNet, shape: DraftShape, ops: ModuleType, coupled: bool = False) -> None:
        self.net = self._net = net
        self._num_steps = shape.num_steps
        self._ops, self._coupled = ops, coupled
        self.num_nodes = self.max_path = shape.num_steps + 1
        # An EAGLE head drafts from its own features, and extends with the target's.
        self.num_reusable = shape.num_steps - 1 if net.draft_kv_offset else 0
        self.num_lookahead = num_lookahead(shape, net.draft_kv_offset)

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        hidden_BE = table.features_SE[view.req_idx_B]

        def logits(step: int, before_B: Tensor) -> Tensor:
            nonlocal hidden_BE
            if step > 0:
                # The draft's slot comes after the committed slots of the draft's cache. A draft model has a committed
                # slot for the root; an EAGLE head has none.
                offset = self._net.draft_kv_offset + step - 1
                hidden_BE = self._net.forward(before_B, hidden_BE, view.layout(1, start=offset, position=offset))
            return self._net.raw_logits(hidden_BE)

        return drawn_chain(
            self._ops, view, self._num_steps, logits, self._net.target_ids,
            sampled=sampled, coupled=self._coupled, scored=self.scored,
        )  # fmt: skip


def drawn_chain(
    ops: ModuleType,
    view: BatchView,
    num_steps: int,
    logits: Callable[[int, Tensor], Tensor],
    target_ids_W: Tensor | None,
    *,
    sampled: bool,
    coupled: bool,
    scored: bool = False,
    confidence: Callable[[int, Tensor], Tensor] | None = None,
) -> DraftTrees:
    """Choose a chain of drafts. `logits`: from the number of a draft and the token before it (B,), the draft's logits
    (B, W). `target_ids_W`: the target token of each draft token; None: the same vocabulary. `scored`: the chain gets
    scores. `confidence`: from the same, the logarithm of the draft's estimated probability (B,); None: it follows from
    the logits."""
    tokens, probs = [view.field(Field.ROOT)], []
    scores = [torch.zeros(len(tokens[0]), dtype=torch.float32, device=tokens[0].device)]
    for step in range(num_steps):
        logits_BW = logits(step, tokens[-1])
        best_B: Tensor | None = None
        if scored:
            # The probability of the most likely draft, not of the one that is drawn: whether a draft is verified must
            # not depend on the draft itself, or rejection sampling would be biased.
            if confidence is None:
                estimate_B1, best_B1 = ops.draft_topk(logits_BW, 1)
                estimate_B, best_B = estimate_B1[:, 0], best_B1[:, 0]
            else:
                estimate_B = confidence(step, tokens[-1]).float()
        if sampled:
            # With scores, a later round that drafts at this position again draws anew: the scores of this round decide
            # how far other requests come, and they compete with it there.
            offset = step << _STEP_SHIFT if scored and not coupled else step + 1
            u = ops.uniform(*view.rng, view.length_B + offset, Draw.SAMPLE if coupled else Draw.DRAFT)
            probs.append(ops.distribution(logits_BW, *view.sampling))
            ids = ops.draw(probs[-1], u)
        else:
            ids = ops.argmax(logits_BW) if best_B is None else best_B
        if scored:
            if sampled and coupled and best_B is not None:  # nothing is rejected at random: the draft's own probability
                both_B2 = logits_BW.gather(1, torch.stack((ids, best_B), dim=1)).float()
                estimate_B = estimate_B + both_B2[:, 0] - both_B2[:, 1]
            scores.append(scores[-1] + estimate_B)
        tokens.append(ids if target_ids_W is None else target_ids_W[ids])
    drawn_from = torch.stack(probs, dim=1) if probs and not coupled else None
    scores_BN = torch.stack(scores, dim=1) if scored else None
    return DraftTrees(torch.stack(tokens, dim=1), probs_BDW=drawn_from, scores_BN=scores_BN)
