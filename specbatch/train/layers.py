"""Layers that can be trained, with the arithmetic of `models/layers.py`.

Shape suffixes: L positions, P positions of a table, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbatch.models.config import ModelConfig


class Norm(nn.Module):
    """RMS norm in float32 at least; the result has the width of the weight (float32 in training)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_tables(config: ModelConfig, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute cos and sin (P, D) in float32; the sin has the sign of rotate-half."""
    inverse, factor = config.rope.inverse_frequencies(config.head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), dim=-1).to(device), torch.cat((-sin, sin), dim=-1).to(device)


def rotate(x: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al. 2021) to x, (..., L, D), in x's dtype."""
    cos, sin = cos_LD.to(x.dtype), sin_LD.to(x.dtype)
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin
