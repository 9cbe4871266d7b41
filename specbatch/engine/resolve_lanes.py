"""Decides whether batches run in two lanes."""

from __future__ import annotations

import torch

from specbatch.config import EngineSection
from specbatch.errors import ConfigError

MEASURED_ON_CUDA = False  # `auto` is off without it


def resolve_two_lanes(section: EngineSection, device: torch.device, attention: str, notes: list[str]) -> bool:
    """Raises ConfigError where two passes at the same time would share working memory."""
    if section.two_batch_overlap == "auto":
        if device.type == "cuda" or section.tensor_parallel > 1:
            notes.append("engine.two_batch_overlap: off (what it gains was not measured)")
        return False
    if section.two_batch_overlap == "off" or device.type != "cuda":
        return section.two_batch_overlap == "on"
    if attention != "triton":
        raise ConfigError(
            f"engine.two_batch_overlap needs engine.attention triton on CUDA, not {attention}",
            hint="leave engine.attention out, or engine.two_batch_overlap",
        )
    if section.deterministic:
        raise ConfigError(
            "engine.two_batch_overlap does not run with engine.deterministic on CUDA", hint="leave one of them out"
        )
    return True
