"""The tensors of weights in whole numbers, as AWQ, GPTQ and compressed-tensors store them, and their one form here.

All pack numbers of 4 or 8 bits into int32 words, the first one in the lowest bits. What is packed:

- GPTQ: `qweight` (I / words, O) along inputs, `qzeros` (G, O / words) along outputs, less one in the first version of
  the format, `scales` (G, O), `g_idx` (I,) the group of each input.
- AWQ: `qweight` (I, O / 8) and `qzeros` (G, O / 8) along outputs, of each eight in the order 0, 2, 4, 6, 1, 3, 5, 7;
  `scales` (G, O).
- compressed-tensors: `weight_packed` (O, I / words) along inputs, `weight_scale` (O, G), `weight_zero_point`
  (O / words, G) along outputs, `weight_shape`, `weight_g_idx` (I,).

Shape suffixes: I input features, O output features, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.models.linears.integer import IntegerNumbers
from specbatch.models.linears.integer_quantization import UniformIntegers

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where the numbers 0 to 7 are in a word


def read_integers(layer: str, load: Callable[[str], Tensor | None], quantization: UniformIntegers) -> IntegerNumbers:
    """Read one weight. `load`: returns a tensor of the layer by its name without that of the layer, on the device where
    numbers are unpacked; None: there is no such tensor. Raise ModelError for values that are no weight."""
    bits, layout = quantization.bits, quantization.layout

    def one(name: str) -> Tensor:
        tensor = load(name)
        assert tensor is not None, (layer, name)
        return tensor

    zeros_OG = None
    if layout == "packed":
        num_out, num_in = map(int, one("weight_shape").tolist())
        packed, scales_OG = one("weight_packed"), one("weight_scale")
        if num_out != len(packed) or packed.shape[1] != -(-num_in * bits // 32):
            raise ModelError(f"{layer}.weight_shape does not fit weight_packed", hint="download the file again")
        numbers_OI = unpack_words(packed, bits)[:, :num_in]
        if quantization.has_zeros:
            zeros_OG = unpack_words(one("weight_zero_point").T, bits)[:, :num_out].T
        groups_I = load("weight_g_idx") if quantization.is_ordered else None
    else:
        scales_OG, groups_I = one("scales").T, None
        num_out = len(scales_OG)
        qweight, qzeros = one("qweight"), one("qzeros")
        if layout == "awq":
            places = torch.tensor(_AWQ_PLACES, device=qweight.device)
            numbers_OI = unpack_words(qweight, bits).unflatten(1, (-1, 8))[..., places].flatten(1)[:, :num_out].T
            zeros_OG = unpack_words(qzeros, bits).unflatten(1, (-1, 8))[..., places].flatten(1)[:, :num_out].T
        else:
            groups_I = load("g_idx")
            numbers_OI = unpack_words(qweight.T, bits)
            if groups_I is not None:
                numbers_OI = numbers_OI[:, : len(groups_I)]
            if layout == "gptq":
                # The words were made by one subtraction, whose borrows cross numbers.
                qzeros = qzeros + (0x11111111 if bits == 4 else 0x01010101)
            zeros_OG = unpack_words(qzeros, bits)[:, :num_out].T
    return IntegerNumbers(
        numbers_OI, scales_OG, zeros_OG, bits, quantization.group or numbers_OI.shape[1], groups_I
    ).checked(layer)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of int32 words, uint8, along the last dimension."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    mask = (1 << bits) - 1
    return ((words[..., None] >> shifts) & mask).to(torch.uint8).flatten(-2)
