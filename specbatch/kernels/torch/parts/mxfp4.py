"""Weights in MXFP4 (OCP Microscaling Formats 1.0): E2M1 numbers of 4 bits (1 sign, 2 of exponent, 1 of mantissa), of
which each MXFP4_GROUP along a row has one scale, a power of two (E8M0).

A weight of N outputs and K inputs is (N, K / 2) uint8, with the even element in the low four bits, and scales (N, K /
MXFP4_GROUP) uint8, each its exponent + 127. Both are the layout of gpt-oss's files.

Shape suffixes: N outputs, K inputs, B = K / 2 bytes, G = K / MXFP4_GROUP groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.kernels.mxfp4 import MXFP4_GROUP

# The largest exponent + 127 with which each element is finite in bfloat16 and float32: 6 * 2^125. 255 means NaN.
MAX_SCALE = 252
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))  # the numbers of the codes 0 to 15


def dequantise(values_NB: Tensor, scales_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (N, K) in `dtype`. In bfloat16 and wider types it is exact. Float16 holds it if it is in its
    range."""
    wide = torch.promote_types(dtype, torch.float32)
    table = torch.tensor(VALUES, dtype=wide, device=values_NB.device)
    codes_NK = torch.stack((values_NB & 15, values_NB >> 4), dim=-1).flatten(-2)
    # The bits of 2^(scale - 127) in float32. That of scale 0 is a subnormal number.
    bits_NG = torch.where(scales_NG == 0, 1 << 22, scales_NG.int() << 23)
    scales = bits_NG.view(torch.float32).to(wide)
    found_NGK = table[codes_NK.int()].unflatten(-1, (-1, MXFP4_GROUP)) * scales[..., None]
    return found_NGK.flatten(-2).to(dtype)


def quantise(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight's values and scales. The largest exponent of a group becomes that of 4 (as the specification
    proposes), and elements become the nearest number, of two the one with an even mantissa."""
    groups = weight_NK.double().unflatten(-1, (-1, MXFP4_GROUP))
    peak = groups.abs().amax(-1, keepdim=True)
    exponents = torch.where(peak > 0, torch.floor(torch.log2(torch.where(peak > 0, peak, 1.0))) - 2, 0.0)
    exponents = exponents.clamp(-127, MAX_SCALE - 127)
    size = (groups * torch.exp2(-exponents)).abs()
    steps = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))  # the distance to the next number
    rounded = ((size / steps).round() * steps).clamp(max=_MAGNITUDES[-1])
    codes = torch.bucketize(rounded.contiguous(), rounded.new_tensor(_MAGNITUDES)) + 8 * groups.signbit()
    low, high = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4), (exponents[..., 0] + 127).to(torch.uint8)
