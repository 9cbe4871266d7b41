"""The ranks that compute one model, and what they exchange.

Every rank calls the same operations in the same order with tensors of the same shapes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    rank: int
    size: int

    @abstractmethod
    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Launches `gather`, on a stream of its own where there are streams; the result waits for it. Others may be
        launched before."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """(size, *x.shape): the x of each rank. All have the same shape."""
        return self.start_gather(x)()

    def start_sum(self, x: Tensor) -> Callable[[], Tensor]:
        """Launches `sum`, as `start_gather` does."""
        gathered = self.start_gather(x)

        def total() -> Tensor:
            first, *others = gathered()
            for part in others:
                first = first + part
            return first

        return total

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, in their order. So all ranks get the same bits, and an element's bits do not depend on
        where it lies in x, which a ring's would."""
        return self.start_sum(x)()
