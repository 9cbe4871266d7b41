"""Dynamic trees from a draft network (EAGLE-2, Li et al. 2024): the best topk branches grow at each step, and the most
likely of all candidates are verified.

Shape suffixes: B requests, C candidates, K = topk, R branches of all requests, E hidden size, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from specbatch.batch import Beam, Candidates, Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import SteppedNet
from specbatch.draft.shape import DraftShape, num_lookahead


class TreeDraft(DraftMethod):
    """Draft trees of num_draft_tokens nodes. The choice of nodes is deterministic, also where a request samples."""

    def __init__(self, net: SteppedNet, shape: DraftShape, ops: ModuleType) -> None:
        self.net = self._net = net
        self._shape = shape
        self._ops = ops
        self.num_nodes, self.max_path = shape.num_draft_tokens, shape.max_path
        self.num_lookahead = num_lookahead(shape, net.draft_kv_offset)

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        return likely_tree(self._ops, view, self._shape, self.candidates(view, table))

    def candidates(self, view: BatchView, table: RequestTable) -> Candidates:
        net, k = self._net, self._shape.topk
        hidden_RE = table.features_SE[view.req_idx_B]

        def logits(step: int, beam: Beam, parents_R: Tensor) -> Tensor:
            nonlocal hidden_RE
            layout = view.layout(
                k,
                start=net.draft_kv_offset + (step - 1) * k,
                position=net.draft_kv_offset + step - 1,
                position_stride=0,
                mask_TW=beam.seen_BKW.flatten(0, 1),
                mask_start=net.draft_kv_offset,
            )
            # Indexing makes copies, because a forward pass may write over its input.
            hidden_RE = net.forward(beam.tokens_BK.reshape(-1), hidden_RE[parents_R], layout)
            return net.raw_logits(hidden_RE)

        return beam_candidates(self._ops, self._shape, net.raw_logits(hidden_RE), logits, net.target_ids)


def beam_candidates(
    ops: ModuleType,
    shape: DraftShape,
    first_BW: Tensor,
    logits: Callable[[int, Beam, Tensor], Tensor],
    target_ids_W: Tensor | None,
) -> Candidates:
    """Draft the candidates of trees: topk drafts after the root, and at every later step topk after each of the best
    topk branches. `first_BW`: the logits after the roots. `logits`: from the number of a step (1, 2, ..), the branches
    that it continues, and the index of each one's parent among those of the step before (in step 1 its request), the
    logits (R, W) after the branches, R = B * K; or (B, W) where all branches of a request have the same.
    `target_ids_W`: the target token of each draft token; None: the same vocabulary."""
    batch, k = len(first_BW), shape.topk
    words = max(1, -(-k * (shape.num_steps - 1) // 32))
    scores, ids = ops.draft_topk(first_BW, k)
    candidates, beam = ops.beam_start(scores, ids, target_ids_W, shape.num_candidates, words)
    request_B1 = torch.arange(batch, device=first_BW.device)[:, None]
    parents_BK, first_B1 = request_B1.expand(-1, k), request_B1 * k
    for step in range(1, shape.num_steps):
        scores, ids = (
            of_branch.view(batch, -1, k).expand(-1, k, -1)
            for of_branch in ops.draft_topk(logits(step, beam, parents_BK.reshape(-1)), k)
        )
        beam = ops.beam_expand(candidates, beam, scores, ids, target_ids_W, step)
        parents_BK = first_B1 + beam.parent_BK
    return candidates


def likely_tree(ops: ModuleType, view: BatchView, shape: DraftShape, candidates: Candidates) -> DraftTrees:
    """Return the trees of the most likely candidates."""
    nodes = ops.select_nodes(view.field(Field.ROOT), *candidates, shape.num_draft_tokens, shape.num_steps)
    return DraftTrees(nodes[0], None, *nodes[1:])
