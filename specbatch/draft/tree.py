"""Dynamic trees from a draft network (EAGLE-2, Li et al. 2024): the best topk branches grow at each step, and the most
likely of all candidates are verified.

Shape suffixes: B requests, C candidates, K = topk, E hidden size.
"""

from __future__ import annotations

from types import ModuleType

from specbatch.batch import Candidates, Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import DraftNet
from specbatch.draft.shape import DraftShape, num_lookahead


class TreeDraft(DraftMethod):
    """Draft trees of num_draft_tokens nodes. The choice of nodes is deterministic, also where a request samples."""

    def __init__(self, net: DraftNet, shape: DraftShape, ops: ModuleType) -> None:
        self.net = self._net = net
        self._shape = shape
        self._ops = ops
        self.num_nodes = shape.num_draft_tokens
        self.max_path = min(shape.num_steps + 1, shape.num_draft_tokens)
        self.num_lookahead = num_lookahead(shape, net.draft_kv_offset)

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        candidates = self.candidates(view, table)
        nodes = self._ops.select_nodes(
            view.field(Field.ROOT),
            candidates.tokens_BC,
            candidates.scores_BC,
            candidates.parents_BC,
            self.num_nodes,
            self._shape.num_steps,
        )
        return DraftTrees(nodes[0], None, *nodes[1:])

    def candidates(self, view: BatchView, table: RequestTable) -> Candidates:
        """Draft the candidates: topk drafts after the root, and at every later step topk after each of the best topk
        branches."""
        hidden_BE = table.features_SE[view.req_idx_B]
        batch, k, draft_kv_offset = hidden_BE.shape[0], self._shape.topk, self._net.draft_kv_offset
        target_ids = self._net.target_ids
        words = max(1, -(-k * (self._shape.num_steps - 1) // 32))
        scores, ids = self._ops.draft_topk(self._net.raw_logits(hidden_BE), k)
        candidates, beam = self._ops.beam_start(scores, ids, target_ids, self._shape.num_candidates, words)
        features = hidden_BE.repeat_interleave(k, dim=0)  # copies, because a forward pass may write over its input
        for step in range(1, self._shape.num_steps):
            layout = view.layout(
                k,
                start=draft_kv_offset + (step - 1) * k,
                position=draft_kv_offset + step - 1,
                position_stride=0,
                mask_TW=beam.seen_BKW.view(batch * k, words),
                mask_start=draft_kv_offset,
            )
            out = self._net.forward(beam.tokens_BK.reshape(-1), features, layout)
            scores, ids = self._ops.draft_topk(self._net.raw_logits(out), k)
            beam = self._ops.beam_expand(
                candidates, beam, scores.view(batch, k, k), ids.view(batch, k, k), target_ids, step
            )
            parent = beam.parent_BK[:, :, None].expand(-1, -1, out.shape[-1])
            features = out.view(batch, k, -1).gather(1, parent).view(batch * k, -1)
        return candidates
