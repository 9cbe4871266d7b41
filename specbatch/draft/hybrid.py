"""Drafts of `suffix` or of a draft network, for each request and round whichever is expected to be accepted further.

All chains have estimates of their own: those of the network are its probabilities. How often drafts are right decides
how far each is trusted (`calibration.py`). Both draft in each round, and each chain is verified as a deterministic
draft: where a request samples, the network draws with the random numbers of the target (see `chain.py`), and a draft is
accepted if it is what the target draws. So texts are those of plain decoding.

Shape suffixes: B requests, C chains of a request, D drafts, S drafts of the network.
"""

from __future__ import annotations

from copy import copy
from types import ModuleType

import torch
from torch import Tensor

from specbatch.batch import Committed, Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.counts import EngineStats
from specbatch.draft.calibration import Chains
from specbatch.draft.chain import ChainDraft
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import SteppedNet
from specbatch.draft.shape import DraftShape, num_lookahead
from specbatch.draft.suffix import NETWORK, SuffixDraft, steps_of

NUM_STEPS = 3  # drafts of the network


class HybridDraft(DraftMethod):
    """Chains of `suffix`, or chains of NUM_STEPS drafts of an EAGLE-3 head."""

    reads_tokens = True

    def __init__(self, suffix: SuffixDraft, net: SteppedNet, ops: ModuleType) -> None:
        self.net = self._net = net
        self._ops, self._suffix, self.shared = ops, suffix, suffix.shared
        self.num_nodes = self.max_path = suffix.num_nodes
        self.sizes = suffix.sizes
        self.num_lookahead = num_lookahead(DraftShape(self.num_nodes - 1, 1, self.num_nodes), net.draft_kv_offset)
        self._chain = self._chain_of(self.num_nodes)

    def _chain_of(self, num_nodes: int) -> ChainDraft:
        steps = max(1, min(NUM_STEPS, num_nodes - 1))
        chain = ChainDraft(self._net, DraftShape(steps, 1, steps + 1), self._ops, coupled=True)
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
        found, drawn = self._suffix.chains(view, table), self._chain.draft(view, table, sampled)
        assert drawn.scores_BN is not None
        steps = drawn.tokens_BN.shape[1] - 1
        room_B1 = (view.field(Field.LIMIT) - view.length_B - 1)[:, None]
        has_room_BS = torch.arange(steps, device=room_B1.device) < room_B1
        of_network_BS = steps_of(drawn.scores_BN[:, 1:].exp() * has_room_BS)
        more = self.num_nodes - 1 - steps
        chains = Chains(
            _joined(found.tokens_BCD, drawn.tokens_BN[:, 1:], more),
            _joined(found.estimates_BCD, of_network_BS, more),
            torch.nn.functional.pad(found.sources_BC, (0, 1), value=NETWORK),
        )
        return self._suffix.choose(view, table, chains)

    def follow(
        self, view: BatchView, table: RequestTable, trees: DraftTrees, committed: Committed, eos_K: Tensor
    ) -> None:
        self._suffix.follow(view, table, trees, committed, eos_K)

    def record(self, stats: EngineStats) -> None:
        self._suffix.record(stats)


def _joined(chains_BCD: Tensor, chain_BS: Tensor, more: int) -> Tensor:
    """Return the chains and one more, which is padded with 0."""
    return torch.cat((chains_BCD, torch.nn.functional.pad(chain_BS, (0, more))[:, None]), dim=1)
