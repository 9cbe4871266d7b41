"""Decides how prompts are computed."""

from __future__ import annotations

from typing import Literal

from specbatch.engine.executor import GraphMode
from specbatch.engine.prompt_trunks import PromptGraphMode
from specbatch.errors import ConfigError


def resolve_prompt_graphs(
    wanted: PromptGraphMode | Literal["auto"], compile_: str, on_cuda: bool, attention: str, rounds: GraphMode
) -> PromptGraphMode:
    """`compile_`: the option. `rounds`: their graphs. Without graphs of rounds, prompts are launched; tuning captures
    rounds later, and is to gather prompts as the job will."""
    can_be_whole = on_cuda and attention == "triton" and rounds != "phases"
    if wanted == "auto":
        wanted = "whole" if can_be_whole else "off"
    if wanted == "whole" and not can_be_whole:
        raise ConfigError(
            "prefill.graphs: whole needs a CUDA device, engine.attention: triton and engine.cuda_graphs: round",
            hint="leave prefill.graphs out" + (", or set it to piecewise" if on_cuda else ""),
        )
    if wanted == "piecewise" and not on_cuda:
        raise ConfigError("prefill.graphs: piecewise needs a CUDA device", hint="leave prefill.graphs out")
    if compile_ == "auto" and wanted != "piecewise":
        raise ConfigError(
            f"engine.compile: auto compiles the pieces of prefill.graphs: piecewise, which is {wanted} here",
            hint="leave engine.compile out, or set prefill.graphs to piecewise",
        )
    return wanted
