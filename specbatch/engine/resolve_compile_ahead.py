"""Decides whether kernels are compiled in threads, before they are launched."""

from __future__ import annotations

import torch

from specbatch.config import EngineSection

# Set it to True when, on a GPU, `scripts/bench/bench_start.py --ahead both` shows that a cold start is faster with it,
# that a warm one is at most two seconds slower, and that the rows are the same.
MEASURED_ON_CUDA = False


def resolve_compile_ahead(section: EngineSection, device: torch.device, attention: str, *, two_lanes: bool) -> bool:
    """Only for what runs over fake tensors: not for kernels that others launch (FlashInfer, cuBLASLt, ranks), nor for
    lanes, which have streams."""
    fits = attention == "triton" and not section.deterministic and section.tensor_parallel == 1 and not two_lanes
    return MEASURED_ON_CUDA and device.type == "cuda" and fits
