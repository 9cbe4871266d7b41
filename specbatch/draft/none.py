"""Plain decoding: the draft method without drafts."""

from __future__ import annotations

from copy import copy

from torch import Tensor

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import DraftNet
from specbatch.draft.shape import num_lookahead

# A forward pass of at most this number of tokens mostly waits for weights, so room for forced tokens costs little.
_CHEAP_TOKENS = 256
MAX_ROOM = 8  # nodes


class NoDraft(DraftMethod):
    """Draft trees that have the root alone. `net`: the draft network, whose cache follows the committed tokens, because
    other rounds of the schedule draft with it. `room`: the most nodes that `with_room` may add up to, for tokens that a
    grammar forces after the root."""

    has_drafts = False
    num_nodes = max_path = 1

    def __init__(self, net: DraftNet | None = None, room: int = 1) -> None:
        self.net, self._room = net, room
        self.num_lookahead = room - 1 + num_lookahead(None, None if net is None else net.draft_kv_offset)

    def with_room(self, batch_size: int) -> NoDraft:
        other = copy(self)
        other.num_nodes = other.max_path = max(1, min(self._room, _CHEAP_TOKENS // batch_size))
        return other

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        root_B1: Tensor = view.field(Field.ROOT)[:, None]
        if self.num_nodes == 1:
            return DraftTrees(root_B1)
        tokens_BN = root_B1.new_zeros(len(root_B1), self.num_nodes)
        tokens_BN[:, :1] = root_B1
        return DraftTrees(tokens_BN, root_B1.new_ones(len(root_B1)))
