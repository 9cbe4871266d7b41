"""Scales of an FP8 (E4M3) KV cache that a checkpoint has: a layer's keys, and its values, are divided by one number
each before they are rounded.

Read are those of compressed-tensors (`kv_cache_scheme`), of NVIDIA ModelOpt (`kv_cache_quant_algo`), and of
`quant_method: fp8`. They are used with `engine.kv_dtype: fp8_e4m3` only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specbatch.cache.pages import KVScales
from specbatch.errors import ModelError
from specbatch.models.formats.tensor_files import TensorSource
from specbatch.models.linears.quantization import quantization_section

# An older name has one scale for both.
_K_NAMES, _V_NAMES = ("k_scale", "k_proj.k_scale", "kv_scale"), ("v_scale", "v_proj.v_scale", "kv_scale")
_ENDINGS = tuple(f".self_attn.{name}" for name in {*_K_NAMES, *_V_NAMES})


def is_kv_scale(name: str) -> bool:
    return name.endswith(_ENDINGS)


def has_fp8_cache(config: Mapping[str, Any], modelopt: Mapping[str, Any] | None) -> bool:
    """Return whether the scales of a checkpoint are for a cache in FP8, by its config.json and
    `hf_quant_config.json`."""
    for given in (quantization_section(config)[1], modelopt):
        section = given.get("quantization", given) if isinstance(given, Mapping) else {}
        scheme = section.get("kv_cache_scheme")
        if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float":
            return True
        if section.get("kv_cache_quant_algo") == "FP8":
            return True
        if section.get("quant_method") == "fp8" and scheme is not None:
            return True
    return False


def read_kv_scales(tensors: TensorSource, num_layers: int) -> tuple[KVScales, ...]:
    """Read the scales of each layer; empty if there are none. A missing scale is 1. Raise ModelError for a scale that
    is not one positive number, such as one for each head."""
    if not any(map(is_kv_scale, tensors.shapes())):
        return ()
    prefixes = [f"model.layers.{layer}.self_attn." for layer in range(num_layers)]
    return tuple(KVScales(_scale(tensors, p, _K_NAMES), _scale(tensors, p, _V_NAMES)) for p in prefixes)


def _scale(tensors: TensorSource, prefix: str, names: tuple[str, ...]) -> float:
    name = next((prefix + name for name in names if prefix + name in tensors.shapes()), None)
    if name is None:
        return 1.0
    stored = tensors.load(name)
    if stored.numel() != 1:
        raise ModelError(f"{name} has {stored.numel()} values: one scale for a layer's keys or values is supported")
    scale = float(stored)
    if not (scale > 0 and math.isfinite(scale)):
        raise ModelError(f"{name} is {scale}, which is no scale")
    return scale
