"""Blocks from a block drafter: one pass of a small backbone drafts all tokens of a chain or a tree.

The block always has the size that the drafter was trained with, because its positions see each other. A shape with
fewer steps verifies the first drafts of it. Where a request samples, each draft of a chain is drawn from the
distribution that the head gives it, and acceptance compares it with the target's; see `chain.py`, also for *coupled*
drafts. Trees grow as those of other networks (`tree.py`), but only the head runs for each branch.

Shape suffixes: B requests, R branches of all requests.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from specbatch.batch import Beam, Candidates, Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.chain import drawn_chain
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import BlockNet
from specbatch.draft.shape import DraftShape
from specbatch.draft.tree import beam_candidates, likely_tree
from specbatch.models.blocks.heads import BlockOutput


class BlockDraft(DraftMethod):
    """Chains of num_steps drafts, at most as many as a block has, or trees of this depth."""

    def __init__(self, net: BlockNet, shape: DraftShape, ops: ModuleType, coupled: bool = False) -> None:
        block = net.model.block
        assert shape.num_steps <= block.max_drafts, "setup checks this"
        self.net = self._net = net
        self._shape = shape
        self._ops, self._coupled = ops, coupled
        self.num_nodes, self.max_path = shape.num_draft_tokens, shape.max_path
        self.num_lookahead = max(self.num_nodes, block.block_size)
        self.reads_tokens = net.model.head.reads_before

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        model, shape = self._net.model, self._shape
        if not shape.is_chain:
            return likely_tree(self._ops, view, shape, self.candidates(view, table))
        block = self._block(view, table)
        confidence = model.confidence.steps(block) if self.scored and model.confidence is not None else None
        return drawn_chain(
            self._ops, view, shape.num_steps, model.head.steps(block), self._net.target_ids,
            sampled=sampled, coupled=self._coupled, scored=self.scored, confidence=confidence,
        )  # fmt: skip

    def candidates(self, view: BatchView, table: RequestTable) -> Candidates:
        steps = self._net.model.head.steps(self._block(view, table))

        def logits(step: int, beam: Beam, parents_R: Tensor) -> Tensor:
            return steps(step, beam.tokens_BK.reshape(-1), parents_R)

        first_BW = steps(0, view.field(Field.ROOT))
        return beam_candidates(self._ops, self._shape, first_BW, logits, self._net.target_ids)

    def _block(self, view: BatchView, table: RequestTable) -> BlockOutput:
        model, before_B = self._net.model, None
        if self.reads_tokens:
            before_B = table.tokens_SL[view.req_idx_B, (view.length_B - 1).clamp(min=0)].long()
        feature_BE = table.features_SE[view.req_idx_B] if self._net.feature_size else None
        layout, num_steps = view.layout(model.block.block_size), self._shape.num_steps
        return model.block_output(view.field(Field.ROOT), before_B, feature_BE, layout, self._net.cache, num_steps)
