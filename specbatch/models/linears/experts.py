"""The experts of a layer: stacked weights, whose kernels compute all experts at once, or layers of their own on a CPU.

Shape suffixes: T packed tokens, E hidden size, X experts, K experts of a token, I input features, O output features, B
bytes of a row in MXFP4, G groups of a row that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from specbatch.kernels.experts import ExpertWeights
from specbatch.kernels.torch.mixture import combine
from specbatch.models.linears.linear import GatedLinear, Linear


class Experts(Protocol):
    """Gated feed-forwards of one size, and the sum of those that each token chose."""

    def __call__(
        self, x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, residual_TE: Tensor | None = None
    ) -> Tensor:
        """Return residual + the sum of each token's experts times their weights, (T, E), as `fused_experts` of
        `kernels/torch/mixture.py` defines it."""
        ...


class StackedExperts(Experts):
    """Experts in one tensor each of gate and up, and of down. `ops`: the result of `kernels.ops_for`."""

    def __init__(self, weights: ExpertWeights, ops: ModuleType) -> None:
        self.weights, self._ops = weights, ops

    def __call__(
        self, x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, residual_TE: Tensor | None = None
    ) -> Tensor:
        y_TE: Tensor = self._ops.fused_experts(x_TE, weights_TK, experts_TK, self.weights, residual_TE)
        return y_TE


def stack_experts(
    names: Sequence[tuple[str, str, str]],
    load: Callable[[str], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Load the weights or the biases of the experts of a layer, each straight to its place, so that only one of them is
    held twice. Return those of gate and up, and of down, see `ExpertWeights`. `names`: those of each expert's gate, up
    and down. `load`: returns a weight (O, I), or a bias (O,), by name, in any dtype on any device."""
    (inner, *inputs), of_down = (load(name).shape for name in (names[0][0], names[0][2]))
    gate_up = torch.empty(len(names), 2 * inner, *inputs, dtype=dtype, device=device)
    all_down = torch.empty(len(names), *of_down, dtype=dtype, device=device)
    for number, (gate, up, down) in enumerate(names):
        gate_up[number, :inner].copy_(load(gate))
        gate_up[number, inner:].copy_(load(up))
        all_down[number].copy_(load(down))
    return gate_up, all_down


def stack_quantised(
    names: Sequence[Sequence[str]], load: Callable[[str], tuple[Tensor, Tensor]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Load one quantised weight of each expert, each part straight to its place, and return their values and scales,
    see `ExpertWeights`. `names`: those of each expert's parts, which have equal shapes and whose outputs follow each
    other, such as gate and up. `load`: returns the values (O, ...) and scales (O, G) of a part by name."""
    stacked: list[Tensor] = []
    for number, parts in enumerate(names):
        for part, name in enumerate(parts):
            loaded = load(name)
            stacked = stacked or [
                torch.empty(len(names), len(parts), *one.shape, dtype=one.dtype, device=device) for one in loaded
            ]
            for whole, one in zip(stacked, loaded, strict=True):
                whole[number, part].copy_(one)
    values, scales = (whole.flatten(1, 2) for whole in stacked)
    return values, scales


class SeparateExperts(Experts):
    """Experts with two layers each. Layers on a CPU give a token the same bits whatever tokens are computed with it.
    `first`: the number of the first one; choices of experts that are not here add nothing."""

    def __init__(self, layers: Sequence[tuple[GatedLinear, Linear]], first: int = 0) -> None:
        self._layers, self._first = layers, first

    def __call__(
        self, x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, residual_TE: Tensor | None = None
    ) -> Tensor:
        top_k, chosen_N = experts_TK.shape[1], experts_TK.flatten() - self._first
        y_NE = x_TE.new_zeros(chosen_N.numel(), x_TE.shape[1])
        for number in chosen_N.unique().tolist():
            if not 0 <= number < len(self._layers):
                continue
            index = (chosen_N == number).nonzero()[:, 0]
            gated, down = self._layers[number]
            y_NE[index] = gated.into(down, x_TE[index // top_k])
        return combine(y_NE, weights_TK, residual_TE)
