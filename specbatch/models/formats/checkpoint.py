"""A model's checkpoint: its configuration and its tensors. Both are checked before any weight is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specbatch.cache.pages import KVScales
from specbatch.errors import ModelError
from specbatch.models.checks import first_names, shown, tensor_problems
from specbatch.models.config import BackendName, ModelConfig, expected_tensors
from specbatch.models.families.hf_config import eos_token_ids
from specbatch.models.families.registry import FAMILIES, check_family_keys, parse_hf_config
from specbatch.models.families.vision import VISION_MODELS, text_part
from specbatch.models.formats.adapter import merged_with_adapter
from specbatch.models.formats.arranged import ArrangedSource, arranged
from specbatch.models.formats.files import is_there, read_json
from specbatch.models.formats.gguf import GgufFile, GgufSource, gguf_description
from specbatch.models.formats.gguf_config import gguf_model_config
from specbatch.models.formats.gpt_oss_experts import GptOssExperts
from specbatch.models.formats.kv_scales import has_fp8_cache, is_kv_scale, read_kv_scales
from specbatch.models.formats.stacked_experts import StackedSource, unstacked
from specbatch.models.formats.tensor_files import (
    SafetensorsSource,
    TensorSource,
    TorchBinSource,
    is_stored_mask,
    is_stored_rotary,
    open_tensors,
)
from specbatch.models.linears.integer_quantization import WHOLE_NUMBERS, UniformIntegers
from specbatch.models.linears.layer_quantization import LayerQuantization
from specbatch.models.linears.quantization import Quantization, parse_quantization, same_scale


@dataclass
class Checkpoint:
    """A validated model: `tensors` holds every tensor of `expected_tensors(config)` in the expected shape."""

    path: Path | None  # None: random weights, which have no files
    config: ModelConfig
    tensors: TensorSource
    description: (
        str  # text in logs and results, such as "safetensors bfloat16", "Q4_K_M dequantised" or "random weights"
    )
    quantization: LayerQuantization | None = None  # quantization of the linear layers in the files
    kv_scales: tuple[KVScales, ...] = ()  # scales of each layer for a cache in FP8; empty: all are 1
    generation_config: Mapping[str, Any] = field(default_factory=dict)  # content of the file; empty: there is none
    ignored: tuple[str, ...] = ()  # keys of its configuration that are neither applied nor known to change nothing
    text_of: str | None = None  # `model_type` of a model of which this is the text part


def open_checkpoint(path: Path, backend: BackendName = "auto") -> Checkpoint:
    """Open and validate a model: a Hugging Face directory or a `.gguf` file. `backend`: as `model.backend`.

    Raises ModelError where a file is missing or damaged, the architecture is unsupported, or a tensor is missing, has
    the wrong shape or is unknown. Weight data is not read, except where a config says that the embeddings are tied and
    the checkpoint nevertheless has an `lm_head.weight`: the two are compared, to do as transformers does.
    """
    if not path.is_dir():
        if not is_there(path):
            raise ModelError(f"{path} does not exist")
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is neither a directory nor a .gguf file")
        if backend == "transformers":
            raise ModelError(f"{path}: GGUF files do not run with model.backend: transformers", hint="leave it out")
        file = GgufFile(path)
        config = gguf_model_config(file)
        gguf = GgufSource(file, config)
        _check_tensors(path, config, gguf)
        ignored = tuple(key for key in file.metadata if key.startswith("general.sampling."))
        return Checkpoint(path, config, gguf, gguf_description(file), gguf.integer_quantization(), ignored=ignored)
    check_no_adapter(path)
    config_file = path / "config.json"
    if not is_there(config_file):
        raise ModelError(
            f"{path} has no config.json", hint="a model directory holds config.json, weights and tokenizer.json"
        )
    raw = read_json(config_file)
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if is_there(generation_file) else {}
    if backend == "transformers":
        return _open_with_transformers(path, raw, generation)
    whole, text = raw.get("model_type"), text_part(raw)
    is_known = isinstance(whole, str) and (whole in FAMILIES or text is not None)
    if not is_known and not _is_draft_head(raw):
        return _open_unknown(path, raw, generation, backend)
    _check_architecture(path, raw)
    try:
        config = parse_hf_config(raw if text is None else text, generation)
        ignored = check_family_keys(raw if text is None else text)
    except ModelError as error:
        if backend == "auto" and _runs_with_transformers(path, raw, generation):
            raise ModelError(error.message, hint="set model.backend: transformers, whose code runs it") from error
        raise
    raw = raw if text is None else text
    modelopt_file = path / "hf_quant_config.json"
    modelopt = read_json(modelopt_file) if is_there(modelopt_file) else None
    quantization = parse_quantization(raw, modelopt)
    files = open_tensors(path)
    try:
        is_interleaved = config.moe is not None and config.moe.is_interleaved
        tensors: TensorSource = GptOssExperts(files) if is_interleaved else _canonical(files, config, text is not None)
    except ModelError as error:
        files.close()
        raise ModelError(f"{path}: {error.message}") from error
    if config.tie_word_embeddings and _has_own_lm_head(tensors):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    if isinstance(quantization, UniformIntegers):
        quantization = quantization.of_files(tensors.shapes())
    if config.delta is not None and isinstance(quantization, Quantization):
        quantization = _of_scales(quantization, config, tensors)
    _check_tensors(path, config, tensors, quantization)
    kv_scales = read_kv_scales(tensors, config.num_layers) if has_fp8_cache(raw, modelopt) else ()
    text_of = None if text is None else str(whole)
    return Checkpoint(path, config, tensors, _describe(tensors), quantization, kv_scales, generation, ignored, text_of)


def _of_scales(quantization: Quantization, config: ModelConfig, tensors: TensorSource) -> Quantization:
    """Return the quantization of the layers that have scales. In a hybrid's config.json, layers that are not quantised
    have the names of the files, some of which join several layers."""
    found, names = tensors.shapes(), expected_tensors(config)
    layers = [name.removesuffix(".weight") for name, shape in names.items() if len(shape) == 2]
    without = tuple(layer for layer in layers if f"{layer}.{quantization.scale}" not in found)
    return dataclasses.replace(quantization, ignored=without)


def _canonical(files: SafetensorsSource | TorchBinSource, config: ModelConfig, is_text_part: bool) -> TensorSource:
    """Return the tensors under their canonical names. `is_text_part`: the files have other parts, too."""
    names = FAMILIES[config.model_type].names
    return arranged(unstacked(files, config), config, names, is_text_part=is_text_part)


def with_adapter(target: Checkpoint, path: Path) -> Checkpoint:
    """Return a model with the adapter of a folder, which is merged while the weights are loaded. It raises ModelError
    if they do not fit, and for models whose weights are quantised."""
    if isinstance(target.tensors, ArrangedSource) or not target.config.is_native:
        raise ModelError(
            f"model.adapter is not supported for {target.text_of or target.config.model_type}: "
            "its weights are renamed, divided or reordered while they are loaded",
            hint="merge it into its base model (merge_and_unload of peft) and use the merged model",
        )
    if target.path is None or target.quantization is not None or isinstance(target.tensors, GgufSource | GptOssExperts):
        raise ModelError(
            f"model.adapter cannot be merged into {target.description}",
            hint="use the model that is not quantised, as safetensors; model.quantization can quantise it after that",
        )
    matrices = [name for name, shape in expected_tensors(target.config).items() if len(shape) == 2]
    linear = {name.removesuffix(".weight") for name in matrices if ".embed_" not in name}
    tensors = merged_with_adapter(target.tensors, path, linear)
    return dataclasses.replace(target, tensors=tensors, description=f"{target.description} with a LoRA adapter")


def _open_unknown(path: Path, raw: dict[str, Any], generation: dict[str, Any], backend: BackendName) -> Checkpoint:
    """Open a model that no family reads, if transformers' code can compute it and `backend` lets it."""
    known = f"supported model types: {', '.join(FAMILIES)}"
    refusal = f"model_type {shown(raw.get('model_type'))} is not supported"
    try:
        found = _open_with_transformers(path, raw, generation)
    except ModelError as error:
        hint = "; ".join(filter(None, (error.hint, known)))
        raise ModelError(f"{refusal}: {error.message}", hint) from error
    if backend == "native":
        raise ModelError(f"{refusal} by model.backend: native", hint=f"set model.backend: transformers; {known}")
    return found


