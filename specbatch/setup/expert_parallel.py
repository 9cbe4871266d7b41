"""Decides how ranks divide a target: a part of each layer for each rank, whole experts, or requests.

With requests of its own, a rank reads all weights of attention, of which it would read a part; and tokens cross the
links twice in a layer, to their experts and back, where two sums would send each of them twice.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specbatch.config import Config
from specbatch.errors import ConfigError
from specbatch.models.config import ModelConfig
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.pass_weights import PassWeights
from specbatch.parallel.shares import Division
from specbatch.setup.cache import DEFAULT_BATCH
from specbatch.setup.engine import EngineSettings

_MEMORY = 3.3e12  # bytes that an H100 reads in a second
_LINK = 350e9  # bytes that NVLink carries from one GPU in a second, in one direction
_SUM_SECONDS = 5e-6  # the time of a small sum over two GPUs
_OPTION = "engine.expert_parallel"
# Tokens of a prompt chunk of a rank with requests of its own. On two H200s, prompts with 16,384 and 32,768 tokens were
# 1.03 and 1.04 times as fast as with 8,192, and two lanes gain only with the largest: the host needs 130 to 250 ms to
# launch any chunk in two lanes (docs/bench/2026-11-28-h200x2-lanes-experts.json).
_CHUNK = 32768
_CHUNK_MEMORY = 0.25  # largest share, for the experts of a chunk, of the memory that weights leave


def resolve_division(
    config: Config, target: Checkpoint, device: torch.device, dtype: torch.dtype, notes: list[str]
) -> Division:
    """Decide the division of the target. Raise ConfigError if the options want a division that is not possible."""
    section = config.engine
    wants_experts, wants_requests = section.expert_parallel, section.dp_attention
    if wants_experts == "off" and wants_requests == "on":
        raise ConfigError(
            f"engine.dp_attention: on needs {_OPTION}: on, because only experts are divided then",
            hint="leave one of them out",
        )
    if (reason := _reason_against(config, target)) is not None:
        for name, wanted in ((_OPTION, wants_experts), ("engine.dp_attention", wants_requests)):
            if wanted == "on":
                raise ConfigError(f"{name}: on is not possible: {reason}", hint=f"leave {name} out")
        return "tensors"
    if wants_experts == "off":
        return "tensors"
    if wants_requests == "on":
        return "requests"
    if wants_requests == "off":
        return "experts" if wants_experts == "on" else "tensors"
    if device.type != "cuda":
        return "experts" if wants_experts == "on" else "tensors"
    rows = section.max_batch_size or DEFAULT_BATCH["cuda"]
    least = _least_rows(target, section.tensor_parallel, dtype)
    found: Division = "requests" if rows >= least else "experts" if wants_experts == "on" else "tensors"
    what = {
        "requests": "each rank has requests of its own, and whole experts",
        "experts": "each rank has whole experts, and some of the heads",
        "tensors": "each rank has a part of each expert, and some of the heads",
    }
    notes.append(
        f"{_OPTION}: {what[found]} ({rows} rows of a rank; from about {least} on, tokens take less time to travel to "
        "whole experts than sums do)"
    )
    return found


def engine_of_requests(config: Config, engine: EngineSettings) -> EngineSettings:
    """Return the settings for ranks with requests of their own, whose prompts are no graphs. Raise ConfigError for
    graphs of prompts: chunks have any sizes, and all ranks would have to capture and replay the same graph."""
    if config.prefill.graphs not in ("auto", "off"):
        raise ConfigError(
            f"prefill.graphs: {config.prefill.graphs} does not run with engine.dp_attention: ranks compute prompts of "
            "other sizes at the same time",
            hint="leave prefill.graphs out, or set engine.dp_attention: off",
        )
    return replace(engine, prompt_graphs="off")


def chunk_of_requests(engine: EngineSettings, config: ModelConfig, num_ranks: int, itemsize: int, left: int) -> int:
    """Return the tokens of a prompt chunk for ranks with requests of their own: on CUDA more than usual, if the user
    has not set them. `left`: the bytes that weights leave. If the tokens of all ranks and their experts' outputs would
    take more than _CHUNK_MEMORY of them, the chunk is halved, because ranks cannot try again after one of them is out
    of memory."""
    usual, moe = engine.prefill_chunk_tokens, config.moe
    if "prefill_chunk_tokens" not in engine.left_open or engine.attention == "torch" or moe is None:
        return usual
    features = 2 * config.hidden_size + moe.top_k * (config.hidden_size + moe.expert_size)
    chunk = _CHUNK
    while chunk > usual and chunk * num_ranks * features * itemsize > _CHUNK_MEMORY * left:
        chunk //= 2
    return chunk


def _reason_against(config: Config, target: Checkpoint) -> str | None:
    """Return the reason why experts cannot be divided as a whole, or None."""
    moe, num_ranks = target.config.moe, config.engine.tensor_parallel
    if num_ranks == 1:
        return "there is one rank (engine.tensor_parallel: 1)"
    if moe is None:
        return f"model.target ({target.config.model_type}) has no experts"
    if moe.num_experts < num_ranks:
        return f"a layer has {moe.num_experts} experts, and there are {num_ranks} ranks"
    return None


def _least_rows(target: Checkpoint, num_ranks: int, dtype: torch.dtype) -> int:
    """Return from which number of rows of a rank on sums over ranks take more time than reading more weights does.

    A rank with requests of its own reads (N - 1) / N of the dense weights more. It saves one of two sums in a layer,
    and half of the bytes of the rest."""
    config = target.config
    weights = PassWeights.of_model(config)
    more_seconds = weights.dense * dtype.itemsize * (1 - 1 / num_ranks) / _MEMORY
    saved_of_row = config.num_layers * num_ranks * config.hidden_size * dtype.itemsize / _LINK
    left = more_seconds - config.num_layers * _SUM_SECONDS
    return max(1, round(left / saved_of_row))
