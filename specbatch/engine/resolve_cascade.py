"""Whether rounds read what requests share once for all of them (`engine.cascade_attention`)."""

from __future__ import annotations

from specbatch.config import EngineSection
from specbatch.errors import ConfigError


def resolve_cascade(section: EngineSection, attention: str, notes: list[str]) -> bool:
    """Raises ConfigError where it was asked for and cannot be. `attention`: as resolved."""
    if section.cascade_attention != "on":
        if section.cascade_attention == "auto" and attention == "triton" and not section.deterministic:
            notes.append("engine.cascade_attention: off (where it gains is not measured yet)")
        return False
    option, leave_out = "engine.cascade_attention: on", "leave engine.cascade_attention out"
    if section.deterministic:
        raise ConfigError(
            f"{option} cannot be combined with engine.deterministic: which requests share decides how keys are added",
            hint=f"{leave_out}, or engine.deterministic",
        )
    if section.two_batch_overlap == "on":
        raise ConfigError(
            f"{option} cannot be combined with engine.two_batch_overlap: groups would be divided",
            hint=f"{leave_out}, or engine.two_batch_overlap",
        )
    if attention != "triton":
        raise ConfigError(
            f"{option} needs engine.attention triton, not {attention}",
            hint=f"{leave_out}, or run on CUDA with engine.attention: triton",
        )
    if not section.prefix_cache:
        raise ConfigError(
            f"{option} needs engine.prefix_cache: without it requests share nothing",
            hint=f"{leave_out}, or set engine.prefix_cache: true",
        )
    return True
