"""Choices of a few items of a stream, in memory for these items only."""

from __future__ import annotations

import heapq
import itertools
import random
from typing import Generic, TypeVar

T = TypeVar("T")


class Sample(Generic[T]):
    """A random sample of a stream (Vitter's algorithm R); the same stream gives the same sample."""

    def __init__(self, size: int) -> None:
        self.items: list[T] = []
        self._size = size
        self._seen = 0
        self._random = random.Random(0)

    def add(self, item: T) -> None:
        self._seen += 1
        if len(self.items) < self._size:
            self.items.append(item)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self.items[place] = item


class Highest(Generic[T]):
    """The items of a stream with the highest keys; of equal keys the first ones."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._order = itertools.count()
        self._heap: list[tuple[tuple[float, ...], int, T]] = []

    def add(self, key: tuple[float, ...], item: T) -> None:
        entry = key, -next(self._order), item
        if len(self._heap) < self._size:
            heapq.heappush(self._heap, entry)
        elif entry[:2] > self._heap[0][:2]:
            heapq.heapreplace(self._heap, entry)

    @property
    def items(self) -> list[T]:
        """Return the items, the highest first."""
        return [item for *_, item in sorted(self._heap, key=lambda entry: entry[:2], reverse=True)]
