"""The ranks that compute one model, and what they exchange.

Every rank calls the same operations in the same order with tensors of the same shapes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    rank: int
    size: int

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """(size, *x.shape): the x of each rank. All have the same shape."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, in their order. So all ranks get the same bits, and an element's bits do not depend on
        where it lies in x, which a ring's would."""
        parts = self.gather(x)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total
