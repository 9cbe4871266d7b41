"""The groups of a round's batch: requests that share pages, which the round reads once for all of a group."""

from __future__ import annotations

import numpy as np

from specbatch.cache.prefix_groups import Group, GroupTable, GroupTree
from specbatch.engine.sequence import Sequence


class BatchGroups:
    """`table` None: there are no groups. A change of the batch costs work for the requests that come or go only."""

    def __init__(self, table: GroupTable | None, page_size: int, num_slots: int) -> None:
        self._table, self._page_size = table, page_size
        self._tree = None if table is None else GroupTree(page_size, table.limits)
        self._slots: set[int] = set()  # the slots that are in the tree
        self._index_S = np.zeros(num_slots, dtype=np.int32)  # the index of each slot in the batch
        self._batch: list[Sequence] = []
        self._queries = 0
        self._groups: list[Group] = []

    def forget(self, slot: int) -> None:
        """A request was admitted to this slot, perhaps again, with new pages. (Pages of other requests only grow.)"""
        if slot in self._slots:
            assert self._tree is not None
            self._tree.remove(slot)
            self._slots.remove(slot)
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
        slots = [seq.req_idx for seq in batch]
        now = set(slots)
        for slot in self._slots - now:
            self._tree.remove(slot)
        if new := now - self._slots:
            for seq in batch:
                if seq.req_idx in new:
                    # Pages that generated tokens fill are not shared.
                    self._tree.add(seq.req_idx, seq.pages[: seq.num_prefill_tokens // self._page_size])
        self._slots = now
        self._index_S[slots] = np.arange(len(slots), dtype=np.int32)
