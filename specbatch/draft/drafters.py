"""Drafting on the device: the methods of `neural.py` and `ngram.py` for a whole batch, with fixed shapes and nothing
for the host to read. The drafts are the same.

Shape suffixes: B rows, N tree nodes, M longest path, D = N - 1 drafts, K = topk, C candidates, E hidden size, W draft
vocabulary or words of a mask, V target vocabulary, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from specbatch.batch import Candidates
from specbatch.cache.request_table import BatchView, Field, RequestTable
from specbatch.draft.network import DraftNet, num_lookahead
from specbatch.draft.rng import Draw
from specbatch.draft.shape import DraftShape


@dataclass(frozen=True, slots=True)
class Draft:
    """Trees of N nodes, the root first. Chains have no parents, depths and mask: they are what chains always are."""

    tokens_BN: Tensor  # int64
    num_nodes_B: Tensor | None = None  # int64, for chains of different lengths; None: all N
    parents_BN: Tensor | None = None
    depths_BN: Tensor | None = None
    mask_BNW: Tensor | None = None
    probs_BDW: Tensor | None = None  # what the drafts of a chain were drawn from; None: a deterministic choice


class Drafter(Protocol):
    """A draft method of the device engine."""

    num_nodes: int  # N
    max_path: int  # M: nodes of the longest path, the root counted
    branches: int  # rows of a request in one step of the draft network
    num_lookahead: int  # slots past the committed ones that a round may write
    net: DraftNet | None  # what draft-extend runs; None: nothing

    def draft(self, rows: BatchView, state: RequestTable, sampled: bool) -> Draft:
        """`sampled`: some row may have a positive temperature."""
        ...


class NoDrafter:
    """Plain decoding: roots alone. A `net` follows what is committed, for other rounds to draft with."""

    num_nodes = max_path = branches = 1

    def __init__(self, net: DraftNet | None = None) -> None:
        self.net = net
        self.num_lookahead = 1 if net is None else 1 + net.draft_kv_offset

    def draft(self, rows: BatchView, state: RequestTable, sampled: bool) -> Draft:
        return Draft(rows.field(Field.ROOT)[:, None])


class NgramDrafter:
    """Prompt lookup (see `NgramProposer`)."""

    branches = 1
    net: DraftNet | None = None

    def __init__(self, num_draft_tokens: int, min_match: int, max_match: int, ops: ModuleType) -> None:
        self.num_nodes = self.max_path = self.num_lookahead = num_draft_tokens
        self._min_match, self._max_match = min_match, max_match
        self._lookup = ops.ngram_lookup

    def draft(self, rows: BatchView, state: RequestTable, sampled: bool) -> Draft:
        drafts, count = self._lookup(
            state.tokens_SL,
            rows.req_idx_B,
            state.ints_SF[:, Field.LENGTH] + 1,
            state.ints_SF[:, Field.LIMIT],
            self._min_match,
            self._max_match,
            self.num_nodes - 1,
        )
        return Draft(torch.cat((rows.field(Field.ROOT)[:, None], drafts), dim=1), count + 1)


class NeuralDrafter:
    """Chain or tree drafting with a `DraftNet` (see `NeuralProposer`)."""

    def __init__(self, net: DraftNet, shape: DraftShape, ops: ModuleType) -> None:
        self.net: DraftNet | None = net
        self._net = net
        self._shape = shape
        self._ops = ops
        self.num_nodes = shape.num_draft_tokens
        self.branches = shape.topk
        self.max_path = min(shape.num_steps + 1, shape.num_draft_tokens)
        self.num_lookahead = num_lookahead(shape, net.draft_kv_offset)

    def draft(self, rows: BatchView, state: RequestTable, sampled: bool) -> Draft:
        return self.chain(rows, state, sampled) if self._shape.is_chain else self._tree(rows, state)

    def chain(self, rows: BatchView, state: RequestTable, sampled: bool) -> Draft:
        """A chain of num_steps drafts, whatever topk is."""
        hidden_BE = state.features_SE[rows.req_idx_B]
        tokens, probs = [rows.field(Field.ROOT)], []
        for step in range(self._shape.num_steps):
            if step > 0:
                # Behind the committed slots of the draft's cache, the root's among them where it has one.
                place = self._net.draft_kv_offset + step - 1
                hidden_BE = self._net.forward(tokens[-1], hidden_BE, rows.layout(1, start=place, position=place))
            logits = self._net.raw_logits(hidden_BE)
            if sampled:
                u = self._ops.uniform(*rows.rng, rows.length_B + (step + 1), Draw.DRAFT)
                probs.append(self._ops.distribution(logits, *rows.sampling))
                ids = self._ops.draw(probs[-1], u)
            else:
                ids = self._ops.argmax(logits)
            tokens.append(ids if self._net.target_ids is None else self._net.target_ids[ids])
        return Draft(torch.stack(tokens, dim=1), probs_BDW=torch.stack(probs, dim=1) if probs else None)

    def _tree(self, rows: BatchView, state: RequestTable) -> Draft:
        candidates = self.candidates(rows, state)
        nodes = self._ops.select_nodes(
            rows.field(Field.ROOT),
            candidates.tokens_BC,
            candidates.scores_BC,
            candidates.parents_BC,
            self.num_nodes,
            self._shape.num_steps,
        )
        return Draft(nodes[0], None, *nodes[1:])

    def candidates(self, rows: BatchView, state: RequestTable) -> Candidates:
        """What trees are chosen from: topk drafts of the root, and topk of each of the best topk at every step."""
        hidden_BE = state.features_SE[rows.req_idx_B]
        batch, k, draft_kv_offset = hidden_BE.shape[0], self._shape.topk, self._net.draft_kv_offset
        target_ids = self._net.target_ids
        words = max(1, -(-k * (self._shape.num_steps - 1) // 32))
        scores, ids = self._ops.draft_topk(self._net.raw_logits(hidden_BE), k)
        candidates, beam = self._ops.beam_start(scores, ids, target_ids, self._shape.num_candidates, words)
        features = hidden_BE.repeat_interleave(k, dim=0)  # a copy for each: a forward pass may write over them
        for step in range(1, self._shape.num_steps):
            layout = rows.layout(
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
