"""Norms and rotary embeddings, for inference only.

Shape suffixes: T packed tokens, E hidden size, H heads, D head dimension, P positions, R dimensions that rotate.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from specbatch.kernels import ops_for


class RMSNorm:
    """Root-mean-square layer norm (Zhang and Sennrich 2019). `kernels.torch.model.rms_norm` says what a weight in
    float32 means."""

    def __init__(self, weight_E: Tensor, eps: float, ops: ModuleType | None = None) -> None:
        """Make a norm. `ops`: the kernels of the inputs' dtype; None: those of the weight's."""
        self.weight = weight_E
        self.eps = eps
        self._ops = ops or ops_for(weight_E.device, weight_E.dtype)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return norm(x). `out`: a contiguous tensor to which it is written; None: a new one."""
        y: Tensor = self._ops.rms_norm(x, self.weight, self.eps, out)
        return y

    def added(self, y_TE: Tensor, residual_TE: Tensor, next_norm: RMSNorm | None) -> tuple[Tensor, Tensor | None]:
        """Return x = residual + norm(y), and next_norm(x) if there is such a norm, which has the same eps."""
        next_weight_E = None if next_norm is None else next_norm.weight
        sums: tuple[Tensor, Tensor | None] = self._ops.add_normed(
            y_TE, residual_TE, self.weight, self.eps, next_weight_E
        )
        return sums


class LayerNorm:
    """Layer norm (Ba et al. 2016), see `kernels.torch.model.layer_norm`. Linear layers do not compute it, as they do an
    RMSNorm: families whose norms are these have layers of their own (`families/layer_norms.py`)."""

    def __init__(self, weight_E: Tensor, bias_E: Tensor | None, eps: float, ops: ModuleType) -> None:
        self._weight, self._bias, self._eps, self._ops = weight_E, bias_E, eps, ops

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._ops.layer_norm(x, self._weight, self._bias, self._eps)
        return y


class Rotary:
    """Rotary position embedding (Su et al. 2021), rotate-half form, from tables of cos and sin for `num_positions`. The
    first R dimensions of a head rotate; in most models these are all."""

    def __init__(
        self, inv_freq: Tensor, attention_factor: float, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq.float())
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        self.cos_PR = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        self.sin_PR = torch.cat((-sin, sin), dim=-1).to(
            device=device, dtype=dtype
        )  # the sign of rotate-half is in the table

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin for packed tokens, each (T, 1, R): read once for all layers of a forward pass."""
        return self.cos_PR[positions_T].unsqueeze(1), self.sin_PR[positions_T].unsqueeze(1)

    @staticmethod
    def apply(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotary_dim = cos.shape[-1]
        if rotary_dim < x_THD.shape[-1]:
            return torch.cat((Rotary.apply(x_THD[..., :rotary_dim], cos, sin), x_THD[..., rotary_dim:]), dim=-1)
        swapped = x_THD.roll(rotary_dim // 2, dims=-1)
        return x_THD * cos + swapped * sin  # not addcmul: it rounds some elements once and some twice
