"""Replaces modules of a model of transformers by layers of specbatch that compute the same: linear layers, gated MLPs
and RMS norms.

Linear layers are known by their type. MLPs and norms are found by their parts, and one is only replaced if the layer
gives the same numbers for random inputs: names alone do not say what a class computes.

Shape suffixes: T tokens, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specbatch.kernels import ops_for
from specbatch.kernels.activations import Activation
from specbatch.models.layers import RMSNorm
from specbatch.models.weight_loader import WeightLoader

_NUM_ROWS = 4  # random inputs of a comparison
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_GATED_PARTS = frozenset(("gate_proj", "up_proj", "down_proj", "act_fn"))
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
# The largest mean difference of two ways to compute the same, as a part of the mean result.
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class _Layer(nn.Module):
    """A layer of specbatch as a module: a function of rows. `original`: the module that it replaces; inputs of another
    dtype go to it if it still has its weights."""

    def __init__(self, function: Callable[[Tensor], Tensor], dtype: torch.dtype, original: nn.Module | None) -> None:
        super().__init__()
        self.function, self._dtype, self._original = function, dtype, original

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self._dtype and self._original is not None:
            y: Tensor = self._original(x)
            return y
        rows = x.reshape(-1, x.shape[-1])
        return self.function(rows).view(*x.shape[:-1], -1)


class _LinearLayer(_Layer):
    """A linear layer of specbatch. Its weight is in a layout of its own; what asks for `weight` gets its shape."""

    def __init__(self, function: Callable[[Tensor], Tensor], linear: nn.Linear) -> None:
        super().__init__(function, linear.weight.dtype, None)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.empty_like(linear.weight, device="meta")
        self.bias = linear.bias


def replace_modules(model: nn.Module, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Replace what can be replaced. Return the numbers of modules by kind. `dtype`: that of the model; modules of
    another one stay as they are."""
    loader = WeightLoader(_NoTensors(), dtype, device)
    counts = {"linear layers": 0, "MLPs": 0, "norms": 0}

    def visit(parent: nn.Module) -> None:
        for name, child in parent.named_children():
            kind, layer = _replaced(child, loader, dtype)
            if layer is None:
                visit(child)
            else:
                setattr(parent, name, layer)
                counts[kind] += 1

    visit(model)
    return counts


def _replaced(module: nn.Module, loader: WeightLoader, dtype: torch.dtype) -> tuple[str, nn.Module | None]:
    if any(parameter.dtype != dtype for parameter in module.parameters()):
        return "", None
    if type(module) is nn.Linear:
        return "linear layers", _LinearLayer(loader.new_linear(module.weight.data, _data(module.bias)), module)
    if {name for name, _ in module.named_children()} == _GATED_PARTS and not module._parameters:
        return "MLPs", _gated(module, loader, dtype)
    if "RMSNorm" in type(module).__name__ and list(module._parameters) == ["weight"] and not module._buffers:
        return "norms", _norm(module, dtype)
    return "", None


def _gated(module: Any, loader: WeightLoader, dtype: torch.dtype) -> nn.Module | None:
    """Make a gated MLP of two layers: gate and up are one GEMM."""
    parts = module.gate_proj, module.up_proj, module.down_proj
    if any(type(part) is not nn.Linear for part in parts):
        return None
    gate, up, down = ((part.weight.data, _data(part.bias)) for part in parts)
    if (gate[1] is None) != (up[1] is None):
        return None
    biases = None if gate[1] is None or up[1] is None else (gate[1], up[1])
    for activation in _ACTIVATIONS:
        first = loader.new_gated_linear(gate[0], up[0], biases, activation)
        second = loader.new_linear(*down)
        layer = _Layer(lambda x, first=first, second=second: first.into(second, x), dtype, None)  # type: ignore[misc]
        if _error(module, layer, gate[0].shape[1], dtype, gate[0].device) <= _TOLERANCE[dtype]:
            return layer
    return None


def _norm(module: Any, dtype: torch.dtype) -> nn.Module | None:
    weight = module.weight.data
    eps = next((getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)), None)
    if not isinstance(eps, float) or weight.ndim != 1:
        return None
    wide, ops = weight.to(torch.promote_types(dtype, torch.float32)), ops_for(weight.device, dtype)
    ways = RMSNorm(weight, eps, ops), RMSNorm(wide, eps, ops), RMSNorm(1.0 + wide, eps, ops)
    layers = [_Layer(norm, dtype, module) for norm in ways]
    errors = [_error(module, layer, weight.shape[0], dtype, weight.device) for layer in layers]
    best = min(errors)  # ways that only round at other places differ by less than the tolerance
    return layers[errors.index(best)] if best <= _TOLERANCE[dtype] else None


@torch.inference_mode()
def _error(module: nn.Module, layer: nn.Module, size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the mean difference for random inputs, as a part of the mean result."""
    generator = torch.Generator().manual_seed(size)
    x_TE = (3 * torch.randn((_NUM_ROWS, size), generator=generator)).to(device=device, dtype=dtype)
    expected, found = module(x_TE[None]), layer(x_TE[None])
    if not isinstance(expected, Tensor) or expected.shape != found.shape or expected.dtype != found.dtype:
        return math.inf
    error = float((expected.double() - found.double()).abs().mean() / expected.double().abs().mean())
    return math.inf if math.isnan(error) else error


def _data(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.data


class _NoTensors:
    """The loader only makes layers of tensors that are there."""

    def load(self, name: str) -> Tensor:
        raise KeyError(name)
