"""Decides how the target's weights are held: quantised or not, whole or divided among ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Literal

import torch

from specbatch.config import Config
from specbatch.errors import ConfigError
from specbatch.kernels.mxfp4 import MXFP4_BYTES
from specbatch.models.config import ModelConfig, expected_tensors
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.formats.eagle_files import EagleCheckpoint
from specbatch.models.formats.gguf import GgufSource
from specbatch.models.formats.gpt_oss_experts import GptOssExperts
from specbatch.models.formats.tensor_files import PackedReader
from specbatch.models.layer_names import chosen_layers
from specbatch.models.linears.quantization import Quantization, chosen
from specbatch.models.linears.sharded import check_group_borders, local_config
from specbatch.models.random_weights import RandomSource
from specbatch.parallel.shares import Division
from specbatch.setup.device import DTYPE_NAMES
from specbatch.setup.memory import GIB

_TESTED = (1, 2)  # numbers of GPUs that have run as one
_FP8_CAPABILITY = (8, 9)  # Ada, Hopper


def resolve_quantization(
    config: Config,
    target: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    notes: list[str],
    division: Division = "tensors",
) -> Quantization | None:
    """Decide the quantization of the target's layers. `division`: its division among ranks."""
    option, is_gguf = config.model.quantization, isinstance(target.tensors, GgufSource)
    if option == "fp8" and is_gguf:
        raise ConfigError(
            "model.quantization: fp8 is not for GGUF files, whose weights are quantised already",
            hint="leave model.quantization out, or use the unquantised checkpoint",
        )
    found = chosen(option, target.quantization)
    if found is None:
        return None
    if found.inputs != "none":
        what = "model.quantization: fp8" if target.quantization is None else "a checkpoint in FP8"
        if device.type == "cuda":
            _check_cuda(what, device)
    matrices = [name for name, shape in expected_tensors(target.config).items() if len(shape) == 2]
    linear = [name.removesuffix(".weight") for name in matrices if "embed_tokens" not in name]
    covered = [name for name in linear if found.covers(name)]
    if found.inputs != "none" and "block" in (found.weights, found.inputs):
        _check_groups(covered, target.config, config.engine.tensor_parallel, division)
    which = f"{len(covered)} of {len(linear)} linear layers: {chosen_layers(covered, linear)}"
    note = f"model.quantization: {found.describe()}; {which}"
    saved = saved_bytes(found, target.config, device, dtype)
    notes.append(f"{note}; {saved / GIB:.1f} GiB less than {DTYPE_NAMES[dtype]}" if saved else note)
    if found.inputs != "none" and any(".experts." in name for name in covered):
        notes.append(_note_on_experts(found, device, dtype))
    return found


