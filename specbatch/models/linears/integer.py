"""Weights in whole numbers of 4 or 8 bits, and the linear layer that keeps them so (CUDA).

Shape suffixes: T packed tokens, I input features, O output features, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.kernels.activations import Activation
from specbatch.kernels.integers import IntegerWeight
from specbatch.kernels.torch.integers import pack_integers
from specbatch.models.layers import RMSNorm
from specbatch.models.linears.linear import GatedLinear, Linear


@dataclass(frozen=True)
class IntegerNumbers:
    """A weight as it is loaded, one byte a number: element (o, i) is (number - zero) * scale of the group of input i.
    `zeros_OG` None: all are half of the range. `groups_I`: the group of each input; None: they are in order."""

    numbers_OI: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None
    bits: int
    group: int
    groups_I: Tensor | None = None

    def checked(self, layer: str) -> IntegerNumbers:
        """Return the weight, without the groups and zero points that are as without them. Raise ModelError for scales
        that are not finite, and for groups that do not exist. `layer`: its name."""
        if not all(bool(one.isfinite().all()) for one in (self.scales_OG, self.zeros_OG) if one is not None):
            raise ModelError(f"{layer} has scales that are no numbers", hint="download the file again")
        zeros, groups = self.zeros_OG, self.groups_I
        if zeros is not None and bool((zeros == 1 << (self.bits - 1)).all()):
            zeros = None
        if groups is not None:
            groups = groups.long()
            if not bool(((groups >= 0) & (groups < self.scales_OG.shape[1])).all()):
                raise ModelError(f"{layer} has inputs in groups without a scale", hint="download the file again")
            if torch.equal(groups, torch.arange(len(groups), device=groups.device) // self.group):
                groups = None
        return replace(self, zeros_OG=zeros, groups_I=groups)

    def dequantised(self) -> Tensor:
        """(O, I) float32."""
        zeros = 1 << (self.bits - 1) if self.zeros_OG is None else self._spread(self.zeros_OG.float())
        weight_OI = (self.numbers_OI.float() - zeros) * self._spread(self.scales_OG.float())
        return weight_OI.contiguous()  # AWQ stores the numbers of an input together

    def _spread(self, of_groups_OG: Tensor) -> Tensor:
        if self.groups_I is not None:
            return of_groups_OG[:, self.groups_I]
        return of_groups_OG.repeat_interleave(self.group, 1)[:, : self.numbers_OI.shape[1]]

    def order(self, layer: str) -> Tensor | None:
        """Return the inputs (I,) such that groups are in order; None: they are so. Raise ModelError for groups of
        unequal sizes."""
        if self.groups_I is None:
            return None
        sizes = torch.bincount(self.groups_I, minlength=self.scales_OG.shape[1])
        if not bool((sizes == self.group).all()):
            raise ModelError(f"{layer} has groups of unequal sizes", hint="set model.quantization: none")
        return torch.argsort(self.groups_I, stable=True)

    def packed(self, order_I: Tensor | None) -> IntegerWeight:
        """Return the weight as kernels read it. `order_I`: see `order`."""
        numbers_OI = self.numbers_OI if order_I is None else self.numbers_OI[:, order_I]
        zeros = None if self.zeros_OG is None else self.zeros_OG.T.contiguous()
        words, scales = pack_integers(numbers_OI, self.bits), self.scales_OG.T.contiguous()
        return IntegerWeight(words, scales, zeros, self.bits, numbers_OI.shape[1], self.group)


def quantise_integers(weight_OI: Tensor, bits: int, group: int) -> IntegerNumbers:
    """Round a weight to the nearest whole numbers. Each group has a scale in the weight's dtype, such that its largest
    element becomes 7 or 127."""
    most, num_in = (1 << (bits - 1)) - 1, weight_OI.shape[1]
    parts = F.pad(weight_OI.float(), (0, -num_in % group)).unflatten(1, (-1, group))
    scales_OG = (parts.abs().amax(2) / most).to(weight_OI.dtype)
    scales_OG = torch.where(scales_OG > 0, scales_OG, 1.0)
    numbers = (parts / scales_OG.float()[..., None]).round().clamp(-most - 1, most) + most + 1
    return IntegerNumbers(numbers.to(torch.uint8).flatten(1)[:, :num_in], scales_OG, None, bits, group)


def joined_integers(weights: Sequence[IntegerNumbers], orders: Sequence[Tensor | None]) -> IntegerWeight | None:
    """Return layers of the same input as one; None if they read the inputs in different orders or scale them in
    different ways."""
    first, order = weights[0], orders[0]
    for one, other in zip(weights, orders, strict=True):
        if (one.bits, one.group, one.scales_OG.dtype) != (first.bits, first.group, first.scales_OG.dtype):
            return None
        if _type_of(one.zeros_OG) != _type_of(first.zeros_OG) or (other is None) != (order is None):
            return None
        if other is not None and order is not None and not torch.equal(other, order):
            return None
    packed = [one.packed(order) for one in weights]
    if len(packed) == 1:
        return packed[0]
    zeros = [one.zeros_GO for one in packed if one.zeros_GO is not None]
    return packed[0]._replace(
        words_OW=torch.cat([one.words_OW for one in packed]),
        scales_GO=torch.cat([one.scales_GO for one in packed], dim=1),
        zeros_GO=torch.cat(zeros, dim=1) if zeros else None,
    )


def _type_of(zeros_OG: Tensor | None) -> torch.dtype | None:
    return None if zeros_OG is None else zeros_OG.dtype


class IntegerLinear(Linear):
    """A linear layer with weights in whole numbers. `order_I`: the order in which the weight has its inputs; None:
    their own. `ops`: the result of `kernels.ops_for`."""

    def __init__(self, weight: IntegerWeight, order_I: Tensor | None, bias_O: Tensor | None, ops: ModuleType) -> None:
        self._weight, self._order, self._bias, self._ops = weight, order_I, bias_O, ops

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._multiply(x_TI, None)

    def with_norm(self, x_TI: Tensor, norm: RMSNorm) -> Tensor:
        if self._order is not None:
            return self(norm(x_TI))
        y_TO: Tensor = self._ops.integer_linear(x_TI, self._weight, self._bias, None, (norm.weight, norm.eps))
        return y_TO

    def with_residual(self, x_TI: Tensor, residual_TO: Tensor) -> Tensor:
        return self._multiply(x_TI, residual_TO)

    def gated(self, activation: Activation) -> IntegerGatedLinear:
        """Return the gated layer of gate and up, which are this layer."""
        assert self._bias is None, "kernels have no gated pair with a bias"
        return IntegerGatedLinear(self._weight, self._order, self._ops, activation)

    def _multiply(self, x_TI: Tensor, residual_TO: Tensor | None) -> Tensor:
        if self._order is not None:
            x_TI = x_TI.index_select(1, self._order)
        y_TO: Tensor = self._ops.integer_linear(x_TI, self._weight, self._bias, residual_TO)
        return y_TO


class IntegerGatedLinear(GatedLinear):
    """The gated pair of linear layers of an MLP, without biases. `weight`, `order_I`: those of gate and up as one
    layer, see `IntegerLinear`."""

    def __init__(self, weight: IntegerWeight, order_I: Tensor | None, ops: ModuleType, activation: Activation) -> None:
        self._weight, self._order, self._ops, self._activation = weight, order_I, ops, activation

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self._order is not None:
            x_TI = x_TI.index_select(1, self._order)
        y_TO: Tensor = self._ops.integer_gated_linear(x_TI, self._weight, self._activation)
        return y_TO

    def with_norm(self, x_TI: Tensor, norm: RMSNorm) -> Tensor:
        if self._order is not None:
            return self(norm(x_TI))
        y_TO: Tensor = self._ops.integer_gated_linear(x_TI, self._weight, self._activation, (norm.weight, norm.eps))
        return y_TO
