"""Decides how prompts are computed.

Up to how many tokens a chunk is a graph is not decided here: it follows from the model's size, see `ChunkCost`.
"""

from __future__ import annotations

from typing import Literal

from specbatch.config import EngineSection
from specbatch.engine.executor import GraphMode
from specbatch.engine.prefill.models import PromptGraphMode
from specbatch.errors import ConfigError

# What `auto` is where rounds are graphs. On an H200 whole graphs were the fastest way for every chunk that fits one,
# then pieces, then launches. "whole" gives up the pieces.
_AUTO: PromptGraphMode = "both"


def resolve_prompt_graphs(
    wanted: PromptGraphMode | Literal["auto"],
    section: EngineSection,
    on_cuda: bool,
    attention: str,
    rounds: GraphMode,
) -> PromptGraphMode:
    """Decide the graphs of prompts. `attention`: the attention backend as resolved. `rounds`: the graphs of rounds as
    resolved. Raise ConfigError if the wanted graphs are not possible."""
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
