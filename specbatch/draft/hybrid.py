"""Drafts of `suffix` or of a draft network, for each request and round whichever is expected to be accepted further.

A suffix draft has an estimate of its own. The network's chains have one for all requests: how often their drafts were
right lately, by position. Both draft in each round, and each chain is verified as a deterministic draft: where a
request samples, the network draws with the random numbers of the target (see `chain.py`), and a draft is accepted if it
is what the target draws. So texts are those of plain decoding.

Shape suffixes: B requests, S drafts of the network.
"""

from __future__ import annotations

from copy import copy
from types import ModuleType

import torch
from torch import Tensor

from specbatch.batch import Committed, Field, Output
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.counts import EngineStats
from specbatch.draft.chain import ChainDraft
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import SteppedNet
from specbatch.draft.shape import DraftShape, num_lookahead
from specbatch.draft.suffix import NETWORK, SuffixDraft

NUM_STEPS = 3  # drafts of the network
_MEMORY = 0.95  # weight of the old counts when a round is added
# Before rounds have shown more, a draft of the network is taken to be right in _PRIOR of the cases.
_PRIOR, _PRIOR_WEIGHT = 0.7, 8.0


class HybridDraft(DraftMethod):
    """Chains of `suffix`, or chains of NUM_STEPS drafts of an EAGLE-3 head."""

    reads_tokens = True

    def __init__(self, suffix: SuffixDraft, net: SteppedNet, ops: ModuleType) -> None:
        self.net = self._net = net
        self._ops, self._suffix = ops, suffix
        self.num_nodes = self.max_path = suffix.num_nodes
        self.sizes = suffix.sizes
        self.num_lookahead = num_lookahead(DraftShape(self.num_nodes - 1, 1, self.num_nodes), net.draft_kv_offset)
        self._chain = self._chain_of(self.num_nodes)
        # Drafts of the network by position: those that were tried lately, and those that were right.
        self.of_network_2S = torch.zeros(2, NUM_STEPS, device=suffix.shared.corpus.words_H.device)

    def _chain_of(self, num_nodes: int) -> ChainDraft:
        steps = max(1, min(NUM_STEPS, num_nodes - 1))
        return ChainDraft(self._net, DraftShape(steps, 1, steps + 1), self._ops, coupled=True)

    def narrowed(self, num_nodes: int) -> HybridDraft:
        other = copy(self)
        other.num_nodes = other.max_path = num_nodes
        other._suffix, other._chain = self._suffix.narrowed(num_nodes), self._chain_of(num_nodes)
        return other

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        if self.num_nodes == 1:
            return self._suffix.draft(view, table, sampled)
        found, drawn_BN = self._suffix.drafts(view, table), self._chain.draft(view, table, sampled).tokens_BN
        steps = drawn_BN.shape[1] - 1
        room_B = (view.field(Field.LIMIT) - view.length_B - 1).clamp(min=0)
        is_net_B = self._expected(steps) > found.expected_B
        counts_B = torch.where(is_net_B, room_B.clamp(max=steps), found.counts_B)
        of_net = torch.nn.functional.pad(drawn_BN, (0, self.num_nodes - 1 - steps))
        of_suffix = torch.cat((drawn_BN[:, :1], found.tokens_BD), dim=1)
        sources_B = torch.where(is_net_B, NETWORK, found.sources_B)
        table.drafted_S2.index_copy_(0, view.req_idx_B, torch.stack((counts_B, sources_B), dim=1))
        return DraftTrees(torch.where(is_net_B[:, None], of_net, of_suffix), counts_B + 1)

    def _expected(self, steps: int) -> Tensor:
        """Return the expected number of right drafts of the network."""
        tried_S, right_S = self.of_network_2S[:, :steps]
        shares_S = (right_S + _PRIOR * _PRIOR_WEIGHT) / (tried_S + _PRIOR_WEIGHT)
        return shares_S.cumprod(0).sum()

    def follow(self, view: BatchView, table: RequestTable, committed: Committed, eos_K: Tensor) -> None:
        drafted_B2 = table.drafted_S2[view.req_idx_B]
        num_new_B = committed.output_BZ[:, Output.NUM_NEW].long()
        # Each request and position that was tried: its draft is one of the network's, and those before it were right.
        position_S = torch.arange(self.of_network_2S.shape[1], device=num_new_B.device)
        is_net_BS = ((drafted_B2[:, 1] == NETWORK) & (num_new_B > 0))[:, None] & (position_S < drafted_B2[:, :1])
        tried_S = (is_net_BS & (num_new_B[:, None] > position_S)).sum(0)
        right_S = (is_net_BS & (num_new_B[:, None] > position_S + 1)).sum(0)
        self.of_network_2S.mul_(_MEMORY).add_(torch.stack((tried_S, right_S)))
        self._suffix.follow(view, table, committed, eos_K)

    def record(self, stats: EngineStats) -> None:
        self._suffix.record(stats)
