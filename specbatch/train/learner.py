"""The interface between the training loop and what is trained: a module, its batches, and its losses.

A *chain* is what a round drafts after a root. Row t of a text is the chain whose root is token t + 1. Step j of it is
its draft of token t + 2 + j.

Shape suffixes: B sequences, L padded length, R chains that learn at a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specbatch.train.examples import Example


@dataclass(frozen=True)
class Losses:
    """The losses of a batch."""

    total: Tensor  # scalar
    steps: list[Tensor]  # scalars, one a step: the mean loss of its chains
    hits: list[Tensor]  # (R,) bool, one a step: the draft's best token is the target's


class LearnedBatch(Protocol):
    """Right-padded texts, and the chains that learn from them."""

    tokens_BL: Tensor

    @property
    def rows(self) -> Sequence[Tensor]:
        """Return the rows (R,) of (B * L) of the chains that learn, one tensor for each step."""
        ...


class Learner(Protocol):
    """A drafter in training."""

    @property
    def module(self) -> nn.Module:
        """Return the drafter. Its parameters have the names of the checkpoint."""
        ...

    @property
    def weights(self) -> Sequence[float]:
        """Return the share of each step in the loss."""
        ...

    def settings(self) -> dict[str, Any]:
        """Return what the weights depend on in addition to `TrainSettings`."""
        ...

    def load_target(self) -> None:
        """Load the frozen target. It is called once there is something to train, and not before."""
        ...

    def batch(self, examples: Sequence[Example], step: int) -> Any:
        """Return the batch, on the CPU, from which optimiser step `step` learns."""
        ...

    def whole(self, examples: Sequence[Example]) -> Iterator[Any]:
        """Return batches of these examples in which each chain is once."""
        ...

    def losses(self, batch: Any) -> Losses:
        """Compute the losses of a batch of this learner."""
        ...


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor of the CPU on `device`, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
