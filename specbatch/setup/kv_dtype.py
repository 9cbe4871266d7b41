"""Decides the dtype of cached keys and values, and checks which of them FlashInfer reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specbatch.attention.flashinfer import HEAD_DIMS
from specbatch.cache.pages import KVScales
from specbatch.config import KVDtypeName
from specbatch.errors import ConfigError
from specbatch.models.config import ModelConfig
from specbatch.setup.device import DTYPE_NAMES

KV_DTYPE_NAMES: dict[torch.dtype, KVDtypeName] = {**DTYPE_NAMES, torch.float8_e4m3fn: "fp8_e4m3"}


def resolve_kv_dtype(
    name: KVDtypeName, attention: str, device: torch.device, dtype: torch.dtype, notes: list[str]
) -> torch.dtype:
    """The dtype of cached keys and values: the model's own `dtype`, or float8 where kernels and card know it."""
    if name in ("auto", DTYPE_NAMES[dtype]):
        return dtype
    if name != "fp8_e4m3":
        raise ConfigError(
            f"engine.kv_dtype is {name}, but the model runs in {DTYPE_NAMES[dtype]}",
            hint="use engine.kv_dtype: auto (like the model) or fp8_e4m3, or change model.dtype",
        )
    if attention == "torch" and device.type == "cuda":
        raise ConfigError(
            f"engine.kv_dtype: fp8_e4m3 on CUDA needs engine.attention triton or flashinfer, not {attention}",
            hint="use engine.kv_dtype: auto, or engine.attention: triton",
        )
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        raise ConfigError(
            f"engine.kv_dtype: fp8_e4m3 needs a GPU of compute capability 8.9 (Ada, Hopper) or later, and {device} has "
            f"{capability[0]}.{capability[1]}",
            hint="use engine.kv_dtype: auto",
        )
    notes.append("engine.kv_dtype: fp8_e4m3 (keys and values are rounded: texts differ from an unrounded cache's)")
    return torch.float8_e4m3fn


def check_flashinfer(model: ModelConfig, kv_dtype: torch.dtype, kv_scales: Sequence[KVScales] = ()) -> None:
    """Raise ConfigError if FlashInfer has no kernels for this model and cache."""
    hint = "use engine.attention: triton"
    if any(window is not None for window in model.sliding_windows):
        raise ConfigError(f"engine.attention: flashinfer has no sliding windows; {model.model_type} has", hint=hint)
    if model.attention_soft_cap is not None:
        raise ConfigError(f"engine.attention: flashinfer has no soft caps here; {model.model_type} has", hint=hint)
    if model.head_dim not in HEAD_DIMS:
        dims = ", ".join(map(str, HEAD_DIMS))
        raise ConfigError(f"engine.attention: flashinfer needs heads of {dims}, not {model.head_dim}", hint=hint)
    if kv_dtype == torch.float8_e4m3fn and model.head_dim == 64:
        raise ConfigError("engine.attention: flashinfer reads no fp8_e4m3 cache with heads of 64", hint=hint)
    if kv_dtype == torch.float8_e4m3fn and any(scales != KVScales() for scales in kv_scales):
        what = "an fp8_e4m3 cache with the scales of the checkpoint"
        raise ConfigError(f"engine.attention: flashinfer does not read {what}", hint=hint)