def _runs_with_transformers(path: Path, raw: dict[str, Any], generation: dict[str, Any]) -> bool:
    try:
        _open_with_transformers(path, raw, generation)
    except ModelError:
        return False
    return True


def _open_with_transformers(path: Path, raw: dict[str, Any], generation: dict[str, Any]) -> Checkpoint:
    from specbatch.models.fallback import source as fallback  # its imports take a second

    _check_names(path, raw)
    source = fallback.open_source(path, raw)
    config = fallback.model_config(source, eos_token_ids(raw, generation))
    return Checkpoint(path, config, source, fallback.DESCRIPTION, generation_config=generation)


def check_no_adapter(path: Path) -> None:
    """Raises ModelError for a folder with an adapter (LoRA and others). Its base model alone gives other texts."""
    names = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
    found = [name for name in names if is_there(path / name)]
    if found:
        raise ModelError(
            f"{path} has an adapter ({', '.join(found)})",
            hint="set model.target to its base model and model.adapter to this folder; "
            "if the weights here are merged already, remove these files",
        )


def _is_draft_head(raw: dict[str, Any]) -> bool:
    names = raw.get("architectures")
    return isinstance(names, list) and any("eagle" in str(name).lower() for name in names)


def _check_names(path: Path, raw: dict[str, Any]) -> list[str]:
    """Return the names of `architectures`."""
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{path}: architectures must be a list of names, not {shown(names)}")
    return names


