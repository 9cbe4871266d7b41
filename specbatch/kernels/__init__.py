"""Kernels: tensors in, tensors out. Every operation exists twice under one name and signature, as plain torch (the
*twin*, any device) and in Triton (CUDA)."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch


def ops_for(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The operations for models of `dtype` on `device`: Triton's on CUDA (which brings triton along), the twins on CPU
    and for float64, which only tests use."""
    name = "triton" if device.type == "cuda" and dtype != torch.float64 else "torch"
    return importlib.import_module(f"specbatch.kernels.{name}")
