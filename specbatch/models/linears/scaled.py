"""Linear layers in FP8 on CUDA. Inputs are quantised inside the norm or the activation that precedes a layer.

Shape suffixes: T packed tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from specbatch.kernels.activations import Activation
from specbatch.kernels.quantised import Quantised
from specbatch.kernels.torch.fp8 import quantise_part
from specbatch.models.layers import RMSNorm
from specbatch.models.linears.fp8 import Fp8Weight
from specbatch.models.linears.linear import GatedLinear, Linear, Residual
from specbatch.parallel.group import Group


class ScaledLinear(Linear):
    """A linear layer with weights in FP8. `ops`: the result of `kernels.ops_for`. `dtype`: the data type of the
    results. `invariant`: a token's bits do not depend on how many tokens are computed with it. `input_ranks`: the ranks
    that have the other features of the inputs."""

    def __init__(
        self,
        weight: Fp8Weight,
        bias_O: Tensor | None,
        ops: ModuleType,
        dtype: torch.dtype,
        *,
        invariant: bool = False,
        input_ranks: Group | None = None,
    ) -> None:
        assert weight.inputs != "none", "a layer whose inputs are not quantised is an ordinary one"
        self._weight, self._bias, self._ops, self._dtype = weight, bias_O, ops, dtype
        self._invariant = invariant
        self._input_ranks = input_ranks if weight.inputs == "token" else None
        self._scheme = weight.input_scale, weight.inputs == "block"
        self.takes_normed = False  # its norm quantises

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._multiply(self._quantised(x_TI))

    def with_norm(self, x_TI: Tensor, norm: RMSNorm) -> Tensor:
        return self._multiply(self._ops.rms_norm_quantised(x_TI, norm.weight, norm.eps, *self._scheme))

    def with_residual(self, x_TI: Tensor, residual_TO: Tensor) -> Tensor:
        return self._multiply(self._quantised(x_TI), residual_TO)

    def of_gate_and_up(self, gate_up_T2I: Tensor, activation: Activation, residual_TO: Tensor | None = None) -> Tensor:
        """Return residual + the layer of activation(gate) * up."""
        return self._multiply(self._ops.act_mul_quantised(gate_up_T2I, *self._scheme, activation), residual_TO)

    def _quantised(self, x_TI: Tensor) -> Quantised:
        if self._input_ranks is not None:
            return quantise_part(x_TI, self._input_ranks.largest)
        x: Quantised = self._ops.quantise(x_TI, *self._scheme)
        return x

    def _multiply(self, x: Quantised, residual_TO: Tensor | None = None) -> Tensor:
        w = self._weight
        y_TO: Tensor = self._ops.scaled_linear(
            x, w.values_OI, w.scale, self._dtype, self._bias, residual_TO, self._invariant
        )
        return y_TO


class ScaledGatedLinear(GatedLinear):
    """`both`: gate and up as one layer of which at least a part is in FP8."""

    def __init__(self, both: Linear, ops: ModuleType, activation: Activation = "silu") -> None:
        self._both, self._ops, self._activation = both, ops, activation
        self.takes_normed = both.takes_normed

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO: Tensor = self._ops.act_mul(self._both(x_TI), self._activation)
        return y_TO

    def with_norm(self, x_TI: Tensor, norm: RMSNorm) -> Tensor:
        y_TO: Tensor = self._ops.act_mul(self._both.with_norm(x_TI, norm), self._activation)
        return y_TO

    def start_into(
        self, down: Linear, x: Residual, norm: RMSNorm, next_norm: RMSNorm | None = None
    ) -> Callable[[], Residual]:
        if isinstance(down, ScaledLinear):
            y_TO = down.of_gate_and_up(self._both.after_norm(x, norm), self._activation, x.x_TE)
            return lambda: Residual(y_TO)
        return super().start_into(down, x, norm, next_norm)

    def into(self, down: Linear, x_TI: Tensor) -> Tensor:
        if isinstance(down, ScaledLinear):
            return down.of_gate_and_up(self._both(x_TI), self._activation)
        return super().into(down, x_TI)
