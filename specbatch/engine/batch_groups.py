"""The groups of a round's batch: requests that share pages, which the round reads once for all of a group."""

from __future__ import annotations

import numpy as np

from specbatch.cache.prefix_groups import Group, GroupTable, GroupTree
from specbatch.engine.sequence import Sequence


class BatchGroups:
    """`table` None: there are no groups. A change of the batch costs work for the requests that come or go only."""

    def __init__(self, table: GroupTable | None, page_size: int, num_requests: int) -> None:
        self._table, self._page_size = table, page_size
        self._tree = None if table is None else GroupTree(page_size, table.limits)
        self._members: set[int] = set()  # the request indices that are in the tree
        self._index_S = np.zeros(num_requests, dtype=np.int32)  # index in the batch of each request index
        self._batch: list[Sequence] = []
        self._queries = 0
        self._groups: list[Group] = []

    def forget(self, req_idx: int) -> None:
        """Forget the pages of a request index: a request was admitted to it, perhaps again, with new pages. Pages of
        other requests only grow."""
        if req_idx in self._members:
            assert self._tree is not None
            self._tree.remove(req_idx)
            self._members.remove(req_idx)
        self._batch, self._groups = [], []

    def of(self, batch: list[Sequence], num_queries: int) -> list[Group]:
        """Members are indices of the batch. `num_queries`: new tokens of each request. The same list, where nothing has
        changed."""
        if self._table is None or (batch == self._batch and num_queries == self._queries):
            return self._groups
        self._update(batch)
        assert self._tree is not None
        groups, costs = self._tree.groups(), self._table.limits.costs
        if costs is not None and groups:
            sizes, tokens = [len(group.members) for group in groups], [group.tokens for group in groups]
            groups = [groups[i] for i in costs.chosen(sizes, tokens, num_queries).nonzero()[0]]
        self._groups = [Group(self._index_S[group.members], group.tokens) for group in groups]
        self._batch, self._queries = batch, num_queries
        return self._groups

    def _update(self, batch: list[Sequence]) -> None:
        assert self._tree is not None
        indices = [seq.req_idx for seq in batch]
        now = set(indices)
        for req_idx in self._members - now:
            self._tree.remove(req_idx)
        if new := now - self._members:
            for seq in batch:
                if seq.req_idx in new:
                    # Pages that generated tokens fill are not shared.
                    self._tree.add(seq.req_idx, seq.pages[: seq.num_prefill_tokens // self._page_size])
        self._members = now
        self._index_S[indices] = np.arange(len(indices), dtype=np.int32)
