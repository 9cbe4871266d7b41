"""Device memory that the programs of one launch of attention share."""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.kernels.triton.parts.attention_tile import padded


class Workspace:
    """Memory for partial results of splits. Each stream that runs attention has one, because launches in order share
    it. It has its final size from the start, because captured graphs hold its address.

    `rows`: the rows of the tiles of one launch, summed over the splits. `head_dim`: in elements.
    """

    def __init__(self, device: torch.device, rows: int, head_dim: int) -> None:
        self._partials = torch.empty(rows * padded(head_dim), device=device)
        self._sums = torch.empty(rows * 2, device=device)
        # No tile has fewer rows than 16.
        self._counters = torch.zeros(rows // 16, dtype=torch.int32, device=device)

    def reserve(self, tiles: int, splits: int, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (partials, sums, counters) for `tiles` tiles of `rows` rows."""
        assert tiles * splits * rows * width <= self._partials.numel(), (tiles, splits, rows, width)
        assert tiles * splits * rows * 2 <= self._sums.numel(), (tiles, splits, rows)
        assert tiles <= self._counters.numel(), tiles
        return self._partials, self._sums, self._counters
