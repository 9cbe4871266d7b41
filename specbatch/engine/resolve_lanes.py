"""Decides whether batches run in two lanes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specbatch.config import EngineSection
from specbatch.errors import ConfigError

# Whether `auto` measures on CUDA. Two lanes gained more than 2% there (docs/measured.md) only in plain decoding of a
# model of 135M parameters with 32 and 64 rows, and most often they lost. No GPU has run `auto` with that: it is to
# measure there and nowhere else, because measuring takes time at each start.
MEASURED_ON_CUDA = False


class Decided(NamedTuple):
    two_lanes: bool
    measures: bool = False  # at the start: for each size of a batch


def resolve_two_lanes(section: EngineSection, device: torch.device, attention: str, notes: list[str]) -> Decided:
    """Raises ConfigError where two passes at the same time would share working memory."""
    if section.two_batch_overlap == "auto":
        if device.type == "cpu" and section.tensor_parallel == 1:
            return Decided(False)  # one process computes one lane after the other
        if (reason := _reason_against(section, device, attention)) is not None:
            notes.append(f"engine.two_batch_overlap: off ({reason})")
            return Decided(False)
        return Decided(True, measures=True)
    if section.two_batch_overlap == "off" or device.type != "cuda":
        return Decided(section.two_batch_overlap == "on")
    if attention != "triton":
        raise ConfigError(
            f"engine.two_batch_overlap needs engine.attention triton on CUDA, not {attention}",
            hint="leave engine.attention out, or engine.two_batch_overlap",
        )
    if section.deterministic:
        raise ConfigError(
            "engine.two_batch_overlap does not run with engine.deterministic on CUDA", hint="leave one of them out"
        )
    return Decided(True)


def _reason_against(section: EngineSection, device: torch.device, attention: str) -> str | None:
    """Why `auto` does not measure."""
    if section.cascade_attention == "on":
        return "engine.cascade_attention is on"
    if device.type != "cuda":
        return None
    if not MEASURED_ON_CUDA:
        return "two lanes were slower on CUDA, but for the smallest models with few rows"
    if attention != "triton":
        return f"engine.attention is {attention}"
    return "engine.deterministic is on" if section.deterministic else None
