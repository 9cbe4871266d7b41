"""The layers of a decoder, inference only. Weights are plain tensors; nothing here knows about checkpoints.

Shape suffixes: T packed tokens, I input features, O output features, H heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.models.packed import PackedLinear, in_blocks, is_packable


class Linear:
    """y = x W^T + b. On CPU in float32 the weight is packed, and a row's bits do not depend on the other rows."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self._packed = PackedLinear(weight_OI, bias_O) if is_packable(weight_OI) else None
        if self._packed is None:
            self._weight, self._bias = weight_OI, bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self._packed is None:
            return F.linear(x_TI, self._weight, self._bias)
        return in_blocks(self._packed.multiply, x_TI, self._packed.settings.blocks)


class GatedLinear:
    """silu(x G^T) * (x U^T): the first half of a SwiGLU feed-forward.

    On CPU in float32 the activation is fused into the products, where it is computed alike for every element.
    Torch's own computes the elements at the end of a thread's share by another formula.
    """

    def __init__(self, gate_OI: Tensor, up_OI: Tensor, gate_bias_O: Tensor | None, up_bias_O: Tensor | None) -> None:
        self._is_packed = is_packable(gate_OI)
        if self._is_packed:
            self._gate, self._up = PackedLinear(gate_OI, gate_bias_O), PackedLinear(up_OI, up_bias_O)
        else:
            bias = None if gate_bias_O is None or up_bias_O is None else torch.cat((gate_bias_O, up_bias_O))
            self._gate_up = Linear(torch.cat((gate_OI, up_OI)), bias)

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not self._is_packed:
            gate, up = self._gate_up(x_TI).chunk(2, dim=-1)
            return F.silu(gate) * up
        return in_blocks(self._multiply, x_TI, self._gate.settings.blocks)  # gate and up are of one size

    def _multiply(self, x_RI: Tensor) -> Tensor:
        return self._up.multiply_by(x_RI, self._gate.multiply(x_RI, "swish"))


class RMSNorm:
    """Root-mean-square layer norm (Zhang and Sennrich 2019), computed in float32 at least, as the reference models
    do."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight, self._eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(x.dtype)


class Rotary:
    """Rotary position embedding (Su et al. 2021), rotate-half form, from tables of cos and sin for `num_positions`."""

    def __init__(
        self, inv_freq: Tensor, attention_factor: float, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq.float())
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        self._cos = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(
            device=device, dtype=dtype
        )  # the sign of rotate-half is in the table

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin for packed tokens, each (T, 1, D): looked up once for all layers of a forward pass."""
        return self._cos[positions_T].unsqueeze(1), self._sin[positions_T].unsqueeze(1)

    @staticmethod
    def apply(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        swapped = x_THD.roll(x_THD.shape[-1] // 2, dims=-1)
        return x_THD * cos + swapped * sin  # not addcmul: it rounds some elements once and some twice
