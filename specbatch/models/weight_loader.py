"""The loader that makes a model's layers from a checkpoint's tensors. It decides which implementation a linear layer
has.

Shape suffixes: I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.kernels import ops_for
from specbatch.kernels.activations import Activation
from specbatch.kernels.experts import ExpertWeights
from specbatch.kernels.integers import IntegerWeight
from specbatch.models.formats.gguf import GgufSource
from specbatch.models.formats.gguf_integers import GgufIntegers
from specbatch.models.formats.integer_tensors import read_integers
from specbatch.models.formats.tensor_files import PackedReader
from specbatch.models.layers import LayerNorm, RMSNorm
from specbatch.models.linears.experts import (
    Experts,
    SeparateExperts,
    StackedExperts,
    stack_experts,
    stack_quantised,
)
from specbatch.models.linears.fp8 import (
    Fp8ActivatedLinear,
    Fp8GatedLinear,
    Fp8Linear,
    Fp8Weight,
    JoinedLinear,
    expand_scale,
    joined_weights,
    quantise_weight,
)
from specbatch.models.linears.integer import IntegerLinear, IntegerNumbers, joined_integers, quantise_integers
from specbatch.models.linears.integer_quantization import IntegerForm, IntegerQuantization, UniformIntegers
from specbatch.models.linears.invariant import InvariantGatedLinear, InvariantGemm, InvariantLinear
from specbatch.models.linears.layer_quantization import LayerQuantization
from specbatch.models.linears.linear import (
    ActivatedLinear,
    AlignedLinear,
    DenseGatedLinear,
    DenseLinear,
    GatedLinear,
    Linear,
)
from specbatch.models.linears.packed import PackedActivatedLinear, PackedGatedLinear, PackedLinear, is_packable
from specbatch.models.linears.quantization import ON_LOAD, Quantization
from specbatch.models.linears.scaled import ScaledGatedLinear, ScaledLinear
from specbatch.models.linears.sharded import Embedding, GatheredLinear, ModelShard, SummedLinear, part_of, scale_part_of
from specbatch.parallel.group import Group


class TensorReader(Protocol):
    def load(self, name: str) -> Tensor:
        """A checkpoint's tensor by its canonical (Hugging Face) name, as it is stored."""
        ...


