"""Decides what runs with `model.backend: transformers`. Options that need layers of specbatch are refused there."""

from __future__ import annotations

from dataclasses import replace

from specbatch.config import Config
from specbatch.errors import ConfigError
from specbatch.setup.engine import EngineSettings

_HINT = "leave it out, or use a model of a family that is native (docs/models.md)"


def engine_of_transformers(config: Config, engine: EngineSettings) -> EngineSettings:
    """Return the settings for a target that transformers computes: prompts have no graphs of pieces, kernels are not
    compiled ahead, and there is one lane. Raise ConfigError for options that need layers of specbatch."""
    section = config.engine
    refused = {
        f"engine.tensor_parallel: {section.tensor_parallel}": section.tensor_parallel > 1,
        "engine.deterministic": section.deterministic,
        "engine.compile: auto": section.compile == "auto",
        "engine.two_batch_overlap: on": section.two_batch_overlap == "on",
        "model.quantization: fp8": config.model.quantization == "fp8",
        f"prefill.graphs: {config.prefill.graphs}": config.prefill.graphs in ("piecewise", "both"),
    }
    for option, is_refused in refused.items():
        if is_refused:
            raise ConfigError(f"{option} does not run with model.backend: transformers", hint=_HINT)
    prompt_graphs = "whole" if engine.prompt_graphs in ("whole", "both") else "off"
    return replace(engine, prompt_graphs=prompt_graphs, compiles_ahead=False, lane_mode="off")
