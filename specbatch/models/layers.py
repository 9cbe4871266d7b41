"""The layers of a decoder, inference only. Weights are plain tensors; nothing here knows about checkpoints.

Shape suffixes: T packed tokens, I input features, O output features, H heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN packs a float32 weight for a given number of rows. The layout for this many serves 1 to 64 rows well: on
# AVX-512 a product with 8 rows then costs 1.2x of one row, against 3x with an unpacked weight.
_PACK_ROWS = 16


class Linear:
    """y = x W^T + b.

    On CPU in float32 the weight is packed once by oneDNN. That is faster for the few rows of decoding and verification,
    and a row's result does not depend on how many rows there are (from two rows on; one row is computed as two), which
    the bitwise invariance of the CPU path rests on; tests/test_invariance.py watches it.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.bias = bias_O
        self._packed = (
            weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        )
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _PACK_ROWS)
        else:
            self._weight = weight_OI

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(x_TI, self._weight, self.bias)
        if x_TI.shape[0] == 1:
            return self._multiply(x_TI.expand(2, -1).contiguous())[:1]
        return self._multiply(x_TI.contiguous())

    def _multiply(self, x_TI: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_TI, self._weight, self.bias, "none", [], "")


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
        return (x_THD * cos).addcmul_(swapped, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's elementwise part: silu(gate) * up of a (T, 2 * F) product."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
