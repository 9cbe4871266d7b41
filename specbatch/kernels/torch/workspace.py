"""What the programs of one launch of attention share: nothing, in plain torch."""

from __future__ import annotations

import torch


class Workspace:
    """What the Triton kernel of `attend` needs between launches. This one needs nothing."""

    def __init__(self, device: torch.device, rows: int, head_dim: int) -> None:
        pass
