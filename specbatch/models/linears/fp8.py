"""Weights in FP8 (E4M3), and the linear layers that compute with them on a CPU: the arithmetic of the GPU, emulated.

`kernels/torch/fp8.py` says how inputs are quantised. The GEMM multiplies the rounded numbers exactly and adds in
float32 at least. The result is multiplied by both scales. Where a checkpoint asks for one dynamic scale for all tokens
of a batch, each token gets its own: that is more exact, and needs no batch.

Shape suffixes: T packed tokens, I input features, O output features, G blocks of input features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.activations import Activation
from specbatch.kernels.quantised import E4M3_MAX, GROUP
from specbatch.kernels.torch.fp8 import dequantise_fp8, quantise, quantise_part, scale_of
from specbatch.kernels.torch.model import activated, gated
from specbatch.models.linears.linear import GatedLinear, Linear
from specbatch.models.linears.quantization import InputScales
from specbatch.parallel.group import Group

# torch computes elements in vectors, and those at the end of a thread's share one by one, by another formula. A part of
# this size is one share, and of whole vectors.
_SHARE, _VECTORS = 32768, 64


@dataclass(frozen=True)
class Fp8Weight:
    """`values_OI`: E4M3 numbers. `scale`: (O, 1), or (O, G) with blocks; float32."""

    values_OI: Tensor
    scale: Tensor
    inputs: InputScales
    input_scale: float | None = None  # scale of static inputs

    def dequantised(self) -> Tensor:
        """(O, I) float32."""
        return dequantise_fp8(self.values_OI, self.scale)


def quantise_weight(weight_OI: Tensor) -> Fp8Weight:
    """A scale for each output, so that the largest weight becomes 448."""
    wide = weight_OI.float()
    scale = scale_of(wide)
    # The clamp comes first: torch before 2.13 rounds to NaN what E4M3 cannot hold.
    return Fp8Weight((wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale, "token")


def expand_scale(scale: Tensor, weight_shape: tuple[int, ...], block_outputs: int | None) -> Tensor:
    """A stored scale as (O, 1), or as (O, G) where it belongs to blocks of `block_outputs` outputs."""
    scale = scale.float()
    if block_outputs is not None:
        return scale.repeat_interleave(block_outputs, 0)[: weight_shape[0]].contiguous()
    return scale.reshape(-1, 1).expand(weight_shape[0], 1).contiguous()


def joined_weights(weights: list[Fp8Weight]) -> Fp8Weight | None:
    """Layers of the same input as one; None where their inputs are quantised in different ways."""
    first = weights[0]
    if any((one.inputs, one.input_scale, one.scale.shape[1]) != _kind(first) for one in weights):
        return None
    values = torch.cat([one.values_OI.view(torch.uint8) for one in weights]).view(torch.float8_e4m3fn)
    return Fp8Weight(values, torch.cat([one.scale for one in weights]), first.inputs, first.input_scale)


def _kind(weight: Fp8Weight) -> tuple[InputScales, float | None, int]:
    return weight.inputs, weight.input_scale, weight.scale.shape[1]


class Fp8Linear(Linear):
    """`make_linear`: makes the GEMM, from a float32 weight. `input_ranks`: have the features of the inputs that this
    process has not."""

    def __init__(
        self,
        weight: Fp8Weight,
        bias_O: Tensor | None,
        make_linear: Callable[[Tensor], Linear],
        input_ranks: Group | None = None,
    ) -> None:
        assert weight.inputs != "none", "a layer whose inputs are not quantised is an ordinary one"
        self._input_ranks = input_ranks
        self._inputs, self._input_scale, self._bias = weight.inputs, weight.input_scale, bias_O
        # Scales of blocks are a part of the weight.
        self._scale_O = weight.scale[:, 0] if weight.scale.shape[1] == 1 else None
        self._gemm = make_linear(weight.dequantised() if self._scale_O is None else weight.values_OI.float())

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self._inputs == "token" and self._input_ranks is not None:
            values_TI, scale_TG = quantise_part(x_TI, self._input_ranks.largest)
        else:
            values_TI, scale_TG = quantise(x_TI, self._input_scale, grouped=self._inputs == "block")
        if self._inputs == "block":  # scales of groups are a part of the inputs
            spread_TI = scale_TG.repeat_interleave(GROUP, 1)[:, : values_TI.shape[1]]
            y_TO = self._gemm(values_TI.float() * spread_TI)
        else:
            y_TO = self._gemm(values_TI.float()) * scale_TG
        if self._scale_O is not None:
            y_TO = y_TO * self._scale_O
        if self._bias is not None:
            y_TO = y_TO + self._bias.float()
        return y_TO.to(x_TI.dtype)


class JoinedLinear(Linear):
    """Layers of the same input that cannot be one GEMM: their outputs, concatenated."""

    def __init__(self, parts: list[Linear]) -> None:
        self._parts = parts

    def __call__(self, x_TI: Tensor) -> Tensor:
        return torch.cat([part(x_TI) for part in self._parts], dim=1)


class Fp8GatedLinear(GatedLinear):
    """activation(gate) * up of two layers."""

    def __init__(self, gate: Linear, up: Linear, activation: Activation) -> None:
        self._gate, self._up, self._activation = gate, up, activation

    def __call__(self, x_TI: Tensor) -> Tensor:
        gate_TO, up_TO = self._gate(x_TI), self._up(x_TI)
        if self._activation == "clamped_swiglu":
            return gated(gate_TO, up_TO, self._activation)
        return _activated(gate_TO, self._activation) * up_TO


class Fp8ActivatedLinear(GatedLinear):
    """activation(up) of a feed-forward without a gate."""

    def __init__(self, up: Linear, activation: Activation) -> None:
        self._up, self._activation = up, activation

    def __call__(self, x_TI: Tensor) -> Tensor:
        return _activated(self._up(x_TI), self._activation)


def _activated(x_TI: Tensor, activation: Activation) -> Tensor:
    """Compute an activation such that an element's bits do not depend on where it lies in x."""
    flat = x_TI.reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % _VECTORS))
    return torch.cat([activated(part, activation) for part in padded.split(_SHARE)])[: len(flat)].view(x_TI.shape)
