"""Decides how the target's weights are held: quantised or not, whole or divided among ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import torch

from specbatch.config import Config
from specbatch.engine.prefill.models import PromptGraphMode
from specbatch.errors import ConfigError
from specbatch.kernels.mxfp4 import MXFP4_BYTES
from specbatch.kernels.quantised import GROUP
from specbatch.models.config import ModelConfig, expected_tensors
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.formats.gguf import GgufSource
from specbatch.models.formats.gpt_oss_experts import GptOssExperts
from specbatch.models.formats.tensor_files import PackedReader
from specbatch.models.layer_names import chosen_layers
from specbatch.models.linears.integer_quantization import IntegerQuantization
from specbatch.models.linears.layer_quantization import LayerQuantization
from specbatch.models.linears.quantization import Quantization, QuantizationOption, chosen
from specbatch.models.linears.sharded import check_group_borders, local_config
from specbatch.models.random_weights import RandomSource
from specbatch.parallel.shares import Division
from specbatch.setup.device import DTYPE_NAMES
from specbatch.setup.engine import EngineSettings
from specbatch.setup.memory import GIB, available_memory

_TESTED = (1, 2, 4)  # numbers of GPUs with which all tests have run
_FP8_CAPABILITY = (8, 9)  # Ada, Hopper
# The largest share of a GPU's free memory that the dequantised weights of a checkpoint in whole numbers may take. From
# 64 rows on they are faster than packed ones, and less memory is left for the KV cache.
_DEQUANTISED_SHARE = 0.5


def resolve_quantization(
    config: Config,
    target: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    notes: list[str],
    division: Division = "tensors",
    available: int | None = None,
) -> LayerQuantization | None:
    """Decide the quantization of the target's layers. `division`: its division among ranks. `available`: the bytes of
    free memory of the device; None: they are asked for."""
    option, is_gguf = config.model.quantization, isinstance(target.tensors, GgufSource)
    is_integer = isinstance(target.quantization, IntegerQuantization)
    is_other = is_integer if option == "fp8" else not is_integer and (is_gguf or target.quantization is not None)
    if is_other or (is_gguf and option == "fp8"):
        _check_unquantised(option, "GGUF files, whose weights are" if is_gguf else "a checkpoint whose weights are")
    found = chosen(option, target.quantization)
    if found is None:
        return None
    if isinstance(found, IntegerQuantization):
        found = _resolve_integers(found, config, target, device, dtype, available)
        if is_gguf and not found.is_kept:
            return None  # the reader of the file dequantises
    elif found.is_kept:
        what = "model.quantization: fp8" if target.quantization is None else "a checkpoint in FP8"
        if device.type == "cuda":
            _check_cuda(what, device)
    matrices = [name for name, shape in expected_tensors(target.config).items() if len(shape) == 2]
    linear = [name.removesuffix(".weight") for name in matrices if ".embed_" not in name]
    covered = [name for name in linear if found.covers(name)]
    if isinstance(found, Quantization) and found.is_kept and "block" in (found.weights, found.inputs):
        _check_groups(covered, target.config, config.engine.tensor_parallel, division=division)
    which = f"{len(covered)} of {len(linear)} linear layers: {chosen_layers(covered, linear)}"
    note = f"model.quantization: {found.describe()}; {which}"
    saved = saved_bytes(found, target.config, device, dtype)
    notes.append(f"{note}; {saved / GIB:.1f} GiB less than {DTYPE_NAMES[dtype]}" if saved else note)
    if found.is_kept and any(".experts." in name for name in covered):
        notes.append(_note_on_experts(found, device, dtype))
    return found


def _check_unquantised(option: QuantizationOption, what: str) -> None:
    """Raise ConfigError if an option would quantise weights again."""
    if option in ("fp8", "int4"):
        raise ConfigError(
            f"model.quantization: {option} is not for {what} quantised already",
            hint="leave model.quantization out, or use the unquantised checkpoint",
        )


def _resolve_integers(
    found: IntegerQuantization,
    config: Config,
    target: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    available: int | None,
) -> IntegerQuantization:
    """Decide whether weights in whole numbers stay so in memory: on CUDA, in 16 bits, where they are asked for or the
    dequantised ones would take too much. In a deterministic run they do not, because the order in which tensor cores
    add unpacked numbers depends on the tile."""
    if device.type != "cuda" or dtype.itemsize != 2 or config.engine.deterministic:
        return found.dequantised()
    num_ranks = config.engine.tensor_parallel
    if config.model.quantization != "int4":
        whole = sum(map(math.prod, expected_tensors(target.config).values())) * dtype.itemsize // num_ranks
        if whole <= _DEQUANTISED_SHARE * (available_memory(device) if available is None else available):
            return found.dequantised()
    if not found.is_kept or num_ranks == 1:
        return found
    if found.is_ordered:
        raise ConfigError(
            f"engine.tensor_parallel: {num_ranks} divides inputs that {found.method} has in another order (act-order)",
            hint="use one rank, or set model.quantization: none",
        )
    layers = (name.removesuffix(".weight") for name in expected_tensors(target.config))
    groups = {layer: found.form(layer).group for layer in filter(found.keeps, layers)}
    for group in filter(None, set(groups.values())):
        _check_groups([layer for layer in groups if groups[layer] == group], target.config, num_ranks, group)
    return found


def _note_on_experts(quantization: LayerQuantization, device: torch.device, dtype: torch.dtype) -> str:
    """Say what differs from other layers."""
    if not isinstance(quantization, Quantization):
        return f"model.quantization: experts are dequantised to {DTYPE_NAMES[dtype]} while loading"
    inputs = f"inputs of experts stay in {DTYPE_NAMES[dtype]}"
    if quantization.inputs == "static":
        inputs += ", and the checkpoint's scales of them are not used"
    if device.type != "cuda":
        inputs += f"; the experts are dequantised to {DTYPE_NAMES[dtype]} while loading"
    return f"model.quantization: {inputs}"


def for_rows(target: Checkpoint, max_model_len: int | None, notes: list[str]) -> Checkpoint:
    """Limit the rows to `max_model_len` tokens, and decide the frequencies of LongRoPE. All rows of a job have the same
    ones, because texts must not depend on the rows that run with them."""
    longest = target.config.max_position_embeddings
    if max_model_len is not None and max_model_len > longest:
        raise ConfigError(
            f"model.max_model_len: {max_model_len} is more than the {longest} tokens of {target.config.model_type}",
            hint="leave it out",
        )
    config = target.config.for_rows(max_model_len)
    ropes = [rope for rope in (config.rope, config.window_rope) if rope is not None and rope.scaling == "longrope"]
    for rope in ropes[:1]:
        short, kept = rope.original_max_position, config.max_position_embeddings
        which = "short" if kept <= short else "long"
        notes.append(
            f"model.max_model_len: rows of up to {kept} tokens, so LongRoPE has its frequencies for {which} rows"
            + (f"; set {short} if no row is longer: transformers computes such rows so" if which == "long" else "")
        )
    return replace(target, config=config)


def engine_of_hybrid(config: Config, engine: EngineSettings, target: Checkpoint) -> EngineSettings:
    """Return the settings for a target some of whose layers have states: prompts have no graphs of pieces, kernels are
    not compiled ahead, and there is one lane. Raise ConfigError for options that do not run with states."""
    section, on_cuda = config.engine, engine.attention != "torch"
    refused = {
        f"engine.tensor_parallel: {section.tensor_parallel}": section.tensor_parallel > 1,
        "engine.deterministic on CUDA": section.deterministic and on_cuda,
        "engine.compile: auto": section.compile == "auto",
        "engine.two_batch_overlap: on": section.two_batch_overlap == "on",
        f"model.quantization: {config.model.quantization}": config.model.quantization == "int4",
        f"prefill.graphs: {config.prefill.graphs}": config.prefill.graphs in ("piecewise", "both"),
    }
    for option, is_refused in refused.items():
        if is_refused:
            raise ConfigError(
                f"{option} does not run with a hybrid ({target.config.model_type}), whose layers have states",
                hint="leave it out",
            )
    prompt_graphs: PromptGraphMode = "whole" if engine.prompt_graphs in ("whole", "both") else "off"
    return replace(engine, prompt_graphs=prompt_graphs, compiles_ahead=False, lane_mode="off")


def check_chains(target: Checkpoint, topk: int) -> None:
    """Raise ConfigError for draft trees of a hybrid: the state of a layer moves along one chain of tokens."""
    if target.config.delta is not None and topk > 1:
        raise ConfigError(
            f"speculation.topk: {topk} drafts trees, and the states of a hybrid ({target.config.model_type}) move "
            "along chains",
            hint="set speculation.topk: 1; with a larger num_steps, a node of a chain costs as little as one of a tree",
        )


def check_draft_is_no_hybrid(draft: Checkpoint) -> None:
    """Raise ConfigError for a hybrid as a draft model: its state would have to go back after each round."""
    if draft.config.delta is not None:
        raise ConfigError(
            f"speculation.draft is a hybrid ({draft.config.model_type}), which does not run as a draft model",
            hint="use speculation.method: mtp or ngram, or a draft model whose layers all have attention",
        )


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
    is_target = name == "model.target"
    if config.engine.deterministic and device.type == "cuda":
        _check_deterministic(what, model, config)
    found = chosen(config.model.quantization, model.quantization)
    if not is_target or not isinstance(found, Quantization) or not found.is_kept:
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
    if isinstance(found, Quantization) and found.is_kept:
        raise ConfigError(f"{deterministic} only in their own precision, not in FP8", "set model.quantization: none")


def quantization_name(
    config: Config, target: LayerQuantization | None, draft: LayerQuantization | None, *, keeps_mxfp4: bool
) -> QuantizationOption:
    """The value of `model.quantization` that gives this target and this draft model. Where the draft model alone is in
    FP8, where experts stay in MXFP4 and where weights are whole numbers, only `auto` does."""
    if config.model.quantization != "auto" or keeps_mxfp4 or isinstance(target, IntegerQuantization):
        return config.model.quantization
    if target is not None:
        return "fp8"
    return "none" if draft is None or not draft.is_kept else "auto"


def saved_bytes(
    quantization: LayerQuantization | None, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> int:
    """Return how many bytes the weights save by the quantization, compared with `dtype`. It is 0 on a CPU, which
    emulates FP8."""
    if quantization is None or not quantization.is_kept or device.type != "cuda":
        return 0
    return quantization.saved_bytes(expected_tensors(config), dtype.itemsize)


def saved_of_experts(
    quantization: LayerQuantization | None, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> float:
    """Return how many bytes an element of an expert saves by the quantization on average, as `saved_bytes` does."""
    experts = {name: shape for name, shape in expected_tensors(config).items() if _is_of_expert(name, shape)}
    if not experts or quantization is None or not quantization.is_kept or device.type != "cuda":
        return 0.0
    return quantization.saved_bytes(experts, dtype.itemsize) / sum(map(math.prod, experts.values()))


def _is_of_expert(name: str, shape: tuple[int, ...]) -> bool:
    return ".experts." in name and len(shape) == 2


def _check_groups(
    layers: Sequence[str], config: ModelConfig, num_ranks: int, group: int = GROUP, division: Division = "tensors"
) -> None:
    try:
        check_group_borders(layers, config, num_ranks, group, division)
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


def quantization_of_draft(draft: object, config: Config, device: torch.device) -> LayerQuantization | None:
    """Decide the quantization of a draft model: that of its checkpoint, or none if it is dequantised, which is always
    so on CUDA."""
    if not isinstance(draft, Checkpoint):
        return None
    is_integer = isinstance(draft.quantization, IntegerQuantization)
    is_dequantised = config.model.quantization == "none" or device.type == "cuda" or is_integer
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
            notes.append(f"engine.tensor_parallel: not all tests have run with {num_ranks} GPUs: check some rows")
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
