"""GEMMs on CUDA: the library's for many tokens, and our own (`skinny`) for few, whose time is that of reading weights.

Results are those of `kernels/torch/gemm.py`, with one difference: with many tokens the sum is written over the
residual, which saves a copy of the residual stream (and it is added before the GEMM is rounded). Shape suffixes as
there.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.activations import Activation
from specbatch.kernels.triton.model import act_mul, rms_norm
from specbatch.kernels.triton.parts.shared_memory import like_hopper
from specbatch.kernels.triton.skinny import ops as skinny
from specbatch.kernels.triton.skinny.tile import is_skinny


def linear(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, residual_MO: Tensor | None = None) -> Tensor:
    if _is_skinny(x_MI, weight_OI):
        return skinny.linear(x_MI, weight_OI, bias_O, residual_MO)
    if residual_MO is not None and bias_O is None:
        return residual_MO.addmm_(x_MI, weight_OI.T)
    y = F.linear(x_MI, weight_OI, bias_O)
    return y if residual_MO is None else residual_MO + y


def norm_linear(
    x_ME: Tensor, norm_weight_E: Tensor, eps: float, weight_OE: Tensor, bias_O: Tensor | None = None
) -> Tensor:
    if _is_skinny(x_ME, weight_OE):
        return skinny.norm_linear(x_ME, norm_weight_E, eps, weight_OE, bias_O)
    return F.linear(rms_norm(x_ME, norm_weight_E, eps), weight_OE, bias_O)


def gated_linear(x_ME: Tensor, gate_up_2IE: Tensor, activation: Activation = "silu") -> Tensor:
    if _is_skinny(x_ME, gate_up_2IE):
        return skinny.gated_linear(x_ME, gate_up_2IE, activation)
    return act_mul(F.linear(x_ME, gate_up_2IE), activation)


def norm_gated_linear(
    x_ME: Tensor, norm_weight_E: Tensor, eps: float, gate_up_2IE: Tensor, activation: Activation = "silu"
) -> Tensor:
    if _is_skinny(x_ME, gate_up_2IE):
        return skinny.norm_gated_linear(x_ME, norm_weight_E, eps, gate_up_2IE, activation)
    return act_mul(F.linear(rms_norm(x_ME, norm_weight_E, eps), gate_up_2IE), activation)


def _is_skinny(x_MI: Tensor, weight_OI: Tensor) -> bool:
    is_hopper = x_MI.is_cuda and like_hopper(x_MI.device)
    return is_skinny(x_MI.shape[0], weight_OI.shape[0], weight_OI.shape[1], x_MI.dtype, is_hopper)
