"""From a checkpoint's tensors to the layers of a model. Here is decided which implementation a linear layer has.

Shape suffixes: I input features, O output features.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specbatch.kernels import ops_for
from specbatch.models.config import Activation
from specbatch.models.invariant import InvariantGatedLinear, InvariantGemm, InvariantLinear
from specbatch.models.layers import RMSNorm
from specbatch.models.linear import DenseGatedLinear, DenseLinear, GatedLinear, Linear
from specbatch.models.packed import PackedGatedLinear, PackedLinear, is_packable
from specbatch.models.sharded import Embedding, GatheredLinear, ModelShard, SummedLinear, part_of


class TensorReader(Protocol):
    def load(self, name: str) -> Tensor:
        """A checkpoint's tensor by its canonical (Hugging Face) name, as it is stored."""
        ...


class WeightLoader:
    """Makes the layers of a model that computes in `dtype` on `device`. Layers are named as in the checkpoint, without
    the ending `.weight` or `.bias`. `gemm`: for layers whose rows do not depend on their number, on CUDA. `shard`: the
    part of the model that this process holds; None: all of it."""

    def __init__(
        self,
        tensors: TensorReader,
        dtype: torch.dtype,
        device: torch.device,
        gemm: InvariantGemm | None = None,
        shard: ModelShard | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._tensors = tensors
        self._ops = ops_for(device, dtype)
        self._gemm = gemm
        self._shard = shard

    def stored(self, name: str) -> Tensor:
        """A tensor as the checkpoint holds it."""
        return self._tensors.load(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor in the dtype and on the device of the model, or this process's part of it."""
        stored = self.stored(name)
        own = stored if self._shard is None else part_of(name, stored, self._shard)
        return own.to(device=self.device, dtype=self.dtype)

    def embedding(self, weight_VE: Tensor) -> Embedding:
        return Embedding(weight_VE, self._shard)

    def norm(self, name: str, eps: float) -> RMSNorm:
        return RMSNorm(self.tensor(f"{name}.weight"), eps)

    def linear(self, *names: str, has_bias: bool = False) -> Linear:
        """One layer; several names: layers of the same input, their outputs concatenated."""
        weights = [self.tensor(f"{name}.weight") for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names] if has_bias else []
        return self.new_linear(_joined(weights), _joined(biases) if has_bias else None)

    def summed_linear(self, name: str, has_bias: bool = False) -> Linear:
        """A layer that reads the heads, or the inner features of an MLP, which may be divided among ranks."""
        linear = self.linear(name, has_bias=has_bias)
        return linear if self._shard is None else SummedLinear(linear, self._shard.group)

    def lm_head(self, weight_VE: Tensor, vocab_size: int) -> Linear:
        """`weight_VE`: as `tensor` returns it."""
        linear = self.new_linear(weight_VE)
        if self._shard is None:
            return linear
        return GatheredLinear(linear, self._shard.group, self._shard.vocab_width, vocab_size)

    def gated_linear(self, gate: str, up: str, activation: Activation, has_bias: bool = False) -> GatedLinear:
        biases = (self.tensor(f"{gate}.bias"), self.tensor(f"{up}.bias")) if has_bias else None
        return self.new_gated_linear(self.tensor(f"{gate}.weight"), self.tensor(f"{up}.weight"), biases, activation)

    def new_linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        if is_packable(weight_OI):
            return PackedLinear(weight_OI, bias_O)
        if self._gemm is not None:
            return InvariantLinear(weight_OI, bias_O, self._gemm)
        return DenseLinear(weight_OI, bias_O, self._ops)

    def new_gated_linear(
        self, gate_OI: Tensor, up_OI: Tensor, biases_O: tuple[Tensor, Tensor] | None, activation: Activation
    ) -> GatedLinear:
        if is_packable(gate_OI):
            return PackedGatedLinear(gate_OI, up_OI, biases_O, activation)
        assert activation == "silu", activation  # the one that the kernels fuse
        if self._gemm is not None:
            return InvariantGatedLinear(gate_OI, up_OI, biases_O, self._gemm)
        return DenseGatedLinear(gate_OI, up_OI, biases_O, self._ops)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
