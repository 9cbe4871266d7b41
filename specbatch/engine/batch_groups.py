"""The groups of a round's batch: requests that share pages, which the round reads once for all of a group."""

from __future__ import annotations

from specbatch.cache.prefix_groups import Group, GroupFinder, GroupTable
from specbatch.engine.sequence import Sequence


class BatchGroups:
    """`table` None: there are no groups."""

    def __init__(self, table: GroupTable | None, page_size: int) -> None:
        self._finder = None if table is None else GroupFinder(page_size, table.limits)
        self._batch: list[Sequence] = []
        self._groups: list[Group] = []

    def forget(self) -> None:
        """A request was admitted, perhaps again: its pages are new. (The others' only grow.)"""
        self._batch, self._groups = [], []

    def of(self, batch: list[Sequence]) -> list[Group]:
        """Found again only where the batch has changed. Members are indices of the batch."""
        if self._finder is not None and batch != self._batch:
            self._batch, self._groups = batch, self._finder.find([seq.pages for seq in batch])
        return self._groups
