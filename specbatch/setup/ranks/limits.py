"""The check that the target can be divided among ranks (`engine.tensor_parallel`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import torch

from specbatch.errors import ConfigError
from specbatch.models.config import ModelConfig
from specbatch.models.linears.sharded import local_config

_TESTED = (1, 2)  # numbers of GPUs that have run as one


def part_of_a_rank(config: ModelConfig, num_ranks: int, device: torch.device, notes: list[str]) -> ModelConfig:
    """Return the sizes of the part of the target that the first rank holds, which is the largest. Facts that users
    should know are added to `notes`."""
    if num_ranks == 1:
        return config
    if device.type == "cuda":
        _check_cuda(num_ranks, device)
        if num_ranks not in _TESTED:
            notes.append(f"engine.tensor_parallel: {num_ranks} GPUs have not been tested, 2 have: check some rows")
    try:
        part = local_config(config, 0, num_ranks)
    except ValueError as error:
        raise ConfigError(
            f"engine.tensor_parallel: {num_ranks} is too many for this model ({error})",
            hint=f"use at most {config.num_heads}, and a number that divides the model's heads",
        ) from error
    return replace(part, vocab_size=-(-config.vocab_size // num_ranks))


def _check_cuda(num_ranks: int, device: torch.device) -> None:
    option = f"engine.tensor_parallel: {num_ranks}"
    if device.index is not None:
        raise ConfigError(
            f"{option} runs on the first {num_ranks} GPUs, and engine.device is {device}",
            hint="set engine.device: cuda; CUDA_VISIBLE_DEVICES says which GPUs are the first",
        )
    if (count := torch.cuda.device_count()) < num_ranks:
        raise ConfigError(
            f"{option} needs {num_ranks} GPUs, and {count} can be used here",
            hint="use fewer, or look at CUDA_VISIBLE_DEVICES",
        )
    for one, other in permutations(range(num_ranks), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            raise ConfigError(
                f"{option} needs GPUs that read each other's memory, and GPU {one} cannot read that of GPU {other}",
                hint="use GPUs that NVLink connects; --workers N runs N engines on N GPUs",
            )
