"""Linear layers: what a decoder asks of one, and the implementation that keeps its weight as it is.

The implementation is chosen where weights are loaded (`weight_loader.py`): packed weights for float32 on CPU
(`packed.py`), dense ones elsewhere. A layer may compute what precedes or follows its GEMM in the same kernel: the norm
of its input, and the sum with a residual. By default both are steps of their own. So an implementation whose result is
a part of a sum (a weight that is split over several devices) completes it in `__call__`, before the residual is added.

Shape suffixes: T packed tokens, I input features, O output features.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from copy import copy
from types import ModuleType
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from specbatch.kernels import ops_for
from specbatch.kernels.activations import Activation
from specbatch.models.layers import LayerNorm, RMSNorm


class Residual(NamedTuple):
    """The residual stream x. `normed_TE`: norm(x) for the layer that reads x next, if it was computed with the sum."""

    x_TE: Tensor
    normed_TE: Tensor | None = None

    def normed(self, norm: RMSNorm | LayerNorm) -> Tensor:
        """norm(x), of that layer's norm."""
        return norm(self.x_TE) if self.normed_TE is None else self.normed_TE


class Layer(Protocol):
    """A function of (T, I) that returns (T, O). `takes_normed`: norm(x) is given to it where a sum has computed it.
    False: it computes the norm itself, while it quantises x."""

    takes_normed: bool = True

    @abstractmethod
    def __call__(self, x_TI: Tensor) -> Tensor: ...

    def with_norm(self, x_TI: Tensor, norm: RMSNorm) -> Tensor:
        """The layer of norm(x)."""
        return self(norm(x_TI))

    def after_norm(self, x: Residual, norm: RMSNorm) -> Tensor:
        """The layer of norm(x)."""
        return self.with_norm(x.x_TE, norm) if x.normed_TE is None else self(x.normed_TE)

    def traceable(self) -> Layer | None:
        """Return the same layer in plain torch operations, which a compiler can fuse; None: there is none."""
        return None


class Linear(Layer, Protocol):
    """x W^T + b."""

    def with_residual(self, x_TI: Tensor, residual_TO: Tensor) -> Tensor:
        """residual + x W^T + b. The sum may be written over the residual."""
        return residual_TO + self(x_TI)

    def start_with_residual(
        self, x_TI: Tensor, residual_TO: Tensor, next_norm: RMSNorm | None = None
    ) -> Callable[[], Residual]:
        """Launch `with_residual`. Other layers can run before its result is asked for. `next_norm`: the norm of the
        layer that reads the sum. A sum over ranks may compute it, too."""
        y_TO = self.with_residual(x_TI, residual_TO)
        return lambda: Residual(y_TO)


class GatedLinear(Layer, Protocol):
    """act(x G^T) * (x U^T): the first half of a gated feed-forward (Shazeer 2020)."""

    def start_into(
        self, down: Linear, x: Residual, norm: RMSNorm, next_norm: RMSNorm | None = None
    ) -> Callable[[], Residual]:
        """Launches the whole feed-forward: x + down(this layer of norm(x)). The sum may be written over x. The rest as
        of `Linear.start_with_residual`."""
        return down.start_with_residual(self.after_norm(x, norm), x.x_TE, next_norm)

    def into(self, down: Linear, x_TI: Tensor) -> Tensor:
        """Return down(this layer of x): the whole feed-forward without norm and residual."""
        return down(self(x_TI))

    def start_added(self, down: Linear, x_TI: Tensor, residual_TE: Tensor) -> Callable[[], Residual]:
        """Launch residual + down(this layer of x). The sum may be written over the residual."""
        return down.start_with_residual(self(x_TI), residual_TE)


