"""Decides what runs with `model.backend: transformers`. Options that need layers of specbatch are refused there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specbatch.batch import PagedBatch
from specbatch.config import Config
from specbatch.engine.prefill.models import PromptGraphMode
from specbatch.errors import ConfigError
from specbatch.graphs.runner import GraphRunner
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.models.decoder import CausalModel
from specbatch.setup.engine import EngineSettings

LACKS = "without engine.tensor_parallel, engine.deterministic, engine.two_batch_overlap and FP8 weights"
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
        # The check at the start reads a cache in the model's dtype, and FlashInfer is made for one dtype.
        "engine.attention: flashinfer with engine.kv_dtype: fp8_e4m3": engine.attention == "flashinfer"
        and section.kv_dtype == "fp8_e4m3",
        f"prefill.graphs: {config.prefill.graphs}": config.prefill.graphs in ("piecewise", "both"),
    }
    for option, is_refused in refused.items():
        if is_refused:
            raise ConfigError(f"{option} does not run with model.backend: transformers", hint=_HINT)
    prompt_graphs: PromptGraphMode = "whole" if engine.prompt_graphs in ("whole", "both") else "off"
    return replace(engine, prompt_graphs=prompt_graphs, compiles_ahead=False, lane_mode="off")


def without_graphs(
    engine: EngineSettings,
    models: Sequence[CausalModel],
    kv_dtype: torch.dtype,
    notes: list[str],
    new_runner: Callable[[torch.device], GraphRunner] = GraphRunner,
) -> EngineSettings:
    """Return the settings without CUDA graphs if the code of one of `models`, which transformers computes, cannot be
    captured: it reads numbers from the device, or it copies to it. The reason is added to `notes`."""
    if engine.graphs == "none":
        return engine
    for model in models:
        try:
            _capture(model, kv_dtype, engine.page_size, new_runner(model.device))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            why = (str(error).strip().splitlines() or [""])[0]
            notes.append(
                f"engine.cuda_graphs: none (transformers' code of {model.config.model_type} cannot be captured: "
                f"{type(error).__name__}: {why})"
            )
            return replace(engine, graphs="none", prompt_graphs="off")
    return engine


@torch.inference_mode()
def _capture(model: CausalModel, kv_dtype: torch.dtype, page_size: int, runner: GraphRunner) -> None:
    """Capture a pass over the first token of two sequences, and drop it."""
    device, num_seqs = model.device, 2
    cache = model.new_cache((num_seqs + 1) * page_size, kv_dtype)
    index = torch.arange(num_seqs, device=device)
    ends = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    tables = index.int()[:, None].repeat(1, 2)
    batch = PagedBatch(index * page_size, torch.zeros_like(index), tables, page_size, ends[:-1] * 0, ends, 1)
    tokens = torch.zeros_like(index)
    runner.capture(("pass of transformers",), lambda: model.raw_logits(model.forward(tokens, batch, cache)[0]))
