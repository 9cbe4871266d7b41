"""The ranks that compute one model, and what they exchange.

Every rank calls the same operations in the same order with tensors of the same shapes.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


def in_order(parts: Tensor) -> Tensor:
    """The sum of the ranks' parts, (size, ...), one after the other."""
    first, *others = parts
    for part in others:
        first = first + part
    return first


class Norm(Protocol):
    """A root-mean-square layer norm: x / sqrt(mean(x^2) + eps), rounded, times the weight."""

    weight: Tensor
    eps: float


class Group(Protocol):
    rank: int
    size: int
    device: torch.device = torch.device("cpu")

    @abstractmethod
    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Launches `gather`; the result waits for it. Others may be launched before. On CUDA it runs on the current
        stream."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """(size, *x.shape): the x of each rank. All have the same shape."""
        return self.start_gather(x)()

    def start_sum(self, x: Tensor, residual: Tensor | None = None) -> Callable[[], Tensor]:
        """Launches `sum`, as `start_gather` does. `residual`: to add after it."""
        gathered = self.start_gather(x)

        def total() -> Tensor:
            added = in_order(gathered())
            return added if residual is None else residual + added

        return total

    def start_normed_sum(
        self, x_TE: Tensor, residual_TE: Tensor, norm: Norm
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """The sum as of `start_sum`, and its norm. None in place of the norm: the caller computes it."""
        total = self.start_sum(x_TE, residual_TE)
        return lambda: (total(), None)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks. All ranks get the same bits.

        `GlooGroup`, and `CudaGroup` with `fixed_order`, add in the order of ranks: an element's bits do not depend on
        where it lies in x. `CudaGroup` without it adds some tensors by NCCL, in an order that can depend on their size
        and on the element's place (`algorithms.py`)."""
        return self.start_sum(x)()

    def largest(self, x: Tensor) -> Tensor:
        """Of each element, the largest over ranks; NaN if one of them is."""
        return self.gather(x).amax(dim=0)

    def least(self, value: int) -> int:
        """Of the values of all ranks. The host waits for it."""
        return int(self.gather(torch.tensor(value, device=self.device)).min())

    def of_first(self, values: list[float]) -> list[float]:
        """The values of rank 0. All ranks have equally many. The host waits for them."""
        found: list[float] = self.gather(torch.tensor(values, dtype=torch.float64, device=self.device))[0].tolist()
        return found

    def close(self) -> None:
        """Give back what is shared with the other ranks. Nothing is exchanged after it. A second call does nothing."""
        return

    def one_of_two_passes(self, number: int) -> AbstractContextManager[object]:
        """What is launched in it belongs to one of two passes at the same time, 0 or 1."""
        return contextlib.nullcontext()
