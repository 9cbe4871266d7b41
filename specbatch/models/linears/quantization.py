"""The quantization of a checkpoint's linear layers to FP8 (E4M3: 4 bits of exponent, 3 of mantissa, at most 448), and
the choice among all quantizations. `integer_quantization.py` has whole numbers.

Read are the formats of compressed-tensors (`float-quantized`), of NVIDIA ModelOpt (FP8), and of transformers
(`quant_method: fp8`: blocks of weights, as DeepSeek-V3 and Qwen3-FP8 have them, or one scale a tensor).

A weight is its stored value times a scale. Inputs of a layer are quantised as well, when it runs: see `fp8.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from specbatch.errors import ModelError
from specbatch.models.checks import mapping, shown, whole_number
from specbatch.models.linears.integer_quantization import INT4_ON_LOAD, parse_awq, parse_gptq, parse_packed
from specbatch.models.linears.layer_quantization import (
    QUANTIZED_HINT,
    LayerQuantization,
    check_known_keys,
    layer_names,
    unsupported,
)

WeightScales = Literal["tensor", "channel", "block"]
# How a layer's inputs are quantised: with a scale for each token; for each token and each block of features; with one
# scale that the checkpoint has; or not at all.
InputScales = Literal["token", "block", "static", "none"]


@dataclass(frozen=True, kw_only=True)
class Quantization(LayerQuantization):
    """`block`: (outputs, inputs) of a block of weights that has one scale."""

    weights: WeightScales
    inputs: InputScales
    scale: Literal["weight_scale", "weight_scale_inv"] = "weight_scale"
    block: tuple[int, int] | None = None

    @property
    def is_kept(self) -> bool:
        return self.inputs != "none"

    def dequantised(self) -> Quantization:
        return replace(self, inputs="none")

    def saved_bytes(self, plain: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
        """In memory each output has a float32 scale, or one for each block of its inputs."""
        width = None if self.block is None else self.block[1]
        matrices = {name: shape for name, shape in plain.items() if len(shape) == 2}
        covered = [shape for name, shape in matrices.items() if self.covers(name.removesuffix(".weight"))]
        num_scales = sum(shape[0] * (1 if width is None else -(-shape[1] // width)) for shape in covered)
        return sum(math.prod(shape) for shape in covered) * (itemsize - 1) - 4 * num_scales

    def stored(self, plain: Mapping[str, tuple[int, ...]], found: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
        """A scale of one value may have any number of dimensions: see `same_scale`."""
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
ON_LOAD = Quantization(method="while loading", weights="channel", inputs="token")
QuantizationOption = Literal["auto", "none", "fp8", "int4"]


def chosen(option: QuantizationOption, stored: LayerQuantization | None) -> LayerQuantization | None:
    """Return the quantization that `model.quantization` makes of a checkpoint. `stored`: that of its files."""
    if stored is not None:
        return stored.dequantised() if option == "none" else stored
    return {"fp8": ON_LOAD, "int4": INT4_ON_LOAD}.get(option)


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


def parse_quantization(
    config: Mapping[str, Any], modelopt: Mapping[str, Any] | None = None
) -> LayerQuantization | None:
    """Read the quantization from a config.json (see `quantization_section`), or from an `hf_quant_config.json`
    (`modelopt`). None: the checkpoint is not quantised. Raise ModelError for formats other than those
    above."""
    where, section = quantization_section(config)
    if section is None:
        return None if modelopt is None else _modelopt(mapping(modelopt.get("quantization"), "hf_quant_config.json"))
    method = section.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(section, where)
    if method == "fp8":
        return _fp8(section, where)
    if method == "gptq":
        return parse_gptq(section, where)
    if method == "awq":
        return parse_awq(section, where)
    if method == "mxfp4":  # the experts of gpt-oss, see `formats/gpt_oss_experts.py`
        return None
    if method == "modelopt" or (method is None and "quant_algo" in section):
        return _modelopt(section)
    raise ModelError(f"the checkpoint is quantised ({shown(method)}), which is not supported", hint=QUANTIZED_HINT)


def _compressed_tensors(section: Mapping[str, Any], where: str) -> LayerQuantization | None:
    """https://github.com/vllm-project/compressed-tensors"""
    is_packed = section.get("format") == "pack-quantized"
    if not is_packed and section.get("format") not in ("float-quantized", "naive-quantized"):
        raise unsupported(f"{where}: format {shown(section.get('format'))}")
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        if section.get(key):
            raise unsupported(f"{where}: {key}")
    groups = mapping(section.get("config_groups"), f"{where}: config_groups")
    if not groups and section.get("kv_cache_scheme"):
        return None  # scales of the KV cache alone
    if len(groups) != 1:
        raise unsupported(f"{where}: {len(groups)} config_groups")
    (group,) = (mapping(one, f"{where}: config_groups") for one in groups.values())
    if group.get("targets") != ["Linear"]:
        raise unsupported(f"{where}: targets {shown(group.get('targets'))}")
    if group.get("output_activations") is not None:
        raise unsupported(f"{where}: output_activations")
    ignored = layer_names(section.get("ignore"), f"{where}: ignore")
    if is_packed:
        if group.get("input_activations") is not None:
            raise unsupported(f"{where}: input_activations of format 'pack-quantized'")
        if group.get("format") not in (None, "pack-quantized"):
            raise unsupported(f"{where}: format {shown(group['format'])}")
        check_known_keys(section, _SECTION_KEYS, where)
        check_known_keys(group, _GROUP_KEYS, f"{where}: config_groups")
        return parse_packed(group.get("weights"), ignored, where)
    weights = _arguments(group.get("weights"), f"{where}: weights")
    if weights is None or weights.get("strategy") not in ("tensor", "channel", "block"):
        raise unsupported(f"{where}: weights with the strategy {shown((weights or {}).get('strategy'))}")
    inputs = _arguments(group.get("input_activations"), f"{where}: input_activations")
    block = _block(weights.get("block_structure"), where) if weights["strategy"] == "block" else None
    return Quantization(
        method="compressed-tensors",
        weights=weights["strategy"],
        inputs=_compressed_inputs(inputs, where),
        block=block,
        ignored=ignored,
        lm_head=True,
    )


