"""GEMMs with the operations around them (norm, bias, residual, gate), in plain torch.

Shape suffixes: M tokens, E hidden size (input of a norm), I input features, O output features.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.activations import Activation
from specbatch.kernels.torch.model import gated, rms_norm


def linear(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, residual_MO: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, rounded to x's dtype, then + residual, rounded again; (M, O)."""
    y_MO = F.linear(x_MI, weight_OI, bias_O)
    return y_MO if residual_MO is None else residual_MO + y_MO


def norm_linear(
    x_ME: Tensor, norm_weight_E: Tensor, eps: float, weight_OE: Tensor, bias_O: Tensor | None = None
) -> Tensor:
    """Return linear(rms_norm(x)), (M, O)."""
    return F.linear(rms_norm(x_ME, norm_weight_E, eps), weight_OE, bias_O)


def gated_linear(x_ME: Tensor, gate_up_2IE: Tensor, activation: Activation = "silu") -> Tensor:
    """Return `gated` of x G^T and x U^T, (M, I), each step rounded to x's dtype. G is the first half of the weight."""
    gate_MI, up_MI = F.linear(x_ME, gate_up_2IE).chunk(2, dim=-1)
    return gated(gate_MI, up_MI, activation)


def norm_gated_linear(
    x_ME: Tensor, norm_weight_E: Tensor, eps: float, gate_up_2IE: Tensor, activation: Activation = "silu"
) -> Tensor:
    """Return gated_linear(rms_norm(x)), (M, I)."""
    return gated_linear(rms_norm(x_ME, norm_weight_E, eps), gate_up_2IE, activation)
