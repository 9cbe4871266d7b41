"""The decision on `engine.cascade_attention`: rounds read the keys that requests share once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from specbatch.cache.cascade_costs import CascadeCosts
from specbatch.cache.prefix_groups import GroupLimits
from specbatch.config import EngineSection
from specbatch.errors import ConfigError
from specbatch.graphs.runner import ladder


def resolve_cascade(
    section: EngineSection,
    attention: str,
    costs: CascadeCosts,
    windows: Sequence[int | None],
    num_queries: int,
    max_batch_size: int,
    notes: list[str],
) -> GroupLimits | None:
    """Return the limits of the smallest groups; None: cascade attention is off. Raise ConfigError if it was asked for
    and is not possible. `attention`: the attention backend as resolved. `windows`: the sliding window of each layer of
    the target. `num_queries`: the new tokens of a request in a round."""
    problem = _problem(section, attention, windows)
    if section.cascade_attention == "on":
        if problem is not None:
            raise problem
        return GroupLimits()
    if section.cascade_attention == "off" or problem is not None:
        return None
    if section.shared_tokens is None:
        notes.append("engine.cascade_attention: off (it is not known whether prompts begin alike)")
        return None
    shared = section.shared_tokens
    least = costs.min_batch(shared, num_queries, ladder(max_batch_size))
    if least is None:
        why = f"prompts that begin alike share {shared} tokens: too few to gain" if shared else "no prompts begin alike"
        notes.append(f"engine.cascade_attention: off ({why})")
        return None
    notes.append(
        f"engine.cascade_attention: on for {least} requests and more (prompts begin with {shared} equal tokens)"
    )
    return GroupLimits(min_batch=least, costs=costs)


def _problem(section: EngineSection, attention: str, windows: Sequence[int | None]) -> ConfigError | None:
    """Why it cannot be on."""
    option, leave_out = "engine.cascade_attention: on", "leave engine.cascade_attention out"
    if section.deterministic:
        return ConfigError(
            f"{option} cannot be combined with engine.deterministic: which requests share decides how keys are added",
            hint=f"{leave_out}, or engine.deterministic",
        )
    if section.two_batch_overlap == "on":
        return ConfigError(
            f"{option} cannot be combined with engine.two_batch_overlap: groups would be divided",
            hint=f"{leave_out}, or engine.two_batch_overlap",
        )
    if attention != "triton":
        return ConfigError(
            f"{option} needs engine.attention triton, not {attention}",
            hint=f"{leave_out}, or run on CUDA with engine.attention: triton",
        )
    if not section.prefix_cache:
        return ConfigError(
            f"{option} needs engine.prefix_cache: without it requests share nothing",
            hint=f"{leave_out}, or set engine.prefix_cache: true",
        )
    if None not in windows:
        return ConfigError(
            f"{option} needs a layer without a sliding window, and all layers of this model have one", hint=leave_out
        )
    return None