def _check_architecture(path: Path, raw: dict[str, Any]) -> None:
    names = _check_names(path, raw)
    known = [name for family in FAMILIES.values() for name in family.architectures]
    known += [model.architecture for model in VISION_MODELS.values()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ModelError(
            f"{path}: architecture {shown(unknown[0])} is not supported",
            hint="this is a draft head: set it as speculation.draft, with speculation.method eagle or eagle3"
            if _is_draft_head(raw)
            else f"supported architectures: {', '.join(dict.fromkeys(known))}",
        )


def _has_own_lm_head(tensors: TensorSource) -> bool:
    """True where a checkpoint that calls itself tied has an output head that differs from its embedding.

    transformers (5.x) then uses the head and warns; earlier versions ignored it.
    """
    shapes = tensors.shapes()
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if head not in shapes or embedding not in shapes:
        return False
    first, second = tensors.load(embedding), tensors.load(head)
    if first.data_ptr() == second.data_ptr():  # .bin files keep both names of one storage
        return False
    return first.dtype != second.dtype or not torch.equal(first, second)


def _check_tensors(
    path: Path, config: ModelConfig, tensors: TensorSource, quantization: LayerQuantization | None = None
) -> None:
    needed = {name: shape for name, shape in tensors.shapes().items() if not _is_harmless(name, config)}
    expected = expected_tensors(config)
    if quantization is not None:
        if isinstance(quantization, UniformIntegers):
            for name in _biases_of_zeros(tensors, quantization, expected):
                del needed[name]
        expected = quantization.stored(expected, needed)
        for name in (name for name in needed if name.endswith("_scale") and name in expected):
            if same_scale(needed[name], expected[name]):
                needed[name] = expected[name]
    problems = tensor_problems(expected, needed) or _wrong_types(tensors, quantization)
    if not problems and isinstance(quantization, Quantization):
        problems = _wrong_scales(tensors, quantization)
    if problems:
        tensors.close()
        hint = "the files may come from different models, or the model uses features that are not supported"
        if config.delta is not None and isinstance(quantization, UniformIntegers):
            hint = "of a hybrid, only MLPs may be whole numbers: use the unquantised checkpoint, or one in FP8"
        raise ModelError(
            f"{path} does not match its configuration ({config.model_type}, {config.num_layers} layers): {problems}",
            hint=hint,
        )


def _biases_of_zeros(
    tensors: TensorSource, quantization: UniformIntegers, expected: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return the biases that quantised layers of a model without biases have. Some writers give each layer one."""
    layers = {name: name.removesuffix(".bias") for name in tensors.shapes() if name.endswith(".bias")}
    extra = [name for name, layer in layers.items() if name not in expected and quantization.covers(layer)]
    return [name for name in extra if not bool(tensors.load(name).any())]


def _wrong_types(tensors: TensorSource, quantization: LayerQuantization | None) -> str:
    """Tensors that are in FP8 without a scale, or have a scale and are not in E4M3, or are whole numbers of another
    type than the quantization has; empty where there are none."""
    known = SafetensorsSource | TorchBinSource | StackedSource | ArrangedSource | GptOssExperts | GgufSource
    assert isinstance(tensors, known), type(tensors)
    wrong = []
    for name, dtype in getattr(tensors, "dtypes", {}).items():
        layer, _, kind = name.rpartition(".")
        if kind in WHOLE_NUMBERS and isinstance(quantization, UniformIntegers):
            if dtype != WHOLE_NUMBERS[kind]:
                wrong.append(f"{name} is {dtype}, not {WHOLE_NUMBERS[kind]}")
            continue
        is_covered = kind == "weight" and isinstance(quantization, Quantization) and quantization.covers(layer)
        if dtype != "float8_e4m3fn" if is_covered else dtype.startswith("float8"):
            wrong.append(f"{name} is {dtype}{' and has no scale' if not is_covered else ''}")
    return f"{len(wrong)} tensors have the wrong type: {first_names(wrong)}" if wrong else ""


def _wrong_scales(tensors: TensorSource, quantization: Quantization) -> str:
    """Scales of inputs that are not above 0, and those of weights that are negative or all 0: texts would be wrong
    without an error; empty where there are none. A weight's scales may have a 0, of an output that is always 0."""
    wrong = []
    for name in tensors.shapes():
        layer, _, kind = name.rpartition(".")
        if kind not in (quantization.scale, "input_scale") or not quantization.covers(layer):
            continue
        smallest, largest = map(float, tensors.load(name).float().aminmax())  # NaN if a value is
        above_0 = smallest if kind == "input_scale" else largest
        if not (smallest >= 0 and above_0 > 0 and largest < math.inf):
            wrong.append(f"{name} has {smallest:g} to {largest:g}")
    return f"{len(wrong)} tensors are no scales: {first_names(wrong)}" if wrong else ""


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Tensors that a model does not need: rotary frequencies and causal masks that old checkpoints store (they are
    computed), the head of a tied model (known by now to equal the embedding), scales of the KV cache, and layers that
    predict further tokens."""
    first, last = config.num_layers, config.num_layers + config.num_mtp_layers
    return (
        is_stored_rotary(name)
        or is_stored_mask(name)
        or is_kv_scale(name)
        or (name == "lm_head.weight" and config.tie_word_embeddings)
        or name.startswith(tuple(f"model.layers.{layer}." for layer in range(first, last)))
        or (config.num_mtp_layers > 0 and name.startswith("mtp."))
    )


def _describe(tensors: TensorSource) -> str:
    known = SafetensorsSource | TorchBinSource | StackedSource | ArrangedSource | GptOssExperts
    assert isinstance(tensors, known), type(tensors)
    return f"{tensors.kind} " + "/".join(sorted(set(tensors.dtypes.values())))