class WeightLoader:
    """The loader of a model that computes in `dtype` on `device`. Layers are named as in the checkpoint, without the
    ending `.weight` or `.bias`. `gemm`: the GEMM of layers whose rows do not depend on their number, on CUDA. `shard`:
    the part of the model that this process holds; None: all of it. `quantization`: the quantization of its linear
    layers; None: they have none. `mxfp4`: the reader of experts that stay in MXFP4; None: they do not."""

    def __init__(
        self,
        tensors: TensorReader,
        dtype: torch.dtype,
        device: torch.device,
        gemm: InvariantGemm | None = None,
        shard: ModelShard | None = None,
        quantization: LayerQuantization | None = None,
        *,
        mxfp4: PackedReader | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self._tensors = tensors
        self._ops = ops_for(device, dtype)
        self._gemm = gemm
        self._shard = shard
        self._quantization = quantization
        self._mxfp4 = mxfp4

    @property
    def ops(self) -> ModuleType:
        """The kernels of the model."""
        return self._ops

    def stored(self, name: str) -> Tensor:
        """A tensor as the checkpoint holds it."""
        return self._tensors.load(name)

    def tensor(self, name: str) -> Tensor:
        """A tensor in the dtype and on the device of the model, or this process's part of it. A quantised weight is
        dequantised."""
        own, is_part = self._own(name)
        if is_part and own.is_cuda:  # the whole tensor was there, too
            _give_back_memory()
        return own.to(device=self.device, dtype=self.dtype)

    def _own(self, name: str) -> tuple[Tensor, bool]:
        """Load a tensor, or this process's part of it, in the dtype and on the device that it is read to, and return
        whether it is a part. A quantised weight is dequantised."""
        layer, _, kind = name.rpartition(".")
        stored = self._dequantised(layer) if kind == "weight" and self._covers(layer) else self.stored(name)
        own = stored if self._shard is None else part_of(name, stored, self._shard)
        return own, own is not stored

    def _dequantised(self, layer: str) -> Tensor:
        is_integer = isinstance(self._quantization, IntegerQuantization)
        return (self._integer_numbers(layer) if is_integer else self._fp8_weight(layer)).dequantised()

    def embedding(self, weight_VE: Tensor) -> Embedding:
        return Embedding(weight_VE, self._shard)

    def norm(self, name: str, eps: float, offset: float = 0.0, *, is_wide: bool = False) -> RMSNorm:
        """Make a norm that multiplies by offset + weight. With an offset, and if it `is_wide`, this factor is kept in
        float32 at least."""
        if not offset and not is_wide:
            return RMSNorm(self.tensor(f"{name}.weight"), eps)
        return RMSNorm(self.wide(f"{name}.weight") + offset, eps, self._ops)

    def layer_norm(self, name: str, eps: float, offset: float = 0.0, *, has_bias: bool = True) -> LayerNorm:
        """Make a LayerNorm that multiplies by offset + weight."""
        weight = self.wide(f"{name}.weight") + offset if offset else self.tensor(f"{name}.weight")
        return LayerNorm(weight, self.tensor(f"{name}.bias") if has_bias else None, eps, self._ops)

    def linear(self, *names: str, has_bias: bool = False) -> Linear:
        """One layer; several names: layers of the same input, their outputs concatenated."""
        if self.is_quantised(*names):
            return self._quantised(names, has_bias)
        weights = [self.tensor(f"{name}.weight") for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names] if has_bias else []
        return self.new_linear(_joined(weights), _joined(biases) if has_bias else None)

    def wide(self, name: str) -> Tensor:
        """A tensor in float32 at least, on the device of the model."""
        return self.stored(name).to(device=self.device, dtype=torch.promote_types(self.dtype, torch.float32))

    def wide_linear(self, name: str, has_bias: bool = False) -> Linear:
        """A layer that computes in float32 at least, whatever the model computes in."""
        if self._gemm is not None:
            raise ModelError(
                f"{name} computes in float32, and no deterministic GEMM does", hint="set engine.deterministic: false"
            )
        return self._wide_linear(self.wide(f"{name}.weight"), self.wide(f"{name}.bias") if has_bias else None)

    def summed_linear(self, name: str, has_bias: bool = False) -> Linear:
        """A layer that reads the heads, or the inner features of an MLP, which may be divided among ranks."""
        if self._shard is None or self._shard.division == "requests":
            return self.linear(name, has_bias=has_bias)
        group, is_quantised = self._shard.group, self.is_quantised(name)
        part = self._quantised((name,), has_bias, group) if is_quantised else self.linear(name, has_bias=has_bias)
        return SummedLinear(part, group)

    @property
    def group(self) -> Group | None:
        """The ranks that divide the model; None: this process holds all of it."""
        return None if self._shard is None else self._shard.group

    @property
    def divides_requests(self) -> bool:
        """Return whether each rank has requests of its own, whose tokens travel to the ranks of their experts."""
        return self._shard is not None and self._shard.division == "requests"

    def fc(self, has_bias: bool = False) -> Linear:
        """The layer of that name of a draft head. Ranks multiply a part of its inputs each."""
        linear = self.linear("fc", has_bias=has_bias)
        return linear if self._shard is None else SummedLinear(linear, self._shard.group, has_whole_input=True)

    def lm_head(self, embedding_VE: Tensor | None, vocab_size: int, *, has_bias: bool = False) -> Linear:
        """Make the LM head. `embedding_VE`: the matrix of a model that has one for both embedding and LM head; None:
        the LM head is a tensor of its own."""
        vocab = None if self._shard is None else self._shard.vocab
        if embedding_VE is None and self.is_quantised("lm_head"):
            linear = self.linear("lm_head", has_bias=has_bias)
        else:
            weight = self.tensor("lm_head.weight") if embedding_VE is None else embedding_VE
            bias = self.tensor("lm_head.bias") if has_bias else None
            # Ranks gather logits, which are contiguous therefore.
            linear = self.new_linear(weight, bias) if vocab else self._aligned(weight, bias)
        if self._shard is None or vocab is None:
            return linear
        return GatheredLinear(linear, self._shard.group, vocab, vocab_size)

    def gated_linear(self, gate: str, up: str, activation: Activation, has_bias: bool = False) -> GatedLinear:
        if self.is_quantised(gate, up):
            if self.device.type == "cuda" or isinstance(self._quantization, IntegerQuantization):
                both = self.linear(gate, up, has_bias=has_bias)
                if isinstance(both, IntegerLinear) and not has_bias:
                    return both.gated(activation)
                return ScaledGatedLinear(both, self._ops, activation)
            layers = self.linear(gate, has_bias=has_bias), self.linear(up, has_bias=has_bias)
            return Fp8GatedLinear(*layers, activation)
        biases = (self.tensor(f"{gate}.bias"), self.tensor(f"{up}.bias")) if has_bias else None
        return self.new_gated_linear(self.tensor(f"{gate}.weight"), self.tensor(f"{up}.weight"), biases, activation)

    def activated_linear(self, up: str, activation: Activation, has_bias: bool = False) -> GatedLinear:
        """Make the first half of a feed-forward without a gate."""
        is_fp8 = self.is_quantised(up) and not isinstance(self._quantization, IntegerQuantization)
        if is_fp8 and self.device.type != "cuda":
            return Fp8ActivatedLinear(self.linear(up, has_bias=has_bias), activation)
        if not self.is_quantised(up) and is_packable(weight := self.tensor(f"{up}.weight")):
            return PackedActivatedLinear(weight, self.tensor(f"{up}.bias") if has_bias else None, activation)
        return ActivatedLinear(self.linear(up, has_bias=has_bias), self._ops, activation)

    def experts(
        self, names: Sequence[tuple[str, str, str]], activation: Activation, *, has_bias: bool = False
    ) -> Experts:
        """Make a layer's experts. `names`: those of each one's gate, up and down. Experts in FP8 are dequantised on a
        CPU. Raise ModelError if only some are in FP8."""
        if self.device.type == "cuda" or self._mxfp4 is not None:
            return self.stacked_experts(names, activation, has_bias=has_bias)
        first, names = self._held(names)
        layers = []
        for gate, up, down in names:
            gate_up = self.tensor(f"{gate}.weight"), self.tensor(f"{up}.weight")
            biases = [self.tensor(f"{name}.bias") if has_bias else None for name in (gate, up, down)]
            both = None if biases[0] is None or biases[1] is None else (biases[0], biases[1])
            gated = self.new_gated_linear(*gate_up, both, activation)
            layers.append((gated, self.new_linear(self.tensor(f"{down}.weight"), biases[2])))
        return SeparateExperts(layers, first)

    def _held(self, names: Sequence[tuple[str, str, str]]) -> tuple[int, Sequence[tuple[str, str, str]]]:
        """Return the number of the first expert that this process has something of, and the names of all of these."""
        held = None if self._shard is None else self._shard.experts
        return (0, names) if held is None else (held.start, names[held.start : held.stop])

    def stacked_experts(
        self, names: Sequence[tuple[str, str, str]], activation: Activation, *, has_bias: bool = False
    ) -> StackedExperts:
        """Make a layer's experts as a GPU has them: each kind of weight in one tensor, in MXFP4 and FP8, too."""
        total = len(names)
        first, names = self._held(names)
        gate_up_bias, down_bias = self._stacked(names, "bias") if has_bias else (None, None)
        gate_up_scales = down_scales = None
        load = self._fp8_expert if self._mxfp4 is None else self._mxfp4.packed
        if self._mxfp4 is None and not self._are_in_fp8(names):
            gate_up_XFE, down_XEI = self._stacked(names, "weight")
        else:
            both = [[f"{gate}.weight", f"{up}.weight"] for gate, up, _ in names]
            gate_up_XFE, gate_up_scales = stack_quantised(both, load, self.device)
            down_XEI, down_scales = stack_quantised([[f"{name}.weight"] for *_, name in names], load, self.device)
        scales = gate_up_scales, down_scales
        of_all = None if len(names) == total else total
        weights = ExpertWeights(gate_up_XFE, down_XEI, activation, gate_up_bias, down_bias, *scales, first, of_all)
        return StackedExperts(weights, self._ops)

    def _are_in_fp8(self, names: Sequence[tuple[str, str, str]]) -> bool:
        """Return whether the weights of these experts stay in FP8. Raise ModelError if only some are in FP8."""
        layers = [name for expert in names for name in expert]
        covered = [layer for layer in layers if self.is_quantised(layer)]
        if covered and len(covered) < len(layers):
            left = next(layer for layer in layers if layer not in covered)
            raise ModelError(
                f"{covered[0]} is in FP8, and {left} of the same layer is not", hint="set model.quantization: none"
            )
        return bool(covered)

    def _fp8_expert(self, name: str) -> tuple[Tensor, Tensor]:
        """Load the values (O, I) and scales (O, G) of an expert's weight."""
        weight = self._fp8_weight(name.removesuffix(".weight"))
        if bool(weight.values_OI.float().isnan().any()):  # kernels read NaN as 480
            raise ModelError(f"{name} has values that are no numbers", hint="download the file again")
        return weight.values_OI, weight.scale

    def _stacked(self, names: Sequence[tuple[str, str, str]], kind: str) -> tuple[Tensor, Tensor]:
        """Load one tensor after the other to its place: those of gate and up, and of down. `kind`: weight or bias."""
        stacked = stack_experts(names, lambda name: self._own(f"{name}.{kind}")[0], self.dtype, self.device)
        if self._shard is not None and self.device.type == "cuda":
            _give_back_memory()
        return stacked

    def _covers(self, layer: str) -> bool:
        return self._quantization is not None and self._quantization.covers(layer)

    def is_quantised(self, *names: str) -> bool:
        """Return whether one of these layers computes with a quantised weight. If not, they are ordinary ones."""
        return self._quantization is not None and any(map(self._quantization.keeps, names))

    def _quantised(self, names: tuple[str, ...], has_bias: bool, input_ranks: Group | None = None) -> Linear:
        """Make one linear layer of several, some of which are quantised. `input_ranks`: the ranks that have the other
        features of the inputs."""
        if isinstance(self._quantization, IntegerQuantization):
            return self._integer(names, has_bias)
        biases = [self.tensor(f"{name}.bias") for name in names] if has_bias else []
        weights = [self._own_fp8_weight(name) for name in names if self._covers(name)]
        joined = joined_weights(weights) if len(weights) == len(names) else None
        if joined is None and len(names) > 1:
            return JoinedLinear([self.linear(name, has_bias=has_bias) for name in names])
        assert joined is not None
        bias = _joined(biases) if has_bias else None
        if self.device.type == "cuda":
            is_invariant = self._gemm is not None
            if self._gemm is not None:  # The ranks do not take part, because their parts may have other sizes to check.
                alone = ScaledLinear(joined, bias, self._ops, self.dtype, invariant=is_invariant)
                self._gemm.check_later(joined.values_OI, alone)
            return ScaledLinear(joined, bias, self._ops, self.dtype, invariant=is_invariant, input_ranks=input_ranks)
        return Fp8Linear(joined, bias, self._wide_linear, input_ranks)

    def _integer(self, names: tuple[str, ...], has_bias: bool) -> Linear:
        """Make one linear layer of several, some of which have weights in whole numbers. Neighbours of the same form
        are one GEMM."""
        parts = [tuple(part) for _, part in groupby(names, self._integer_form)]
        if len(parts) > 1:
            return JoinedLinear([self.linear(*part, has_bias=has_bias) for part in parts])
        weights = [self._own_integer_numbers(name) for name in names]
        orders = [weight.order(name) for weight, name in zip(weights, names, strict=True)]
        joined = joined_integers(weights, orders)
        if joined is None:
            return JoinedLinear([self.linear(name, has_bias=has_bias) for name in names])
        bias = _joined([self.tensor(f"{name}.bias") for name in names]) if has_bias else None
        del weights
        return IntegerLinear(self._settled(joined), orders[0], bias, self._ops)

    def _integer_form(self, layer: str) -> IntegerForm | None:
        """Return the form of a layer's whole numbers; None: it has none."""
        quantization = self._quantization
        assert isinstance(quantization, IntegerQuantization)
        return quantization.form(layer) if quantization.keeps(layer) else None

    def _settled(self, weight: IntegerWeight) -> IntegerWeight:
        """Copy a packed weight, which was made among larger tensors, so that their memory can be freed."""
        if self.device.type != "cuda":
            return weight
        _give_back_memory()
        return weight._replace(words_OW=weight.words_OW.clone())

    def _own_integer_numbers(self, layer: str) -> IntegerNumbers:
        """Load this process's part. Parts of the inputs begin and end between groups, see `check_group_borders`."""
        whole, shard = self._integer_numbers(layer), self._shard
        if shard is None:
            return whole
        numbers = part_of(f"{layer}.weight", whole.numbers_OI, shard)
        scales, zeros = (
            None if one is None else scale_part_of(layer, one, shard, whole.group)
            for one in (whole.scales_OG, whole.zeros_OG)
        )
        assert scales is not None
        # With one scale for each output, a rank's inputs are one group, too.
        group = min(whole.group, numbers.shape[1]) if scales.shape[1] == 1 else whole.group
        own = replace(whole, numbers_OI=numbers, scales_OG=scales, zeros_OG=zeros, group=group)
        del whole
        _give_back_memory()
        return own

    def _integer_numbers(self, layer: str) -> IntegerNumbers:
        quantization = self._quantization
        if isinstance(quantization, GgufIntegers):
            assert isinstance(self._tensors, GgufSource), type(self._tensors)
            return self._tensors.integers(f"{layer}.weight", self.device)
        assert isinstance(quantization, UniformIntegers)
        if quantization.layout == "plain":
            weight = self.stored(f"{layer}.weight").to(device=self.device, dtype=self.dtype)
            return quantise_integers(weight, quantization.bits, quantization.group or weight.shape[1])

        def load(kind: str) -> Tensor | None:
            try:
                return self.stored(f"{layer}.{kind}").to(self.device)
            except KeyError:
                return None

        return read_integers(layer, load, quantization)

    def _own_fp8_weight(self, layer: str) -> Fp8Weight:
        """Load this process's part. Weights that are quantised while they are loaded have the scales of the whole
        weight."""
        whole, shard = self._fp8_weight(layer), self._shard
        if shard is None:
            return whole
        values, scale = part_of(f"{layer}.weight", whole.values_OI, shard), scale_part_of(layer, whole.scale, shard)
        own = replace(whole, values_OI=values, scale=scale)
        del whole
        if self.device.type == "cuda":
            _give_back_memory()
        return own

    def _fp8_weight(self, name: str) -> Fp8Weight:
        weight, quantization = self.stored(f"{name}.weight").to(self.device), self._quantization
        assert isinstance(quantization, Quantization)
        if quantization == ON_LOAD:
            return quantise_weight(weight)
        scale = self.stored(f"{name}.{quantization.scale}").to(self.device)
        outputs = None if quantization.block is None else quantization.block[0]
        static = float(self.stored(f"{name}.input_scale")) if quantization.inputs == "static" else None
        return Fp8Weight(weight, expand_scale(scale, weight.shape, outputs), quantization.inputs, static)

    def _wide_linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        """Make a float32 layer, whatever the model computes in."""
        if is_packable(weight_OI):
            return PackedLinear(weight_OI, bias_O)
        return DenseLinear(weight_OI, bias_O, ops_for(self.device, torch.float32))

    def new_linear(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        if is_packable(weight_OI):
            return PackedLinear(weight_OI, bias_O)
        if self._gemm is not None:
            return InvariantLinear(weight_OI, bias_O, self._gemm)
        return DenseLinear(weight_OI, bias_O, self._ops)

    def _aligned(self, weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        if not AlignedLinear.is_needed(weight_OI):
            return self.new_linear(weight_OI, bias_O)
        bias = None if bias_O is None else AlignedLinear.padded(bias_O)
        return AlignedLinear(self.new_linear(AlignedLinear.padded(weight_OI), bias), len(weight_OI))

    def new_gated_linear(
        self, gate_OI: Tensor, up_OI: Tensor, biases_O: tuple[Tensor, Tensor] | None, activation: Activation
    ) -> GatedLinear:
        if is_packable(gate_OI):
            return PackedGatedLinear(gate_OI, up_OI, biases_O, activation)
        if self._gemm is not None:
            return InvariantGatedLinear(gate_OI, up_OI, biases_O, self._gemm, activation)
        return DenseGatedLinear(gate_OI, up_OI, biases_O, self._ops, activation)


def _give_back_memory() -> None:
    """Free the memory of a whole weight of which a rank keeps a part. Otherwise small weights would lie in its place
    and leave holes: 6 of 72 GiB for half of a 70B model (log, 2026-11-25)."""
    torch.cuda.empty_cache()  # it does nothing without CUDA


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