def _note_on_experts(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> str:
    """Say what differs from other layers in FP8."""
    inputs = f"inputs of experts stay in {DTYPE_NAMES[dtype]}"
    if quantization.inputs == "static":
        inputs += ", and the checkpoint's scales of them are not used"
    if device.type != "cuda":
        inputs += f"; the experts are dequantised to {DTYPE_NAMES[dtype]} while loading"
    return f"model.quantization: {inputs}"


def check_norms(name: str, model: Checkpoint, config: Config, division: Division = "tensors") -> None:
    """Raise ConfigError if norms are over all heads, and each rank has some of the heads. `name`: the option of the
    model. `division`: its division among ranks."""
    if model.config.qk_norm_whole and config.engine.tensor_parallel > 1 and division != "requests":
        raise ConfigError(
            f"{name} ({model.config.model_type}) has norms of queries and keys over all heads, and a rank of "
            "engine.tensor_parallel has only some of these",
            hint="leave engine.tensor_parallel out",
        )


def resolve_mxfp4(
    config: Config,
    target: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    notes: list[str],
    division: Division = "tensors",
) -> PackedReader | None:
    """Decide whether experts in MXFP4 stay so in memory, and return their reader. Otherwise they are dequantised while
    they are loaded. They are in a deterministic run: the order in which tensor cores add unpacked numbers depends on
    the tile (docs/log, 2026-11-27)."""
    tensors = target.tensors
    if not isinstance(tensors, GptOssExperts | RandomSource) or not tensors.is_packed:
        return None
    engine = config.engine
    is_whole = engine.tensor_parallel == 1 or division != "tensors"  # each expert is on one rank
    keeps = device.type == "cuda" and is_whole and not engine.deterministic
    keeps = keeps and config.model.quantization != "none"
    saved = saved_by_mxfp4(target.config, dtype) / GIB
    name = DTYPE_NAMES[dtype]
    what = f"stay so: {saved:.1f} GiB less than {name}" if keeps else f"are dequantised to {name} while loading"
    if keeps or isinstance(tensors, GptOssExperts):  # random weights are made as they are asked for
        notes.append(f"model.target: its experts are in MXFP4, and {what}")
    return tensors if keeps else None


def saved_by_mxfp4(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return how many bytes experts save in MXFP4, compared with `dtype`."""
    moe = config.moe
    assert moe is not None
    num_values = 3 * sum(moe.layers) * moe.num_experts * moe.expert_size * config.hidden_size
    return int(num_values * (dtype.itemsize - MXFP4_BYTES))


def check_experts(
    name: str, model: Checkpoint, config: Config, device: torch.device, division: Division = "tensors"
) -> None:
    """Raise ConfigError for a mixture of experts in a run that cannot compute it. `name`: the option of the model.
    `division`: its division among ranks."""
    if model.config.moe is None:
        return
    what = f"{name} has experts ({model.config.model_type}), which run"
    if config.engine.deterministic and device.type == "cuda":
        _check_deterministic(what, model, config)
    found = chosen(config.model.quantization, model.quantization)
    if name != "model.target" or found is None or found.inputs == "none":
        return
    if config.engine.tensor_parallel > 1 and division == "tensors":
        raise ConfigError(
            f"{what} in FP8 only if each is on one rank",
            hint="set engine.expert_parallel: on, leave engine.tensor_parallel out, or set model.quantization: none",
        )
    if getattr(model.tensors, "is_packed", False):
        raise ConfigError(f"{what} in MXFP4 as they are, not in FP8", hint="leave model.quantization out")


def _check_deterministic(what: str, model: Checkpoint, config: Config) -> None:
    """Raise ConfigError for experts whose choice or sum is not known to have the same bits in each batch. Routers of
    other numbers of outputs than multiples of 8 failed that test on an H200."""
    moe, deterministic = model.config.moe, f"{what} with engine.deterministic on CUDA"
    assert moe is not None
    leave_out = "leave engine.deterministic out"
    if moe.wide_router:
        raise ConfigError(f"{deterministic} only if their router computes in model.dtype", leave_out)
    if moe.num_experts % 8 or (moe.shared_size and moe.shared_gate):
        why = "only with a multiple of 8 experts, and without a gate of shared experts"
        raise ConfigError(f"{deterministic} {why}", leave_out)
    found = chosen(config.model.quantization, model.quantization)
    if found is not None and found.inputs != "none":
        raise ConfigError(f"{deterministic} only in their own precision, not in FP8", "set model.quantization: none")


def quantization_name(
    config: Config, target: Quantization | None, draft: Quantization | None, *, keeps_mxfp4: bool
) -> Literal["auto", "none", "fp8"]:
    """The value of `model.quantization` that gives this target and this draft model. Where the draft model alone is in
    FP8, and where experts stay in MXFP4, only `auto` does."""
    if config.model.quantization != "auto" or keeps_mxfp4:
        return config.model.quantization
    if target is not None:
        return "fp8"
    return "none" if draft is None or draft.inputs == "none" else "auto"


def saved_bytes(
    quantization: Quantization | None, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> int:
    """Return how many bytes the weights save by the quantization, compared with `dtype`. It is 0 on a CPU, which
    emulates FP8."""
    if quantization is None or quantization.inputs == "none" or device.type != "cuda":
        return 0
    return quantization.saved_bytes(expected_tensors(config), dtype.itemsize)


def saved_of_experts(
    quantization: Quantization | None, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> float:
    """Return how many bytes an element of an expert saves by the quantization on average, as `saved_bytes` does."""
    experts = {name: shape for name, shape in expected_tensors(config).items() if _is_of_expert(name, shape)}
    if not experts or quantization is None or quantization.inputs == "none" or device.type != "cuda":
        return 0.0
    return quantization.saved_bytes(experts, dtype.itemsize) / sum(map(math.prod, experts.values()))


def _is_of_expert(name: str, shape: tuple[int, ...]) -> bool:
    return ".experts." in name and len(shape) == 2


def _check_groups(layers: Sequence[str], config: ModelConfig, num_ranks: int, division: Division) -> None:
    try:
        check_group_borders(layers, config, num_ranks, division)
    except ValueError as error:
        raise ConfigError(
            f"engine.tensor_parallel: {num_ranks} divides a group of inputs that has one scale ({error})",
            hint="use fewer ranks, or set model.quantization: none",
        ) from error


def _check_cuda(what: str, device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        raise ConfigError(
            f"{what} needs a GPU of compute capability 8.9 (Ada, Hopper) or later, and {device} has "
            f"{capability[0]}.{capability[1]}",
            hint="set model.quantization: none",
        )


def quantization_of_draft(
    draft: Checkpoint | EagleCheckpoint | None, config: Config, device: torch.device
) -> Quantization | None:
    """Decide the quantization of a draft model: that of its checkpoint, or none if it is dequantised, which is always
    so on CUDA."""
    if not isinstance(draft, Checkpoint):
        return None
    is_dequantised = config.model.quantization == "none" or device.type == "cuda"
    return chosen("none" if is_dequantised else "auto", draft.quantization)


def part_of_a_rank(
    config: ModelConfig, num_ranks: int, device: torch.device, notes: list[str], division: Division = "tensors"
) -> ModelConfig:
    """Return the sizes of the part of the target that the first rank holds, which is the largest. Facts that users
    should know are added to `notes`."""
    if num_ranks == 1:
        return config
    if device.type == "cuda":
        _check_cards(num_ranks, device)
        if num_ranks not in _TESTED:
            notes.append(f"engine.tensor_parallel: {num_ranks} GPUs have not been tested, 2 have: check some rows")
    try:
        part = local_config(config, 0, num_ranks, division)
    except ValueError as error:
        raise ConfigError(
            f"engine.tensor_parallel: {num_ranks} is too many for this model ({error})",
            hint=f"use at most {config.num_heads}, and a number that divides the model's heads",
        ) from error
    return part if division == "requests" else replace(part, vocab_size=-(-config.vocab_size // num_ranks))


def _check_cards(num_ranks: int, device: torch.device) -> None:
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
