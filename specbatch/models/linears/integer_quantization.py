"""The quantization of a checkpoint's linear layers to whole numbers of 4 or 8 bits; inputs stay as they are.

Read are AWQ (`version: gemm`), GPTQ (`checkpoint_format: gptq` and `gptq_v2`), and compressed-tensors
(`pack-quantized`). `formats/integer_tensors.py` has the layouts of their tensors.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from specbatch.errors import ModelError
from specbatch.kernels.integers import UNIT
from specbatch.models.checks import flag, mapping, shown, whole_number
from specbatch.models.linears.layer_quantization import (
    LayerQuantization,
    check_known_keys,
    check_pattern,
    layer_names,
    unsupported,
)

# The layout of tensors in files. "gptq" stores zero points less one. "plain": files have the unquantised weight.
IntegerLayout = Literal["gptq", "gptq_v2", "awq", "packed", "plain"]
_GROUPS = (32, 64, 128)  # inputs that share a scale, and multiples of the last one
_SCALE_BYTES = 2  # float16 or bfloat16


class IntegerForm(NamedTuple):
    """The form of a weight in memory. `group`: the inputs that share a scale; None: all inputs of an output do.
    `group_bytes`: the bytes of a scale and its zero point."""

    bits: int
    group: int | None
    group_bytes: int

    def num_bytes(self, num_out: int, num_in: int) -> int:
        numbers = -(-num_in // UNIT) * UNIT * self.bits // 8
        return num_out * (numbers + _num_groups(num_in, self.group) * self.group_bytes)


def _num_groups(num_in: int, group: int | None) -> int:
    return 1 if group is None else -(-num_in // group)


@dataclass(frozen=True, kw_only=True)
class IntegerQuantization(LayerQuantization):
    """A quantization to whole numbers. `is_ordered`: files give the group of each input."""

    is_ordered: bool = False
    keeps_layers: bool = True

    @property
    def is_kept(self) -> bool:
        return self.keeps_layers

    @abstractmethod
    def form(self, layer: str) -> IntegerForm:
        """Return the form of a layer that this quantization covers."""

    def keeps(self, layer: str) -> bool:
        return super().keeps(layer) and ".experts." not in layer

    def dequantised(self) -> IntegerQuantization:
        return replace(self, keeps_layers=False)

    def saved_bytes(self, plain: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
        layers = {name.removesuffix(".weight"): shape for name, shape in plain.items() if len(shape) == 2}
        kept = {layer: shape for layer, shape in layers.items() if self.keeps(layer)}
        return sum(math.prod(shape) * itemsize - self.form(layer).num_bytes(*shape) for layer, shape in kept.items())


@dataclass(frozen=True, kw_only=True)
class UniformIntegers(IntegerQuantization):
    """A quantization whose layers have the same form. `group`: see `IntegerForm`. `has_zeros`: files have zero points;
    otherwise all are half of the range."""

    layout: IntegerLayout
    bits: int
    group: int | None
    has_zeros: bool

    def form(self, layer: str) -> IntegerForm:
        return IntegerForm(self.bits, self.group, _SCALE_BYTES + self.has_zeros)

    def covers(self, layer: str) -> bool:
        if self.layout == "plain" and ".experts." in layer:
            return False  # they would be rounded without saving memory
        return super().covers(layer)

    def of_files(self, found: Collection[str]) -> UniformIntegers:
        """Return the quantization of a checkpoint that has the tensors `found`. AWQ lists parts of names, and programs
        differ in which names these are a part of: "gate" can leave out `gate_proj`. A listed layer with an unquantised
        weight is left out."""
        if self.layout != "awq":
            return self
        plain = [name.removesuffix(".weight") for name in found if name.endswith(".weight")]
        return replace(self, ignored=tuple(name for name in plain if any(part in name for part in self.ignored)))

    def num_groups(self, num_in: int) -> int:
        return _num_groups(num_in, self.group)

    def stored(self, plain: Mapping[str, tuple[int, ...]], found: Collection[str]) -> dict[str, tuple[int, ...]]:
        if self.layout == "plain":
            return dict(plain)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in plain.items():
            layer, _, kind = name.rpartition(".")
            if kind != "weight" or len(shape) != 2 or not self.covers(layer):
                shapes[name] = shape
                continue
            shapes |= {f"{layer}.{key}": size for key, size in self._of_weight(*shape).items()}
            # Files of GPTQ have the groups of inputs even where these are in order.
            if self.layout.startswith("gptq") and (self.is_ordered or f"{layer}.g_idx" in found):
                shapes[f"{layer}.g_idx"] = (shape[1],)
        return shapes

    def _of_weight(self, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of one weight: names, without that of the layer, and shapes."""
        groups, in_word = self.num_groups(inputs), 32 // self.bits
        if self.layout == "awq":
            words = -(-outputs // in_word)
            return {"qweight": (inputs, words), "qzeros": (groups, words), "scales": (groups, outputs)}
        if self.layout != "packed":
            qweight, qzeros = (-(-inputs // in_word), outputs), (groups, -(-outputs // in_word))
            return {"qweight": qweight, "qzeros": qzeros, "scales": (groups, outputs)}
        tensors: dict[str, tuple[int, ...]] = {
            "weight_packed": (outputs, -(-inputs // in_word)),
            "weight_scale": (outputs, groups),
        }
        if self.has_zeros:
            tensors["weight_zero_point"] = (-(-outputs // in_word), groups)
        if self.is_ordered:
            tensors["weight_g_idx"] = (inputs,)
        return {**tensors, "weight_shape": (2,)}

    def describe(self) -> str:
        parts = "for each output" if self.group is None else f"for {self.group} inputs"
        zeros = " and a zero point" if self.has_zeros else ""
        order = ", inputs in another order" if self.is_ordered else ""
        kept = "" if self.is_kept else "; dequantised while loading"
        return f"int{self.bits} ({self.method}: weights with a scale{zeros} {parts}{order}, inputs as they are{kept})"


# What `model.quantization: int4` makes of a checkpoint that is not quantised.
INT4_ON_LOAD = UniformIntegers(method="while loading", layout="plain", bits=4, group=128, has_zeros=False)

# The names of tensors that hold whole numbers, with the type that they have in files.
WHOLE_NUMBERS: Mapping[str, str] = {
    **dict.fromkeys(("qweight", "qzeros", "weight_packed", "weight_zero_point"), "int32"),
    **dict.fromkeys(("g_idx", "weight_g_idx"), "int32"),
    "weight_shape": "int64",
}

# Keys of GPTQ that do not change what is computed from the tensors.
_GPTQ_READ = ("quant_method", "bits", "group_size", "desc_act", "sym", "lm_head", "checkpoint_format", "format")
_GPTQ_HARMLESS = (
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path",
    "model_file_base_name", "meta", "pack_dtype", "dataset", "tokenizer", "use_cuda_fp16", "model_seqlen",
    "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id", "use_exllama",
    "disable_exllama", "max_input_length", "exllama_config", "cache_block_outputs", "backend", "act_group_aware",
    "mse", "kernel", "quantizer", "offload_to_disk", "device", "parallel_packing",
)  # fmt: skip
# transformers writes all keys of GPTQ for AWQ, too.
_AWQ_HARMLESS = (*_GPTQ_HARMLESS, "sym", "do_fuse", "fuse_max_seq_len", "modules_to_fuse")
_PACKED_READ = ("num_bits", "type", "symmetric", "strategy", "group_size", "actorder", "dynamic")
_PACKED_HARMLESS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


def parse_gptq(section: Mapping[str, Any], where: str) -> UniformIntegers:
    """https://github.com/ModelCloud/GPTQModel"""
    neutral = ("is_marlin_format", "dynamic", "modules_in_block_to_quantize", "rotation", "adapter")
    check_known_keys(section, (*_GPTQ_READ, *_GPTQ_HARMLESS, *neutral), where)
    for key in ("is_marlin_format", "modules_in_block_to_quantize", "rotation", "adapter"):
        if section.get(key):
            raise unsupported(f"{where}: {key} {shown(section[key])}")
    formats = {section[key] for key in ("checkpoint_format", "format") if section.get(key) is not None} or {"gptq"}
    if len(formats) > 1 or not formats <= {"gptq", "gptq_v2"}:
        raise unsupported(f"{where}: checkpoint_format {shown(sorted(map(str, formats)))}")
    if section.get("pack_dtype", "int32") != "int32":
        raise unsupported(f"{where}: pack_dtype {shown(section['pack_dtype'])}")
    (layout,) = formats
    return UniformIntegers(
        method="gptq",
        layout="gptq" if layout == "gptq" else "gptq_v2",
        bits=_bits(section.get("bits"), where),
        group=_group(section.get("group_size"), where),
        has_zeros=not flag(section.get("sym", True), f"{where}: sym"),
        is_ordered=flag(section.get("desc_act", False), f"{where}: desc_act"),
        ignored=_dynamic(section.get("dynamic"), f"{where}: dynamic"),
        lm_head=flag(section.get("lm_head", False), f"{where}: lm_head"),
    )


def _dynamic(value: object, name: str) -> tuple[str, ...]:
    """Read GPTQModel's rules by name: regular expressions of layers that are not quantised begin with "-:"."""
    if value is None:
        return ()
    found = []
    for pattern in mapping(value, name):
        if not pattern.startswith("-:"):
            raise unsupported(f"{name}: {shown(pattern)}")
        check_pattern(pattern[2:], name)
        found.append(f"re:{pattern[2:]}")
    return tuple(found)


def parse_awq(section: Mapping[str, Any], where: str) -> UniformIntegers:
    """https://github.com/casper-hansen/AutoAWQ"""
    read = ("quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version")
    neutral = ("desc_act", "lm_head", "dynamic", "modules_in_block_to_quantize")
    check_known_keys(section, (*read, "format", "modules_to_not_convert", *_AWQ_HARMLESS, *neutral), where)
    for key in neutral:
        if section.get(key):
            raise unsupported(f"{where}: {key} {shown(section[key])}")
    if section.get("backend") == "llm-awq":  # it packs in another way
        raise unsupported(f"{where}: backend 'llm-awq'")
    for key in ("version", "format"):
        version = section.get(key, "gemm")
        if not isinstance(version, str) or version.lower() != "gemm":
            raise unsupported(f"{where}: {key} {shown(version)}")
    if not flag(section.get("zero_point", True), f"{where}: zero_point"):
        raise unsupported(f"{where}: zero_point false")
    bits = _bits(section.get("bits", section.get("w_bit")), where)
    if bits != 4:
        raise unsupported(f"{where}: {bits} bits")
    return UniformIntegers(
        method="awq",
        layout="awq",
        bits=bits,
        group=_group(section.get("group_size", section.get("q_group_size")), where),
        has_zeros=True,
        ignored=layer_names(section.get("modules_to_not_convert"), f"{where}: modules_to_not_convert"),
    )


def parse_packed(weights: object, ignored: tuple[str, ...], where: str) -> UniformIntegers:
    """Read the quantization of compressed-tensors' `pack-quantized`. `weights`: the arguments of its weights."""
    name = f"{where}: weights"
    arguments = mapping(weights, name)
    check_known_keys(arguments, (*_PACKED_READ, *_PACKED_HARMLESS, "block_structure"), name)
    if arguments.get("type", "int") != "int" or arguments.get("dynamic") or arguments.get("block_structure"):
        raise unsupported(f"{name}: type {shown(arguments.get('type'))}, or dynamic, or with blocks")
    strategy, order = arguments.get("strategy"), arguments.get("actorder")
    if strategy not in ("group", "channel"):
        raise unsupported(f"{name} with the strategy {shown(strategy)}")
    if order not in (None, False, "weight", "static", "group", "dynamic"):
        raise unsupported(f"{name}: actorder {shown(order)}")
    return UniformIntegers(
        method="compressed-tensors",
        layout="packed",
        bits=_bits(arguments.get("num_bits"), name),
        group=_group(arguments.get("group_size"), name) if strategy == "group" else None,
        has_zeros=not flag(arguments.get("symmetric", True), f"{name}: symmetric"),
        is_ordered=order in ("group", "dynamic"),
        ignored=ignored,
        lm_head=True,
    )


def _bits(value: object, where: str) -> int:
    if value not in (4, 8) or isinstance(value, bool):
        raise unsupported(f"{where}: {shown(value)} bits")
    return 4 if value == 4 else 8


def _group(value: object, where: str) -> int | None:
    if value == -1:
        return None
    group = whole_number(value, f"{where}: group_size")
    if group not in _GROUPS and group % _GROUPS[-1]:
        raise ModelError(
            f"{where}: groups of {group} inputs are not supported",
            hint=f"supported are {', '.join(map(str, _GROUPS))}, multiples of {_GROUPS[-1]}, and -1",
        )
    return group
