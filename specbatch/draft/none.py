"""Plain decoding, as the draft method without drafts."""

from __future__ import annotations

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import DraftNet
from specbatch.draft.shape import num_lookahead


class NoDraft(DraftMethod):
    """Trees of the root alone. A `net` follows what is committed: other rounds of the schedule draft with it."""

    num_nodes = max_path = 1

    def __init__(self, net: DraftNet | None = None) -> None:
        self.net = net
        self.num_lookahead = num_lookahead(None, None if net is None else net.draft_kv_offset)

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        return DraftTrees(view.field(Field.ROOT)[:, None])
