"""Checks of a deterministic run on the card at hand: results that must have equal bits, whatever is computed with them.

They run when all weights are read, not layer by layer. So the kernels that they launch are compiled in threads before,
with those of rounds (`setup/compile_ahead.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specbatch.errors import ModelError


class Pair(NamedTuple):
    """Two results that must be equal. `differs`: the sentence that says that they are not."""

    found: Tensor
    expected: Tensor
    differs: str


Check = Callable[[], Iterator[Pair]]


class CardChecks:
    """The checks of a model's layers. Layers of one size are checked once."""

    def __init__(self) -> None:
        self._checks: dict[Hashable, Check] = {}

    def add(self, size: Hashable, check: Check) -> None:
        self._checks.setdefault(size, check)

    def launch(self) -> None:
        """Launch the kernels without comparing results, over fake tensors, which have no numbers."""
        for check in self._checks.values():
            for _ in check():
                pass

    def run(self) -> None:
        """Run and forget the checks. Raises ModelError."""
        for check in self._checks.values():
            for pair in check():
                if not torch.equal(pair.found, pair.expected):
                    raise ModelError(
                        f"{pair.differs}: this GPU cannot run deterministically", "engine.deterministic: false"
                    )
        self._checks.clear()  # they hold weights
