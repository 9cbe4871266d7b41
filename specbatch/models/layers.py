"""The layers of a decoder, inference only. Weights are plain tensors; nothing here knows about checkpoints.

Shape suffixes: T packed tokens, I input features, O output features, H heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.kernels import ops_for
from specbatch.models.packed import PackedLinear, in_blocks, is_packable


class RMSNorm:
    """Root-mean-square layer norm (Zhang and Sennrich 2019)."""

    def __init__(self, weight_E: Tensor, eps: float) -> None:
        self.weight = weight_E
        self.eps = eps
        self._rms_norm = ops_for(weight_E.device, weight_E.dtype).rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._rms_norm(x, self.weight, self.eps)
        return y


class Linear:
    """y = x W^T + b, with the input's norm before and the sum with a residual after, if these are asked for.

    A residual may be overwritten by the sum. On CPU in float32 the weight is packed, and a row's bits do not depend on
    the other rows.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.shape = self.out_features, self.in_features
        self._packed = PackedLinear(weight_OI, bias_O) if is_packable(weight_OI) else None
        if self._packed is None:
            self._weight, self._bias = weight_OI, bias_O
            self._ops = ops_for(weight_OI.device, weight_OI.dtype)

    def __call__(self, x_TI: Tensor, *, norm: RMSNorm | None = None, residual_TO: Tensor | None = None) -> Tensor:
        if self._packed is not None:
            x_TI = x_TI if norm is None else norm(x_TI)
            y = in_blocks(self._packed.multiply, x_TI, self._packed.settings.blocks)
            return y if residual_TO is None else residual_TO + y
        if norm is not None:
            y = self._ops.norm_linear(x_TI, norm.weight, norm.eps, self._weight, self._bias)
            return y if residual_TO is None else residual_TO + y
        product: Tensor = self._ops.linear(x_TI, self._weight, self._bias, residual_TO)
        return product


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
            self._weight = torch.cat((gate_OI, up_OI))
            self._bias = None if gate_bias_O is None or up_bias_O is None else torch.cat((gate_bias_O, up_bias_O))
            self._ops = ops_for(gate_OI.device, gate_OI.dtype)
        self.shape = gate_OI.shape[0] + up_OI.shape[0], gate_OI.shape[1]

    def __call__(self, x_TI: Tensor, *, norm: RMSNorm | None = None) -> Tensor:
        if not self._is_packed:
            y: Tensor
            if self._bias is not None:
                x_TI = x_TI if norm is None else norm(x_TI)
                y = self._ops.silu_mul(self._ops.linear(x_TI, self._weight, self._bias))
            elif norm is None:
                y = self._ops.gated_linear(x_TI, self._weight)
            else:
                y = self._ops.norm_gated_linear(x_TI, norm.weight, norm.eps, self._weight)
            return y
        x_TI = x_TI if norm is None else norm(x_TI)
        return in_blocks(self._multiply, x_TI, self._gate.settings.blocks)  # gate and up are of one size

    def _multiply(self, x_RI: Tensor) -> Tensor:
        return self._up.multiply_by(x_RI, self._gate.multiply(x_RI, "swish"))


class Rotary:
    """Rotary position embedding (Su et al. 2021), rotate-half form, from tables of cos and sin for `num_positions`."""

    def __init__(
        self, inv_freq: Tensor, attention_factor: float, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq.float())
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        self.cos_PD = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        self.sin_PD = torch.cat((-sin, sin), dim=-1).to(
            device=device, dtype=dtype
        )  # the sign of rotate-half is in the table

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin for packed tokens, each (T, 1, D): looked up once for all layers of a forward pass."""
        return self.cos_PD[positions_T].unsqueeze(1), self.sin_PD[positions_T].unsqueeze(1)

    @staticmethod
    def apply(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        swapped = x_THD.roll(x_THD.shape[-1] // 2, dims=-1)
        return x_THD * cos + swapped * sin  # not addcmul: it rounds some elements once and some twice
