"""Drafts of `suffix` or of a draft network, for each request and round whichever is expected to be accepted further.

All chains have estimates of their own: those of the network are its probabilities. How often drafts are right decides
how far each is trusted (`calibration.py`). Both draft in each round.

Where requests sample, the network draws its drafts, and acceptance compares its distributions with the target's. The
drafts of `suffix` are given: each is accepted with the target's probability of it. Such a choice between both must not
depend on what was drawn, or rejection sampling would be biased. So it reads a *forecast*: a chain whose estimates are
all the probability of the network's most likely first token. How often drafts of forecasts were right is learnt as that
of other chains. Drafts that were drawn and not verified say nothing about acceptance, and nothing is learnt from them.

*Coupled* drafts (see `chain.py`) are deterministic, as those of greedy requests are. Then the choice reads everything.

Shape suffixes: B requests, C chains of a request, D drafts, S drafts of the network, W draft vocabulary.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from types import ModuleType

from torch import Tensor

from specbatch.batch import Committed, Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.counts import EngineStats
from specbatch.draft.chain import ChainDraft
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import SteppedNet
from specbatch.draft.shape import DraftShape, num_lookahead
from specbatch.draft.suffix import SuffixDraft

NUM_STEPS = 3  # drafts of the network


class HybridDraft(DraftMethod):
    """Chains of `suffix`, or chains of NUM_STEPS drafts of an EAGLE-3 head."""

    reads_tokens = True

    def __init__(self, suffix: SuffixDraft, net: SteppedNet, ops: ModuleType, coupled: bool = False) -> None:
        self.net = self._net = net
        self._ops, self._suffix, self.shared, self._coupled = ops, suffix, suffix.shared, coupled
        self.num_nodes = self.max_path = suffix.num_nodes
        self.sizes = suffix.sizes
        self.num_lookahead = num_lookahead(DraftShape(self.num_nodes - 1, 1, self.num_nodes), net.draft_kv_offset)
        self._chain = self._chain_of(self.num_nodes)

    def _chain_of(self, num_nodes: int) -> ChainDraft:
        steps = max(1, min(NUM_STEPS, num_nodes - 1))
        chain = ChainDraft(self._net, DraftShape(steps, 1, steps + 1), self._ops, self._coupled)
        chain.scored = True
        return chain

    def narrowed(self, num_nodes: int) -> HybridDraft:
        other = copy(self)
        other.num_nodes = other.max_path = num_nodes
        other._suffix, other._chain = self._suffix.narrowed(num_nodes), self._chain_of(num_nodes)
        return other

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        if self.num_nodes == 1:
            return self._suffix.draft(view, table, sampled)
        drawn = self._chain.draft(view, table, sampled)
        probs_BSW, likely_B = drawn.probs_BDW, None
        if probs_BSW is not None:
            likely_B = self._ops.argmax(probs_BSW[:, 0])
        chains, known_BCD = self._suffix.chains(
            view, table, drawn.tokens_BN, drawn.scores_BN, view.length_B, view.field(Field.LIMIT), likely_B,
            self._net.target_ids,
        )  # fmt: skip
        trees = self._suffix.choose(view, table, chains, known_BCD)
        if probs_BSW is None:
            return trees
        assert trees.num_nodes_B is not None
        return replace(trees, probs_BDW=probs_BSW, num_drafts_B=trees.num_nodes_B - 1)

    def follow(
        self, view: BatchView, table: RequestTable, trees: DraftTrees, committed: Committed, eos_K: Tensor
    ) -> None:
        self._suffix.follow(view, table, trees, committed, eos_K)

    def record(self, stats: EngineStats) -> None:
        self._suffix.record(stats)
