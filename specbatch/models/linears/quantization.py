"""The quantization of a checkpoint's linear layers to FP8 (E4M3: 4 bits of exponent, 3 of mantissa, at most 448).

Read are the formats of compressed-tensors (`float-quantized`), of NVIDIA ModelOpt (FP8), and of transformers
(`quant_method: fp8`: blocks of weights, as DeepSeek-V3 and Qwen3-FP8 have them, or one scale a tensor).

A weight is its stored value times a scale. Inputs of a layer are quantised as well, when it runs: see `fp8.py`.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from specbatch.errors import ModelError
from specbatch.models.checks import mapping, shown, whole_number

WeightScales = Literal["tensor", "channel", "block"]
# How a layer's inputs are quantised: with a scale for each token; for each token and each block of features; with one
# scale that the checkpoint has; or not at all.
InputScales = Literal["token", "block", "static", "none"]
FP8_HINT = "use the unquantised checkpoint, one in FP8 (compressed-tensors, ModelOpt or fp8), or a GGUF file"


@dataclass(frozen=True)
class Quantization:
    """`block`: (outputs, inputs) of a block of weights that has one scale. `ignored`: layers that are not quantised, by
    name; "re:..." is a regular expression, and `*` matches anything. `lm_head`: quantised unless it is ignored."""

    method: str  # name in config.json
    weights: WeightScales
    inputs: InputScales
    scale: Literal["weight_scale", "weight_scale_inv"] = "weight_scale"
    block: tuple[int, int] | None = None
    ignored: tuple[str, ...] = ()
    lm_head: bool = False

    def covers(self, layer: str) -> bool:
        """`layer`: such as "model.layers.0.mlp.up_proj". All layers of experts are linear ones; some have names such as
        "w1"."""
        is_linear = layer.endswith("_proj") or ".experts." in layer
        if not (is_linear or (self.lm_head and layer == "lm_head")):
            return False
        return not any(_matches(pattern, layer) for pattern in self.ignored)

    def saved_bytes(self, plain: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
        """Count the bytes that weights save in FP8, compared with `itemsize` bytes each. In memory each output has a
        float32 scale, or one for each block of its inputs. `plain`: the names and shapes of the unquantised model."""
        width = None if self.block is None else self.block[1]
        matrices = {name: shape for name, shape in plain.items() if len(shape) == 2}
        covered = [shape for name, shape in matrices.items() if self.covers(name.removesuffix(".weight"))]
        num_scales = sum(shape[0] * (1 if width is None else -(-shape[1] // width)) for shape in covered)
        return sum(math.prod(shape) for shape in covered) * (itemsize - 1) - 4 * num_scales

    def stored(self, plain: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that a checkpoint has, from those of the unquantised model. A scale of one
        value may have any number of dimensions: see `same_scale`."""
        shapes = dict(plain)
        for name, shape in plain.items():
            layer, _, kind = name.rpartition(".")
            if kind != "weight" or len(shape) != 2 or not self.covers(layer):
                continue
            shapes[f"{layer}.{self.scale}"] = self._scale_shape(shape)
            if self.inputs == "static":
                shapes[f"{layer}.input_scale"] = (1,)
        return shapes

    def _scale_shape(self, weight: tuple[int, ...]) -> tuple[int, ...]:
        if self.weights == "tensor":
            return (1,)
        if self.weights == "channel":
            return (weight[0], 1)
        assert self.block is not None
        return (-(-weight[0] // self.block[0]), -(-weight[1] // self.block[1]))

    def describe(self) -> str:
        inputs = {
            "token": "inputs with a scale a token",
            "block": "inputs with a scale a token and block",
            "static": "inputs with the checkpoint's scale",
            "none": "inputs as they are",
        }[self.inputs]
        unit = f"{self.block[0]}x{self.block[1]} block" if self.block is not None else self.weights
        return f"fp8 ({self.method}: weights with a scale a {unit}, {inputs})"


# What `model.quantization: fp8` makes of a checkpoint that is not quantised.
ON_LOAD = Quantization("while loading", "channel", "token")


def chosen(option: Literal["auto", "none", "fp8"], stored: Quantization | None) -> Quantization | None:
    """Return the quantization that `model.quantization` makes of a checkpoint. `stored`: that of its files."""
    if option == "none":
        return None if stored is None else replace(stored, inputs="none")
    return ON_LOAD if option == "fp8" and stored is None else stored


def same_scale(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Return whether a scale has the shape that is wanted, or holds the same number of values in a column or a row."""
    return found == wanted or (math.prod(found) == math.prod(wanted) == max((*found, *wanted, 1)))


_KEYS = ("quantization_config", "compression_config")  # the second one: old files of compressed-tensors


def quantization_section(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """Return the section of a config.json on quantization, and the name of its key for messages. None: there is no such
    section."""
    found = {key: mapping(config[key], f"config.json: {key}") for key in _KEYS if config.get(key)}
    if len(found) == len(_KEYS):
        raise ModelError(f"config.json has {' and '.join(_KEYS)}", hint="remove the one that is not of these weights")
    if _KEYS[1] in found:
        return f"config.json: {_KEYS[1]}", {"quant_method": "compressed-tensors", **found[_KEYS[1]]}
    return f"config.json: {_KEYS[0]}", found.get(_KEYS[0])


def parse_quantization(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None) -> Quantization | None:
    """Read the quantization from a config.json (see `quantization_section`), or from an `hf_quant_config.json`
    (`modelopt`). None: the checkpoint is not quantised. Raise ModelError for formats other than the FP8 formats
    above."""
    where, section = quantization_section(config)
    if section is None:
        return None if modelopt is None else _modelopt(mapping(modelopt.get("quantization"), "hf_quant_config.json"))
    method = section.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(section, where)
    if method == "fp8":
        return _fp8(section, where)
    if method == "mxfp4":  # the experts of gpt-oss, see `formats/gpt_oss_experts.py`
        return None
    if method == "modelopt" or (method is None and "quant_algo" in section):
        return _modelopt(section)
    raise ModelError(f"the checkpoint is quantised ({shown(method)}), which is not supported", hint=FP8_HINT)


def _compressed_tensors(section: Mapping[str, Any], where: str) -> Quantization | None:
    """https://github.com/vllm-project/compressed-tensors"""
    if section.get("format") not in ("float-quantized", "naive-quantized"):
        raise _unsupported(f"{where}: format {shown(section.get('format'))}")
    for key in ("sparsity_config", "transform_config"):
        if section.get(key):
            raise _unsupported(f"{where}: {key}")
    groups = mapping(section.get("config_groups"), f"{where}: config_groups")
    if not groups and section.get("kv_cache_scheme"):
        return None  # scales of the KV cache alone
    if len(groups) != 1:
        raise _unsupported(f"{where}: {len(groups)} config_groups")
    (group,) = (mapping(one, f"{where}: config_groups") for one in groups.values())
    if group.get("targets") != ["Linear"]:
        raise _unsupported(f"{where}: targets {shown(group.get('targets'))}")
    if group.get("output_activations") is not None:
        raise _unsupported(f"{where}: output_activations")
    weights = _arguments(group.get("weights"), f"{where}: weights")
    if weights is None or weights.get("strategy") not in ("tensor", "channel", "block"):
        raise _unsupported(f"{where}: weights with the strategy {shown((weights or {}).get('strategy'))}")
    inputs = _arguments(group.get("input_activations"), f"{where}: input_activations")
    block = _block(weights.get("block_structure"), where) if weights["strategy"] == "block" else None
    return Quantization(
        "compressed-tensors",
        weights["strategy"],
        _compressed_inputs(inputs, where),
        block=block,
        ignored=_names(section.get("ignore"), f"{where}: ignore"),
        lm_head=True,
    )


def _arguments(value: object, name: str) -> Mapping[str, Any] | None:
    """Check the quantization of one kind of tensor and return its arguments; None: it is not quantised."""
    if value is None:
        return None
    arguments = mapping(value, name)
    if arguments.get("num_bits") != 8 or arguments.get("type") != "float" or arguments.get("symmetric") is False:
        bits, kind = arguments.get("num_bits"), arguments.get("type")
        raise _unsupported(f"{name}: {shown(bits)} bits of type {shown(kind)}")
    return arguments


def _compressed_inputs(arguments: Mapping[str, Any] | None, where: str) -> InputScales:
    if arguments is None:
        return "none"
    strategy, is_dynamic = arguments.get("strategy"), arguments.get("dynamic")
    if is_dynamic is True and strategy in ("token", "tensor"):
        return "token"
    if is_dynamic is True and strategy == "group" and arguments.get("group_size") == _GROUP:
        return "block"
    if not is_dynamic and strategy == "tensor":
        return "static"
    raise _unsupported(f"{where}: input_activations with the strategy {shown(strategy)}")


_GROUP = 128  # features of an input that share a scale, where weights have blocks


def _fp8(section: Mapping[str, Any], where: str) -> Quantization:
    """transformers' FineGrainedFP8Config, and AutoFP8's."""
    scheme = section.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _unsupported(f"{where}: activation_scheme {shown(scheme)}")
    ignored = _names(section.get("modules_to_not_convert", section.get("ignored_layers")), f"{where}: ignored layers")
    size = section.get("weight_block_size")
    if size is None:
        return Quantization("fp8", "tensor", "token" if scheme == "dynamic" else "static", ignored=ignored)
    if scheme == "static":
        raise _unsupported(f"{where}: weight_block_size with a static activation_scheme")
    return Quantization("fp8", "block", "block", "weight_scale_inv", _block(size, where), ignored)


def _modelopt(section: Mapping[str, Any]) -> Quantization | None:
    """https://github.com/NVIDIA/TensorRT-Model-Optimizer"""
    where = "ModelOpt's configuration"
    inner = section.get("quantization", section)
    section = mapping(inner, where)
    if section.get("quant_algo") is None and section.get("kv_cache_quant_algo"):
        return None  # scales of the KV cache alone
    if section.get("quant_algo") != "FP8":
        raise _unsupported(f"{where}: quant_algo {shown(section.get('quant_algo'))}")
    ignored = _names(section.get("exclude_modules", section.get("ignore")), f"{where}: exclude_modules")
    return Quantization("modelopt", "tensor", "static", ignored=ignored, lm_head=True)


def _block(value: object, where: str) -> tuple[int, int]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise _unsupported(f"{where}: blocks of weights {shown(value)}")
    outputs, inputs = (whole_number(size, f"{where}: blocks of weights") for size in value)
    if inputs != _GROUP:
        raise _unsupported(f"{where}: blocks of {inputs} inputs")
    return outputs, inputs


def _names(value: object, name: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ModelError(f"{name} must be a list of names, not {shown(value)}")
    for one in value:
        if one.startswith("re:"):
            try:
                re.compile(one[3:])
            except re.error as error:
                raise ModelError(f"{name}: {shown(one)} is no regular expression: {error}") from error
    return tuple(value)


def _matches(pattern: str, layer: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], layer) is not None
    # A module's name covers the layers in it.
    return fnmatch.fnmatchcase(layer, pattern) or layer.startswith(f"{pattern}.") or layer.endswith(f".{pattern}")


def _unsupported(what: str) -> ModelError:
    return ModelError(f"{what} is not supported", hint=FP8_HINT)
