"""The schedule: draft shapes by the number of running requests. With a dense model, few requests leave room for deep
drafts, and many do not. With experts it can be the other way round."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

from specbatch.draft.shape import DraftShape

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class ByBatch(Generic[T]):
    """Items by batch size. `items[i]` is for more than `bounds[i - 1]` and at most `bounds[i]` requests, and the last
    item also for more."""

    bounds: tuple[int, ...]  # ascending
    items: tuple[T, ...]

    def __post_init__(self) -> None:
        assert self.items, "there is an item"
        assert len(self.bounds) == len(self.items), "a bound for each item"
        assert all(low < high for low, high in pairwise((0, *self.bounds))), self.bounds

    def __str__(self) -> str:
        return ", ".join(f"<={bound}: {label(item)}" for bound, item in self.entries)

    @staticmethod
    def always(item: T, bound: int = 1) -> ByBatch[T]:
        return ByBatch((bound,), (item,))

    @property
    def entries(self) -> tuple[tuple[int, T], ...]:
        return tuple(zip(self.bounds, self.items, strict=True))

    @property
    def name(self) -> str:
        """The schedule in words: if it has a single item, that item's label."""
        return label(self.items[0]) if len(self.items) == 1 else str(self)

    def merged(self) -> ByBatch[T]:
        """Return the same schedule with equal neighbours merged into one item."""
        last = [i for i, item in enumerate(self.items) if self.items[i + 1 : i + 2] != (item,)]
        return ByBatch(tuple(self.bounds[i] for i in last), tuple(self.items[i] for i in last))

    def index(self, batch_size: int) -> int:
        return min(bisect_left(self.bounds, batch_size), len(self.items) - 1)

    def at(self, batch_size: int) -> T:
        return self.items[self.index(batch_size)]

    def map(self, function: Callable[[T], U]) -> ByBatch[U]:
        return ByBatch(self.bounds, tuple(function(item) for item in self.items))

    def batches(self, index: int, largest: int) -> range:
        """Return the batch sizes that item `index` is for, up to `largest`."""
        first = self.bounds[index - 1] + 1 if index else 1
        last = largest if index == len(self.items) - 1 else min(self.bounds[index], largest)
        return range(first, last + 1)


# The item None is plain decoding.
Schedule = ByBatch[DraftShape | None]


def label(item: object) -> str:
    return "plain" if item is None else str(item)


def shapes_of(schedule: Schedule) -> list[DraftShape]:
    """List the draft shapes of a schedule in order, without repetitions and without plain decoding."""
    return [shape for shape in dict.fromkeys(schedule.items) if shape is not None]
