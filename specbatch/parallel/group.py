"""The ranks that compute one model, and what they exchange.

Every rank calls the same operations in the same order with tensors of the same shapes.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


def in_order(parts: Tensor) -> Tensor:
    """Add the parts of the ranks, (size, ...), in the order of ranks."""
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
        """Launch `gather`, and return a function that waits for the result. Other operations may be launched before
        that call. On CUDA it runs on the current stream."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return the x of each rank, (size, *x.shape). All have the same shape."""
        return self.start_gather(x)()

    def start_sum(self, x: Tensor, residual: Tensor | None = None) -> Callable[[], Tensor]:
        """Launch `sum`, and return a function that waits for the result. `residual`: a tensor to add to the sum."""
        gathered = self.start_gather(x)

        def total() -> Tensor:
            added = in_order(gathered())
            return added if residual is None else residual + added

        return total

    def start_dispatch(self, x: Tensor) -> Callable[[], Tensor]:
        """Launch `gather` for tokens that travel to all ranks in each layer. The result can be read until the next
        `start_scatter_sum` of the same pass."""
        return self.start_gather(x)

    def dispatch_place(self, like: Tensor) -> Tensor | None:
        """Return memory for a tensor like `like`. `start_dispatch` need not copy what is written there. None: there is
        no such memory."""
        return None

    def start_scatter_sum(self, parts: Tensor, residual: Tensor | None = None) -> Callable[[], Tensor]:
        """Launch a sum of which each rank gets a part, and return a function that waits for it. `parts`: (size, ...), a
        part for each rank. A rank gets the sum of the parts for it, added in the order of ranks, and the residual."""
        gathered = self.start_gather(parts)

        def total() -> Tensor:
            added = in_order(gathered()[:, self.rank])
            return added if residual is None else residual + added

        return total

    def agree(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values of each rank. All give the same number of values. The host waits for the other hosts, and
        no device takes part."""
        found: list[list[int]] = self.gather(torch.tensor(values, dtype=torch.int64)).tolist()
        return found

    def start_normed_sum(
        self, x_TE: Tensor, residual_TE: Tensor, norm: Norm
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Launch `start_sum`, and return a function that waits for the sum and its norm. If the norm is None, the
        caller computes it. The sum may be written to `x_TE`."""
        total = self.start_sum(x_TE, residual_TE)
        return lambda: (total(), None)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks. All ranks get the same bits.

        `GlooGroup`, and `CudaGroup` with `fixed_order`, add in the order of ranks: an element's bits do not depend on
        its position in x. Without `fixed_order`, `CudaGroup` adds some tensors by NCCL, in an order that can depend on
        their size and on the element's position (`algorithms.py`)."""
        return self.start_sum(x)()

    def largest(self, x: Tensor) -> Tensor:
        """Return for each element the largest value over ranks, or NaN if a rank has NaN."""
        return self.gather(x).amax(dim=0)

    def least(self, value: int) -> int:
        """Return the least of the values of all ranks. The host waits for it."""
        return int(self.gather(torch.tensor(value, device=self.device)).min())

    def of_first(self, values: list[float]) -> list[float]:
        """Return the values of rank 0. All ranks give the same number of values. The host waits for them."""
        found: list[float] = self.gather(torch.tensor(values, dtype=torch.float64, device=self.device))[0].tolist()
        return found

    def close(self) -> None:
        """Free what is shared with the other ranks. Nothing can be exchanged after this. A second call does nothing."""
        return

    def one_of_two_passes(self, number: int) -> AbstractContextManager[object]:
        """Return a context. Operations launched in it belong to pass `number`, 0 or 1, of two that run at the same
        time."""
        return contextlib.nullcontext()
