"""The number of nodes that a round verifies, if its chains share a budget."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class VerifyBudget:
    """The budget of rounds, the same for all rounds of a batch size. `nodes`: nodes for each request on average, the
    root included."""

    nodes: float

    def num_verified(self, size: int, num_nodes: int) -> int | None:
        """Return the number of nodes that a round of `size` requests, padding included, verifies; None: all, which are
        `num_nodes` for each request."""
        wanted = math.ceil(self.nodes * size)
        return wanted if wanted < size * num_nodes else None