class DenseLinear(Linear):
    """A linear layer without quantization. `ops`: the result of `kernels.ops_for`. They fuse the norm and the residual
    if that is faster."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, ops: ModuleType) -> None:
        self._weight, self._bias, self._ops = weight_OI, bias_O, ops

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO: Tensor = self._ops.linear(x_TI, self._weight, self._bias)
        return y_TO

    def with_norm(self, x_TI: Tensor, norm: RMSNorm) -> Tensor:
        y_TO: Tensor = self._ops.norm_linear(x_TI, norm.weight, norm.eps, self._weight, self._bias)
        return y_TO

    def with_residual(self, x_TI: Tensor, residual_TO: Tensor) -> Tensor:
        y_TO: Tensor = self._ops.linear(x_TI, self._weight, self._bias, residual_TO)
        return y_TO

    def traceable(self) -> DenseLinear:
        return over_reference_kernels(self)


class AlignedLinear(Linear):
    """A linear layer whose GEMM has further outputs, so that their number is a multiple of `ALIGNMENT`. Otherwise the
    library reads 2 bytes at a time: the LM head of Granite 3 (49,155 tokens) took 487 us for 16 tokens on an H200, and
    a copy of its weight takes 100 us."""

    ALIGNMENT = 8  # numbers of 2 bytes, which are 16 bytes

    def __init__(self, layer: Linear, num_outputs: int) -> None:
        """`layer`: the one with further outputs, which come after its `num_outputs`."""
        self._layer, self._num_outputs = layer, num_outputs

    @classmethod
    def is_needed(cls, weight_OI: Tensor) -> bool:
        return weight_OI.is_cuda and weight_OI.itemsize == 2 and weight_OI.shape[0] % cls.ALIGNMENT > 0

    @classmethod
    def padded(cls, tensor: Tensor) -> Tensor:
        """Return a weight, or a bias, with zeros for further outputs."""
        rows = -len(tensor) % cls.ALIGNMENT
        return torch.cat((tensor, tensor.new_zeros(rows, *tensor.shape[1:])))

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return (T, O), whose rows are not contiguous to each other."""
        return self._layer(x_TI)[:, : self._num_outputs]


class DenseGatedLinear(GatedLinear):
    """The gated pair of linear layers of an MLP. `ops`: see `DenseLinear`. They fuse the activation and, without a
    bias, the GEMM and the norm with it."""

    def __init__(
        self,
        gate_OI: Tensor,
        up_OI: Tensor,
        biases_O: tuple[Tensor, Tensor] | None,
        ops: ModuleType,
        activation: Activation = "silu",
    ) -> None:
        self._weight = torch.cat((gate_OI, up_OI))
        self._bias = None if biases_O is None else torch.cat(biases_O)
        self._ops, self._activation = ops, activation

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO: Tensor
        if self._bias is None:
            y_TO = self._ops.gated_linear(x_TI, self._weight, self._activation)
        else:
            y_TO = self._ops.act_mul(self._ops.linear(x_TI, self._weight, self._bias), self._activation)
        return y_TO

    def with_norm(self, x_TI: Tensor, norm: RMSNorm) -> Tensor:
        if self._bias is not None:
            return self(norm(x_TI))
        y_TO: Tensor = self._ops.norm_gated_linear(x_TI, norm.weight, norm.eps, self._weight, self._activation)
        return y_TO

    def traceable(self) -> DenseGatedLinear:
        return over_reference_kernels(self)


class ActivatedLinear(GatedLinear):
    """act(x U^T + b): the first half of a feed-forward without a gate."""

    def __init__(self, up: Linear, ops: ModuleType, activation: Activation) -> None:
        self._up, self._ops, self._activation = up, ops, activation
        self.takes_normed = up.takes_normed

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO: Tensor = self._ops.activated(self._up(x_TI), self._activation)
        return y_TO

    def with_norm(self, x_TI: Tensor, norm: RMSNorm) -> Tensor:
        y_TO: Tensor = self._ops.activated(self._up.with_norm(x_TI, norm), self._activation)
        return y_TO


Dense = TypeVar("Dense", DenseLinear, DenseGatedLinear)


def over_reference_kernels(layer: Dense) -> Dense:
    """The same layer, with the same weights."""
    other = copy(layer)
    other._ops = ops_for(torch.device("cpu"), torch.float64)
    return other


Parts = TypeVar("Parts")


def traceable_parts(module: Parts, *names: str) -> Parts | None:
    """Return a module in which these parts are traceable; None: one of them cannot be."""
    other = copy(module)
    for name in names:
        part = getattr(module, name).traceable()
        if part is None:
            return None
        setattr(other, name, part)
    return other
