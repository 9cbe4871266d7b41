"""Linear layers with weights of whole numbers (see `kernels/integers.py`), in plain torch.

Shape suffixes: M tokens, I input features, O output features, G groups of inputs, W words of a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.activations import Activation
from specbatch.kernels.integers import UNIT, IntegerWeight
from specbatch.kernels.torch.gemm import gated_linear, linear
from specbatch.kernels.torch.model import rms_norm


def pack_integers(numbers_OI: Tensor, bits: int) -> Tensor:
    """Return `words_OW` of uint8 numbers."""
    parts = 16 // bits
    padded = F.pad(numbers_OI, (0, -numbers_OI.shape[1] % UNIT)).unflatten(1, (-1, parts, UNIT // parts))
    words = sum(padded[:, :, part].int() << (bits * part) for part in range(parts))
    assert isinstance(words, Tensor)
    return words.flatten(1).to(torch.int16)


def unpack_integers(weight: IntegerWeight) -> Tensor:
    """Return the numbers (O, I) as uint8."""
    parts = 16 // weight.bits
    words = weight.words_OW.unflatten(1, (-1, UNIT // parts))
    numbers = torch.stack([words >> (weight.bits * part) for part in range(parts)], dim=2) & ((1 << weight.bits) - 1)
    return numbers.to(torch.uint8).flatten(1)[:, : weight.num_in]


def dequantise_integers(weight: IntegerWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight (O, I): exact differences times scales in float32 at least, rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    numbers = unpack_integers(weight).to(wide)
    zeros = 1 << (weight.bits - 1) if weight.zeros_GO is None else _spread(weight.zeros_GO.to(wide), weight)
    return ((numbers - zeros) * _spread(weight.scales_GO.to(wide), weight)).to(dtype)


def integer_linear(
    x_MI: Tensor,
    weight: IntegerWeight,
    bias_O: Tensor | None = None,
    residual_MO: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Return x W^T + bias, rounded to x's dtype, then + residual, rounded again; (M, O). The sum may be written over
    the residual. `norm`: weight (I,) and epsilon of an RMSNorm of x, which is multiplied instead."""
    return linear(_normed(x_MI, norm), dequantise_integers(weight, x_MI.dtype), bias_O, residual_MO)


def integer_gated_linear(
    x_MI: Tensor, weight: IntegerWeight, activation: Activation = "silu", norm: tuple[Tensor, float] | None = None
) -> Tensor:
    """Return activation(x G^T) * (x U^T), each step rounded to x's dtype. G is the first half of the weight. `norm`:
    see `integer_linear`."""
    return gated_linear(_normed(x_MI, norm), dequantise_integers(weight, x_MI.dtype), activation)


def _normed(x_MI: Tensor, norm: tuple[Tensor, float] | None) -> Tensor:
    return x_MI if norm is None else rms_norm(x_MI, *norm)


def _spread(of_groups_GO: Tensor, weight: IntegerWeight) -> Tensor:
    """Return (O, I) from what the inputs of a group share."""
    return of_groups_GO.T.repeat_interleave(weight.group, 1)[:, : weight.num_in]
