"""Layers that can be trained, with the arithmetic of `models/layers.py`.

Shape suffixes: L positions, P positions of a table, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbatch.models.config import ModelConfig
from specbatch.models.rope import RopeConfig


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


def layer_config(target: ModelConfig) -> ModelConfig:
    """Return the config of one layer of Llama with the target's sizes.

    Its rope has the target's base and no scaling, because scaling changes positions far beyond the lengths of training.
    """
    return ModelConfig(
        model_type="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=RopeConfig(theta=target.rope.theta),
        max_position_embeddings=target.max_position_embeddings,
        tie_word_embeddings=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,),
        eos_token_ids=target.eos_token_ids,
    )


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
