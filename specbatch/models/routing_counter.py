"""Counts in rounds which experts tokens choose, on the device.

Each layer leaves its choices while a round runs, and the round adds them up once, into tensors that stay where they
are. So a CUDA graph counts at each replay, and the host reads the counts only if the engine is idle.

Shape suffixes: T packed tokens, K experts of a token, L layers with experts, X experts, B ranges of numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from specbatch.counts import ExpertCounts

# A range ends at each of these numbers of tokens, and the last one has no end.
_ENDS = [1, *(half * 2**k for k in range(14) for half in (2, 3))]


class RoutingCounter:
    """The counts of a model with `num_layers` layers of `num_experts` experts."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self._load_LX = torch.zeros((num_layers, num_experts), dtype=torch.int64, device=device)
        # Rounds, their tokens, and their distinct experts summed over the layers.
        self._sums_B3 = torch.zeros((len(_ENDS) + 1, 3), dtype=torch.int64, device=device)
        self._ends = torch.tensor(_ENDS, device=device)
        self._first_L11 = num_experts * torch.arange(num_layers, device=device)[:, None, None]
        self._chosen: list[Tensor] | None = None  # choices of each layer in the round that is counted

    def record(self, experts_TK: Tensor) -> None:
        """Note the choices of the next layer, if a round is counted."""
        if self._chosen is not None:
            self._chosen.append(experts_TK)

    @contextmanager
    def round(self, slots_T: Tensor) -> Iterator[None]:
        """Count the forward pass that runs meanwhile. `slots_T`: the slots of its tokens; padding has slots below 0,
        and does not count."""
        self._chosen = []
        try:
            yield
            self._add(torch.stack(self._chosen), slots_T >= 0)
        finally:
            self._chosen = None

    def _add(self, chosen_LTK: Tensor, counts_T: Tensor) -> None:
        ones_LTK = counts_T[None, :, None].to(torch.int64).expand_as(chosen_LTK)
        load = torch.zeros_like(self._load_LX).view(-1)
        load.scatter_add_(0, (chosen_LTK + self._first_L11).view(-1), ones_LTK.reshape(-1))
        self._load_LX += load.view_as(self._load_LX)
        num_tokens = counts_T.sum()
        sums = torch.stack((num_tokens > 0, num_tokens, (load > 0).sum()))
        self._sums_B3.index_add_(0, torch.bucketize(num_tokens, self._ends)[None], sums[None])

    def reset(self) -> None:
        """Forget all rounds."""
        self._load_LX.zero_()
        self._sums_B3.zero_()

    def read(self) -> ExpertCounts:
        """Return the counts since the last reset. The host waits for the device."""
        by_range = zip([*_ENDS, 2 * _ENDS[-1]], self._sums_B3.tolist(), strict=True)
        return ExpertCounts(self._load_LX.tolist(), {end: sums for end, sums in by_range if sums[0]})
