"""Matrices of GGUF files as whole numbers, and the quantization of a file whose layers keep them.

A row of a matrix is blocks of 32 or 256 numbers, of which each 16 or 32 share a scale, a number in float16. In the K
types it is the product of a factor in float16 and a whole number, which float32 has exactly. Numbers of 5 and 6 bits
become bytes.
Source of the layouts: https://github.com/ggml-org/ggml (`block_q4_0` and others).

Shape suffixes: I input features, O output features, G groups of inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from specbatch.models.linears.integer import IntegerNumbers
from specbatch.models.linears.integer_quantization import IntegerForm, IntegerQuantization

_Q = GGMLQuantizationType
_FLOAT16, _FLOAT32 = 2, 4  # bytes
# What becomes of each type that is whole numbers.
FORMS: Mapping[GGMLQuantizationType, IntegerForm] = {
    _Q.Q4_0: IntegerForm(4, 32, _FLOAT16),
    _Q.Q4_1: IntegerForm(4, 32, 2 * _FLOAT32),
    _Q.Q4_K: IntegerForm(4, 32, 2 * _FLOAT32),
    _Q.Q5_0: IntegerForm(8, 32, _FLOAT16),
    _Q.Q5_1: IntegerForm(8, 32, 2 * _FLOAT32),
    _Q.Q5_K: IntegerForm(8, 32, 2 * _FLOAT32),
    _Q.Q6_K: IntegerForm(8, 16, _FLOAT32),
    _Q.Q8_0: IntegerForm(8, 32, _FLOAT16),
}


@dataclass(frozen=True, kw_only=True)
class GgufIntegers(IntegerQuantization):
    """The quantization of a GGUF file. `types`: those of the layers that are whole numbers. Its reader dequantises all
    other layers, and these where they do not stay packed."""

    types: Mapping[str, GGMLQuantizationType]

    def form(self, layer: str) -> IntegerForm:
        return FORMS[self.types[layer]]

    def covers(self, layer: str) -> bool:
        return self.is_kept and layer in self.types

    def stored(self, plain: Mapping[str, tuple[int, ...]], found: Collection[str]) -> dict[str, tuple[int, ...]]:
        return dict(plain)

    def describe(self) -> str:
        types = Counter(self.types.values()).most_common()
        layers = ", ".join(f"{count} in {kind.name} as int{FORMS[kind].bits}" for kind, count in types)
        kept = "" if self.is_kept else "; dequantised while loading"
        return f"layers of a GGUF file ({layers}; inputs as they are{kept})"


def read_integers(raw: Tensor, shape: tuple[int, ...], kind: GGMLQuantizationType) -> IntegerNumbers:
    """Read the bytes of a matrix of this shape and type, one of FORMS."""
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.view(shape[0], shape[1] // size, num_bytes)
    if kind == _Q.Q6_K:
        return _q6_k(blocks)
    if kind in (_Q.Q4_K, _Q.Q5_K):
        return _with_minima_k(blocks)
    if kind in (_Q.Q4_1, _Q.Q5_1):
        scales_OG, minima_OG = _float16(blocks[..., :4]).float().unbind(-1)
        values = _nibbles(blocks[..., 4:]) if kind == _Q.Q4_1 else _five_bits(blocks[..., 4:])
        return _less_minima(values, scales_OG, -minima_OG, FORMS[kind].bits)
    scales_OG, rest = _float16(blocks[..., :2])[..., 0], blocks[..., 2:]
    if kind == _Q.Q4_0:
        values = _nibbles(rest)
    elif kind == _Q.Q5_0:
        values = _five_bits(rest) + (128 - 16)
    else:
        values = rest ^ 128  # Q8_0 has signed numbers
    return IntegerNumbers(values.flatten(1), scales_OG, None, FORMS[kind].bits, size)


def _float16(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.float16)


def _nibbles(values: Tensor) -> Tensor:
    """Return the low 4 bits of the last dimension, then the high ones."""
    return torch.cat((values & 15, values >> 4), dim=-1)


def _five_bits(values: Tensor) -> Tensor:
    """Return 32 numbers of 20 bytes: their highest bits, and their low ones."""
    high = torch.stack([values[..., :4] >> bit & 1 for bit in range(8)], dim=-1).flatten(-2)
    return _nibbles(values[..., 4:]) | high << 4


def _with_minima_k(blocks: Tensor) -> IntegerNumbers:
    """Read blocks of Q4_K and Q5_K: two factors in float16, by which 8 scales and 8 minima of 6 bits are multiplied,
    the fifth bits of Q5_K, and the low bits of the numbers. Of each 32 bytes of these, the low bits are the 32 numbers
    before those of the high bits. Bit g of the 32 bytes of fifth bits is for group g."""
    factors = _float16(blocks[..., :4]).float()
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    low = blocks[..., -128:].unflatten(-1, (4, 32))
    values = torch.stack((low & 15, low >> 4), dim=-2).flatten(-3, -2)
    fifth = blocks[..., 16:-128]
    has_fifth = fifth.shape[-1] > 0
    if has_fifth:
        values = values | torch.stack([(fifth >> group & 1) << 4 for group in range(8)], dim=-2)
    wide_scales, wide_minima = factors[..., :1] * scales, factors[..., 1:] * minima
    return _less_minima(values.flatten(1, 2), wide_scales.flatten(1), wide_minima.flatten(1), 8 if has_fifth else 4)


def _q6_k(blocks: Tensor) -> IntegerNumbers:
    """Read blocks of Q6_K: low and high bits of 256 numbers, 16 scales of 8 bits, and a factor in float16. Of each 64
    bytes of low bits, the low ones are the 64 numbers before those of the high ones. Each 32 bytes of high bits are
    for 4 times 32 numbers."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64)))
    high = blocks[..., 128:192].unflatten(-1, (2, 32))
    highs = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    scales = _float16(blocks[..., 208:]).float() * blocks[..., 192:208].contiguous().view(torch.int8)
    numbers = (low | highs << 4) + (128 - 32)
    return IntegerNumbers(numbers.flatten(1), scales.flatten(1), None, 8, 16)


def _less_minima(values: Tensor, scales_OG: Tensor, minima_OG: Tensor, bits: int) -> IntegerNumbers:
    """Return scale * value - minimum with zero points, which are no whole numbers. `values`: (O, G, 32). Those of 5
    bits are moved to the middle of the 8 bits, so that few digits cancel in sums. Where the scale is 0, all numbers are
    one less than the zero point, and the scale is the minimum."""
    offset = 0 if bits == 4 else 128 - 16
    has_scale = scales_OG != 0
    scales = torch.where(has_scale, scales_OG, minima_OG)
    numbers = torch.where(has_scale[..., None], values, 0) + offset
    zeros = torch.where(has_scale, minima_OG / scales_OG, 1.0) + offset
    return IntegerNumbers(numbers.flatten(1), scales, zeros, bits, values.shape[-1])
