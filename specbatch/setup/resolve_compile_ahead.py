"""Decides whether kernels are compiled in threads, before they are launched."""

from __future__ import annotations

import torch

from specbatch.config import EngineSection


def resolve_compile_ahead(section: EngineSection, device: torch.device, attention: str) -> bool:
    """Only for what runs over fake tensors: not for kernels that others launch (FlashInfer, cuBLASLt)."""
    return device.type == "cuda" and attention == "triton" and not section.deterministic
