"""Decides the `engine` options that may be left open, and how prompts are computed: all but the size of the cache."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

from specbatch.attention.flashinfer import DTYPES as FLASHINFER_DTYPES
from specbatch.cache.prefix_groups import GroupLimits
from specbatch.config import AttentionName, Config, EngineSection
from specbatch.engine.executor import GraphMode
from specbatch.engine.overlap.lanes import LaneLimits
from specbatch.engine.prefill.models import PromptGraphMode
from specbatch.errors import ConfigError
from specbatch.setup.cache import DEFAULT_BATCH
from specbatch.setup.deterministic import check_deterministic
from specbatch.setup.device import DTYPE_NAMES
from specbatch.setup.lanes import Mode as LaneMode
from specbatch.setup.lanes import resolve_mode
from specbatch.setup.memory import MEMORY_FRACTION

# What `auto` is where rounds are graphs. On an H200 whole graphs were the fastest way for every chunk that fits one,
# then pieces, then launches. "whole" gives up the pieces.
_AUTO: PromptGraphMode = "both"


@dataclass(frozen=True)
class EngineSettings:
    """The decisions on the `engine` options that may be left open."""

    attention: AttentionName
    graphs: GraphMode
    max_batch_size: int
    page_size: int
    prefill_chunk_tokens: int
    memory_fraction: float
    prompt_graphs: PromptGraphMode
    compiles: bool  # pieces of prompts
    lane_mode: LaneMode = "off"
    lanes: LaneLimits | None = None  # sizes from which there are two lanes; None: there is one everywhere
    compiles_ahead: bool = False  # compile kernels at the start, in threads
    cascade: GroupLimits | None = None  # None: what requests share is read by each
    left_open: frozenset[str] = frozenset()  # options that the user has not set: what memory does not hold may be less


def resolve_engine(config: Config, device: torch.device, dtype: torch.dtype, notes: list[str]) -> EngineSettings:
    """Decide what is left open, all but the size of the cache."""
    section, on_cuda = config.engine, device.type == "cuda"
    has_triton = importlib.util.find_spec("triton") is not None
    attention, graphs = section.attention, section.cuda_graphs
    if attention in ("triton", "flashinfer") and on_cuda and not has_triton:
        raise ConfigError(
            f"engine.attention: {attention} needs the package triton, which is not installed",
            hint="pip install triton (CUDA builds of torch bring it along), or use engine.attention: torch",
        )
    if attention == "flashinfer" and (not on_cuda or dtype not in FLASHINFER_DTYPES):
        raise ConfigError(
            f"engine.attention: flashinfer needs a CUDA device and bfloat16 or float16, not {device} and "
            f"{DTYPE_NAMES[dtype]}",
            hint=f"use engine.attention: {'triton' if on_cuda and dtype != torch.float64 else 'torch'}",
        )
    if attention == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(
            "engine.attention: flashinfer needs the package flashinfer-python, which is not installed",
            hint="pip install 'specbatch[gpu]', or use engine.attention: triton",
        )
    if attention == "triton" and (not on_cuda or dtype == torch.float64):
        raise ConfigError(
            f"engine.attention: triton needs a CUDA device and at most 32 bits, not {device} and {DTYPE_NAMES[dtype]}",
            hint="use engine.attention: torch",
        )
    if attention == "auto":
        attention = "triton" if on_cuda and has_triton and dtype != torch.float64 else "torch"
        why = "it needs no further package and has no limits of geometry" if attention == "triton" else "the exact one"
        notes.append(f"engine.attention: {attention} ({why})")
    if attention == "torch" and graphs == "round":
        raise ConfigError(
            f"engine.cuda_graphs: {graphs} needs engine.attention triton or flashinfer; torch plans on the host",
            hint="leave engine.cuda_graphs out, or set it to none",
        )
    if section.deterministic:
        check_deterministic(device, dtype, attention)
    page, chunk = (64, 8192) if on_cuda else (16, 512)
    graph_mode: GraphMode = graphs if graphs != "auto" else "round" if attention != "torch" else "none"
    return EngineSettings(
        attention,
        graph_mode,
        section.max_batch_size or DEFAULT_BATCH[device.type],
        section.page_size or page,
        section.prefill_chunk_tokens or chunk,
        section.memory_fraction or MEMORY_FRACTION[device.type],
        resolve_prompt_graphs(config.prefill.graphs, section, on_cuda, attention, graph_mode),
        section.compile == "auto",
        resolve_mode(section, device, attention, notes),
        compiles_ahead=resolve_compile_ahead(device, attention),
        left_open=frozenset(
            name for name in ("max_batch_size", "prefill_chunk_tokens") if getattr(section, name) is None
        ),
    )


def resolve_prompt_graphs(
    wanted: PromptGraphMode | Literal["auto"],
    section: EngineSection,
    on_cuda: bool,
    attention: str,
    rounds: GraphMode,
) -> PromptGraphMode:
    """Decide the graphs of prompts. The size of a model decides up to how many tokens a chunk is a graph (`ChunkCost`).
    `attention`: the attention backend as resolved. `rounds`: the graphs of rounds as resolved. Raise ConfigError if the
    wanted graphs are not possible."""
    can_be_whole = on_cuda and attention == "triton" and rounds == "round"
    if wanted == "auto":
        of_some = _AUTO if section.tensor_parallel == 1 else "whole"
        wanted = of_some if can_be_whole else "off"
    if wanted in ("whole", "both") and not can_be_whole:
        found = f"{attention} and {rounds}" if on_cuda else "a CPU"
        raise ConfigError(
            f"prefill.graphs: {wanted} needs a CUDA device, engine.attention: triton and engine.cuda_graphs: round, "
            f"not {found}",
            hint="leave prefill.graphs out" + (", or set it to piecewise" if on_cuda else ""),
        )
    if wanted == "piecewise" and not on_cuda:
        raise ConfigError("prefill.graphs: piecewise needs a CUDA device", hint="leave prefill.graphs out")
    if wanted in ("piecewise", "both") and section.tensor_parallel > 1:
        raise ConfigError(
            f"prefill.graphs: {wanted} does not run with engine.tensor_parallel: ranks would capture other sizes",
            hint="leave prefill.graphs out, or set it to whole",
        )
    if section.compile == "auto" and wanted not in ("piecewise", "both"):
        raise ConfigError(
            f"engine.compile: auto needs prefill.graphs: piecewise or both, whose pieces it compiles, not {wanted}",
            hint="leave engine.compile out" + (", or set prefill.graphs to piecewise" if on_cuda else ""),
        )
    if section.compile == "auto" and section.deterministic:
        raise ConfigError(
            "engine.compile: auto cannot be combined with engine.deterministic, whose layers are not compiled",
            hint="leave one of them out",
        )
    return wanted


def resolve_compile_ahead(device: torch.device, attention: str) -> bool:
    """Return whether kernels are compiled at the start. Only what runs over fake tensors can be: kernels of FlashInfer
    cannot."""
    return device.type == "cuda" and attention == "triton"
