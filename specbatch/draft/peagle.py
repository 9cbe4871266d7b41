"""Chains and trees from a P-EAGLE head, which drafts all tokens in one pass.

The first draft comes from the hidden state that draft-extend has left, as in EAGLE-3. The others come from mask tokens
after the root, each with the head's learned feature in place of the target's. A position sees those before it. In a
tree all branches have the same drafts at a position.

Shape suffixes: B requests, S drafts, E hidden size.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from specbatch.batch import Candidates, Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.chain import drawn_chain
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import EagleNet
from specbatch.draft.shape import DraftShape, num_lookahead
from specbatch.draft.tree import beam_candidates, likely_tree


class ParallelEagleDraft(DraftMethod):
    """Chains of num_steps drafts, or trees of this depth."""

    def __init__(self, net: EagleNet, shape: DraftShape, ops: ModuleType, coupled: bool = False) -> None:
        self.net = self._net = net
        self._shape = shape
        self._ops, self._coupled = ops, coupled
        self.num_nodes, self.max_path = shape.num_draft_tokens, shape.max_path
        self.num_lookahead = num_lookahead(shape, net.draft_kv_offset)

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        shape = self._shape
        if not shape.is_chain:
            return likely_tree(self._ops, view, shape, self.candidates(view, table))
        logits_SBW = self._logits(view, table)
        return drawn_chain(
            self._ops, view, shape.num_steps, lambda step, _: logits_SBW[step], self._net.target_ids,
            sampled=sampled, coupled=self._coupled, scored=self.scored,
        )  # fmt: skip

    def candidates(self, view: BatchView, table: RequestTable) -> Candidates:
        logits_SBW = self._logits(view, table)
        return beam_candidates(
            self._ops, self._shape, logits_SBW[0], lambda step, beam, parents_R: logits_SBW[step], self._net.target_ids
        )

    def _logits(self, view: BatchView, table: RequestTable) -> Tensor:
        net, num_masks = self._net, self._shape.num_steps - 1
        root_B, hidden_BE = view.field(Field.ROOT), table.features_SE[view.req_idx_B]
        hidden_SBE = hidden_BE[None]
        if num_masks:
            tokens_T, features_TE = net.masks(len(root_B) * num_masks)
            masked_TE = net.forward(tokens_T, features_TE, view.layout(num_masks))
            hidden_SBE = torch.cat((hidden_SBE, masked_TE.view(len(root_B), num_masks, -1).transpose(0, 1)))
        return net.raw_logits(hidden_SBE.flatten(0, 1)).view(1 + num_masks, len(root_B), -1)
