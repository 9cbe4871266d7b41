"""Linear layers with weights and inputs in FP8 (E4M3), in plain torch.

Inputs are multiplied by the reciprocal of a scale and rounded to E4M3. The scale belongs to one token, or with
`grouped` to GROUP features of one, and makes the largest value 448. Or it is `static`, the same number for all tokens.
So a token's result does not depend on the others.

Shape suffixes: T packed tokens, E hidden size, I input features, O output features, G groups of input features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.activations import Activation
from specbatch.kernels.quantised import E4M3_MAX, GROUP, SMALLEST_SCALE, Quantised
from specbatch.kernels.torch.model import act_mul, rms_norm


def scale_of(wide: Tensor) -> Tensor:
    """Return the scales of float32 numbers, with which the largest of the last dimension becomes 448. That dimension
    has one element in the result."""
    return _scale_for(wide.abs().amax(dim=-1, keepdim=True))


def _scale_for(largest: Tensor) -> Tensor:
    # The divisor is a tensor: CUDA multiplies by the reciprocal of a number, so a last bit could differ from a CPU's.
    return (largest / torch.full_like(largest, E4M3_MAX)).clamp(min=SMALLEST_SCALE)


def quantise(x_TI: Tensor, static: float | None = None, grouped: bool = False) -> Quantised:
    """Return x in FP8. A token with a NaN or an infinite value becomes NaN."""
    num_tokens, width = x_TI.shape
    wide = x_TI.float()
    padded = F.pad(wide, (0, -width % GROUP)) if grouped else wide
    parts_TGI = padded.unflatten(1, (-1, GROUP) if grouped else (1, width))
    scale = scale_of(parts_TGI) if static is None else wide.new_full((num_tokens, 1, 1), static)
    # The clamp comes first: torch before 2.13 rounds to NaN what E4M3 cannot hold.
    scaled = (parts_TGI * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX)
    if static is not None:  # otherwise the scale of an infinite value is infinite, and their product is NaN
        scaled = scaled.masked_fill(parts_TGI.isinf(), torch.nan)
    values_TI = scaled.to(torch.float8_e4m3fn).flatten(1)[:, :width]
    return Quantised(values_TI.contiguous(), scale.squeeze(-1))


def quantise_part(x_TI: Tensor, largest_over_ranks: Callable[[Tensor], Tensor]) -> Quantised:
    """Quantise tokens of which each rank has some features. The scale is that of the whole token. `largest_over_ranks`:
    returns the largest of the ranks' magnitudes (T, 1)."""
    wide = x_TI.float()
    scale = _scale_for(largest_over_ranks(wide.abs().amax(dim=1, keepdim=True)))
    return Quantised((wide * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale)


def rms_norm_quantised(
    x_TE: Tensor, weight_E: Tensor, eps: float, static: float | None = None, grouped: bool = False
) -> Quantised:
    return quantise(rms_norm(x_TE, weight_E, eps), static, grouped)


def act_mul_quantised(
    gate_up_T2I: Tensor, static: float | None = None, grouped: bool = False, activation: Activation = "silu"
) -> Quantised:
    return quantise(act_mul(gate_up_T2I, activation), static, grouped)


def scaled_linear(
    x: Quantised,
    weight_OI: Tensor,
    scale_OG: Tensor,
    dtype: torch.dtype,
    bias_O: Tensor | None = None,
    residual_TO: Tensor | None = None,
    invariant: bool = False,
) -> Tensor:
    """Return x W^T + bias, rounded to `dtype`, then + residual, rounded again; (T, O). `weight_OI`: E4M3 numbers.
    `scale_OG`: float32, (O, 1), or (O, G) if inputs are grouped. The sum may be written over the residual.
    `invariant`: a token's bits do not depend on the number of tokens."""
    wide, weight = x.values_TI.float(), weight_OI.float()
    if scale_OG.shape[1] > 1:
        y = F.linear(wide * _spread(x.scale_TG, wide), weight * _spread(scale_OG, weight))
    else:
        y = F.linear(wide, weight) * x.scale_TG * scale_OG[:, 0]
    y = (y if bias_O is None else y + bias_O.float()).to(dtype)
    return y if residual_TO is None else residual_TO + y


def _spread(scale: Tensor, values: Tensor) -> Tensor:
    """Return the scale of each feature from the scales of groups."""
    return scale.repeat_interleave(GROUP, 1)[:, : values.shape[1]]


def dequantise_fp8(values_OI: Tensor, scales_OG: Tensor) -> Tensor:
    """Return a weight (O, I) in float32 from E4M3 numbers and their scales: (O, 1), or one for each GROUP of inputs."""
    if scales_OG.shape[1] > 1:
        scales_OG = scales_OG.repeat_interleave(GROUP, 1)[:, : values_OI.shape[1]]
    return values_OI.float() * scales_OG
