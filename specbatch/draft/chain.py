"""Chains from a draft network: each draft is the network's own choice after the one before it.

If a request samples, its drafts are drawn at random. Usually drafting has separate random numbers, and acceptance
compares the distributions of the target and the network. *Coupled* drafts are drawn with the random numbers that the
target uses at the same positions. So both often draw the same token, and a draft is accepted if it is that token, as in
trees. The text is then that of plain decoding with every draft method (drafter-invariant speculative decoding, Daliri
et al. 2024, who use Gumbel noise).

Shape suffixes: B requests, E hidden size.
"""

from __future__ import annotations

from types import ModuleType

import torch

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import DraftNet
from specbatch.draft.rng import Draw
from specbatch.draft.shape import DraftShape, num_lookahead


class ChainDraft(DraftMethod):
    """Chains of num_steps drafts; topk is not read. In a batch with sampled requests drafts are drawn, else they are
    the most likely tokens."""

    can_score = True

    def __init__(self, net: DraftNet, shape: DraftShape, ops: ModuleType, coupled: bool = False) -> None:
        self.net = self._net = net
        self._num_steps = shape.num_steps
        self._ops, self._coupled = ops, coupled
        self.num_nodes = self.max_path = shape.num_steps + 1
        # An EAGLE head drafts from its own features, and extends with the target's.
        self.num_reusable = shape.num_steps - 1 if net.draft_kv_offset else 0
        self.num_lookahead = num_lookahead(shape, net.draft_kv_offset)

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        hidden_BE = table.features_SE[view.req_idx_B]
        tokens, probs = [view.field(Field.ROOT)], []
        scores = [torch.zeros(len(hidden_BE), dtype=torch.float32, device=hidden_BE.device)]
        for step in range(self._num_steps):
            if step > 0:
                # The draft's slot comes after the committed slots of the draft's cache. A draft model has a committed
                # slot for the root; an EAGLE head has none.
                offset = self._net.draft_kv_offset + step - 1
                hidden_BE = self._net.forward(tokens[-1], hidden_BE, view.layout(1, start=offset, position=offset))
            logits = self._net.raw_logits(hidden_BE)
            if self.scored:
                # The probability of the most likely draft, not of the draft that is drawn: whether a draft is verified
                # must not depend on the draft itself, or rejection sampling would be biased.
                best_B1, ids_B1 = self._ops.draft_topk(logits, 1)
                scores.append(scores[-1] + best_B1[:, 0])
            if sampled:
                which = Draw.SAMPLE if self._coupled else Draw.DRAFT
                u = self._ops.uniform(*view.rng, view.length_B + (step + 1), which)
                probs.append(self._ops.distribution(logits, *view.sampling))
                ids = self._ops.draw(probs[-1], u)
            else:
                ids = ids_B1[:, 0] if self.scored else self._ops.argmax(logits)
            tokens.append(ids if self._net.target_ids is None else self._net.target_ids[ids])
        drawn_from = torch.stack(probs, dim=1) if probs and not self._coupled else None
        scores_BN = torch.stack(scores, dim=1) if self.scored else None
        return DraftTrees(torch.stack(tokens, dim=1), probs_BDW=drawn_from, scores_BN=scores_BN)
