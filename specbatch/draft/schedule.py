"""What a round drafts may depend on how many rows are running: few rows leave room for deep drafts, many do not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from specbatch.draft.shape import DraftShape

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class ByBatch(Generic[T]):
    """`items[i]` is for more than `bounds[i - 1]` and at most `bounds[i]` running rows, the last item also for more."""

    bounds: tuple[int, ...]  # ascending
    items: tuple[T, ...]

    @staticmethod
    def always(item: T) -> ByBatch[T]:
        return ByBatch((1,), (item,))

    def index(self, batch_size: int) -> int:
        return min(bisect_left(self.bounds, batch_size), len(self.items) - 1)

    def at(self, batch_size: int) -> T:
        return self.items[self.index(batch_size)]

    def map(self, function: Callable[[T], U]) -> ByBatch[U]:
        return ByBatch(self.bounds, tuple(function(item) for item in self.items))

    def batches(self, index: int, largest: int) -> range:
        """The numbers of rows that item `index` is for, up to `largest`."""
        first = self.bounds[index - 1] + 1 if index else 1
        last = largest if index == len(self.items) - 1 else min(self.bounds[index], largest)
        return range(first, last + 1)


# None: plain decoding.
Schedule = ByBatch[DraftShape | None]
