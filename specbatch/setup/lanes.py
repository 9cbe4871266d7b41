"""Decides where batches and prompt chunks may run in two lanes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from specbatch.config import EngineSection
from specbatch.engine.overlap.lanes import MIN_LANE, MIN_PROMPT_LANE, NEVER, LaneLimits
from specbatch.errors import ConfigError
from specbatch.parallel.shares import Division

# What `auto` measures on CUDA. Elsewhere two lanes were slower in each case that was measured (docs/measured.md), and
# measuring takes time at each start. Several GPUs: lanes of at least this many tokens. With less, a round takes the
# time to read the weights, and each lane reads them. One GPU: a model and a batch that do not fill it.
_TOKENS_OF_RANKS = 256
_SMALL_MODEL = 10**9  # bytes
_MAX_ROWS = 64
_TESTED = (2, 4)  # numbers of GPUs among which copy engines were tested

Mode = Literal["off", "on", "auto"]


class Job(NamedTuple):
    """The facts by which `auto` decides. `num_nodes`: the tokens of a request in a round. `has_groups`: rounds read the
    keys that requests share once, and lanes would divide these groups. `experts`: how ranks divide the target if it has
    experts, which each lane reads; None: it has none. `has_budget`: chains share a budget of nodes, and in lanes they
    would be verified whole."""

    max_batch_size: int
    num_nodes: int
    target_bytes: int
    prefill_chunk_tokens: int
    has_groups: bool
    experts: Division | None = None
    has_budget: bool = False


def resolve_mode(section: EngineSection, device: torch.device, attention: str, notes: list[str]) -> Mode:
    """Decide the mode of lanes. With `auto`, lanes are measured where `lane_limits` allows them. It raises ConfigError
    if two passes at the same time would share working memory."""
    mode: Mode = section.two_batch_overlap
    if mode == "auto":
        if device.type == "cpu" and section.tensor_parallel == 1:
            return "off"  # one process computes one lane after the other
        if (reason := _reason_against(section, device, attention)) is not None:
            notes.append(f"engine.two_batch_overlap: off ({reason})")
            return "off"
    elif mode == "on" and device.type == "cuda":
        if attention != "triton":
            raise ConfigError(
                f"engine.two_batch_overlap needs engine.attention triton on CUDA, not {attention}",
                hint="leave engine.attention out, or engine.two_batch_overlap",
            )
        if section.deterministic:
            raise ConfigError(
                "engine.two_batch_overlap does not run with engine.deterministic on CUDA", hint="leave one of them out"
            )
    return mode


def _reason_against(section: EngineSection, device: torch.device, attention: str) -> str | None:
    """Return the reason why `auto` does not measure, or None."""
    if device.type != "cuda":
        return None
    if attention != "triton":
        return f"engine.attention is {attention}"
    return "engine.deterministic is on" if section.deterministic else None


def lane_limits(mode: Mode, num_ranks: int, device: torch.device, job: Job, notes: list[str]) -> LaneLimits | None:
    """Return the limits of two lanes; None: there is one lane everywhere."""
    prompt_tokens = MIN_PROMPT_LANE[device.type]
    if mode == "off":
        return None
    if mode == "on" or device.type == "cpu":
        return LaneLimits(MIN_LANE, prompt_tokens)
    is_whole = job.has_groups or job.has_budget
    if num_ranks == 1 and is_whole:
        return None
    if (why := _loss_on_gpus(num_ranks, job)) is not None:
        notes.append(f"engine.two_batch_overlap: off ({why})")
        return None
    if num_ranks == 1:
        return LaneLimits(MIN_LANE, NEVER)  # no sum of prompts can be hidden, and as graphs they are faster
    if job.experts is not None:  # The host takes longer to launch a small chunk than a GPU computes.
        return LaneLimits(None, max(prompt_tokens, 3 * job.prefill_chunk_tokens // 8))
    least = max(MIN_LANE, -(-_TOKENS_OF_RANKS // (8 * job.num_nodes)) * 8)
    has_rounds = 2 * least <= job.max_batch_size and not is_whole
    return LaneLimits(least if has_rounds else None, prompt_tokens)


def _loss_on_gpus(num_ranks: int, job: Job) -> str | None:
    """Return the reason why two lanes cannot gain on one GPU or on several, or None.

    Qwen3-30B-A3B on two H200s: half of the tokens of a round use nearly all experts, and the exchanges that lanes could
    hide take 0.9 of 9 ms, so two lanes reached 0.43 to 0.73 of the speed of one
    (docs/bench/2026-11-27-h200x2-experts.json). Full prompt chunks gain where ranks have requests of their own, because
    tokens that travel take 14% of the time (docs/bench/2026-11-28-h200x2-lanes-experts.json)."""
    if num_ranks == 1:
        is_small = job.target_bytes <= _SMALL_MODEL and job.max_batch_size <= _MAX_ROWS
        why = f"on one GPU two lanes gain only with models below 1 GB and at most {_MAX_ROWS} rows at once"
        return None if is_small else why
    if job.experts not in (None, "requests"):
        return "each lane would read all experts, which takes longer than what it could hide"
    if num_ranks not in _TESTED:
        return "sums and exchanges by copy engines have been tested on two and on four GPUs only"
    return None