# All keys of compressed-tensors, those that are harmless too.
_SECTION_KEYS = (
    "config_groups", "format", "global_compression_ratio", "ignore", "kv_cache_scheme", "quant_method",
    "quantization_status", "sparsity_config", "transform_config", "version", "moe_sparsity_config",
)  # fmt: skip
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")


def _arguments(value: object, name: str) -> Mapping[str, Any] | None:
    """Check the quantization of one kind of tensor and return its arguments; None: it is not quantised."""
    if value is None:
        return None
    arguments = mapping(value, name)
    if arguments.get("num_bits") != 8 or arguments.get("type") != "float" or arguments.get("symmetric") is False:
        bits, kind = arguments.get("num_bits"), arguments.get("type")
        raise unsupported(f"{name}: {shown(bits)} bits of type {shown(kind)}")
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
    raise unsupported(f"{where}: input_activations with the strategy {shown(strategy)}")


_GROUP = 128  # features of an input that share a scale, where weights have blocks


def _fp8(section: Mapping[str, Any], where: str) -> Quantization:
    """transformers' FineGrainedFP8Config, and AutoFP8's."""
    scheme = section.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise unsupported(f"{where}: activation_scheme {shown(scheme)}")
    ignored = layer_names(
        section.get("modules_to_not_convert", section.get("ignored_layers")), f"{where}: ignored layers"
    )
    size = section.get("weight_block_size")
    if size is None:
        inputs: InputScales = "token" if scheme == "dynamic" else "static"
        return Quantization(method="fp8", weights="tensor", inputs=inputs, ignored=ignored)
    if scheme == "static":
        raise unsupported(f"{where}: weight_block_size with a static activation_scheme")
    return Quantization(
        method="fp8",
        weights="block",
        inputs="block",
        scale="weight_scale_inv",
        block=_block(size, where),
        ignored=ignored,
    )


def _modelopt(section: Mapping[str, Any]) -> Quantization | None:
    """https://github.com/NVIDIA/TensorRT-Model-Optimizer"""
    where = "ModelOpt's configuration"
    inner = section.get("quantization", section)
    section = mapping(inner, where)
    if section.get("quant_algo") is None and section.get("kv_cache_quant_algo"):
        return None  # scales of the KV cache alone
    if section.get("quant_algo") != "FP8":
        raise unsupported(f"{where}: quant_algo {shown(section.get('quant_algo'))}")
    ignored = layer_names(section.get("exclude_modules", section.get("ignore")), f"{where}: exclude_modules")
    return Quantization(method="modelopt", weights="tensor", inputs="static", ignored=ignored, lm_head=True)


def _block(value: object, where: str) -> tuple[int, int]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise unsupported(f"{where}: blocks of weights {shown(value)}")
    outputs, inputs = (whole_number(size, f"{where}: blocks of weights") for size in value)
    if inputs != _GROUP:
        raise unsupported(f"{where}: blocks of {inputs} inputs")
    return outputs, inputs
