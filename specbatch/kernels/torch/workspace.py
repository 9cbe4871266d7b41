"""The memory that the programs of one launch of attention share. In plain torch there is none."""

from __future__ import annotations

import torch


class Workspace:
    """A workspace with the interface of the Triton kernel's. It holds no memory."""

    def __init__(self, device: torch.device, rows: int, head_dim: int) -> None:
        pass
