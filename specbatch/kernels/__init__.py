"""Kernels: functions from tensors to tensors. Every operation exists twice, in files of the same name and with the same
signature: in plain torch (the *reference kernel*, for any device) and in Triton (CUDA). The reference kernel defines
the result."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch as pytorch  # a package of this folder has the name `torch`


def ops_for(device: pytorch.device, dtype: pytorch.dtype) -> ModuleType:
    """Return the operations for models of `dtype` on `device`: Triton's on CUDA (torch for CUDA installs triton), the
    reference kernels on a CPU and for float64, which only tests use."""
    name = "triton" if device.type == "cuda" and dtype != pytorch.float64 else "torch"
    return importlib.import_module(f"specbatch.kernels.{name}")
