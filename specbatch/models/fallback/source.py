"""A checkpoint that transformers reads: its configuration, its traits, and later its weights.

Only the configuration is read when it is opened. A model without weights is made of it and probed (`probe.py`), and
everything that a paged cache cannot do is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specbatch.errors import ModelError
from specbatch.models.checks import first_names, shown, whole_number
from specbatch.models.config import ModelConfig
from specbatch.models.fallback.attention import PAGED
from specbatch.models.fallback.probe import Probed, Unsupported, probe
from specbatch.models.families.vision import VISION_MODELS
from specbatch.models.formats.tensor_files import TensorSource
from specbatch.models.rope import RopeConfig

HINT = "use a model of a family in docs/models.md, or another engine"
# Types of rotary embeddings whose angles follow from the position alone.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
_QUANTISED = ("quantization_config", "compression_config")


DESCRIPTION = f"transformers {transformers.__version__}"


class TransformersSource:
    """The weights of a model that transformers computes. `path`: its folder. `config`: its configuration, as
    transformers reads it."""

    def __init__(self, path: Path | None, config: Any) -> None:
        self.path, self.config = path, config
        self.skeleton = _new_skeleton(config)
        self.probed = _probed(self.skeleton, config)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.skeleton.named_parameters()}

    def load(self, name: str) -> Tensor:
        """Raise ModelError: transformers loads the weights itself, all at once (`model`)."""
        raise ModelError(
            f"{name} is a tensor of a model that transformers computes, and a draft head needs it",
            hint="set model.backend: native, or use speculation.method: ngram",
        )

    def close(self) -> None:
        """Nothing is open."""

    def model(self, dtype: torch.dtype, device: torch.device) -> Any:
        """Read the weights. Raise ModelError if a tensor is missing, unknown or of another shape."""
        had_bar = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(self.path),
                config=self.config,
                dtype=dtype,
                attn_implementation=PAGED,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        finally:
            if had_bar:
                transformers.utils.logging.enable_progress_bar()
        model, found = loaded
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if names := sorted(map(str, found.get(problem) or ())):
                what = problem.replace("_", " ")
                raise ModelError(
                    f"{self.path} does not match transformers' {type(model).__name__}: {what} {first_names(names)}",
                    hint="the files may come from different models",
                )
        return prepared(model.to(device))


class RandomTransformersSource(TransformersSource):
    """Random weights for a model that transformers computes: those of `tensors`, which has the same names."""

    def __init__(self, raw: Mapping[str, Any], tensors: TensorSource) -> None:
        """Open the model of a `config.json`, whose content is `raw`."""
        values = {key: value for key, value in raw.items() if key != "model_type"}
        super().__init__(None, AutoConfig.for_model(raw["model_type"], **values))
        self._tensors = tensors
        if unknown := [name for name in self.shapes() if name not in tensors.shapes()]:
            raise ModelError(
                f"random weights of {raw['model_type']} have no {unknown[0]}, which transformers' code has",
                hint="leave model.backend out",
            )

    def model(self, dtype: torch.dtype, device: torch.device) -> Any:
        self.config._attn_implementation = PAGED
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(self.config, dtype=dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self._tensors.load(name))
        return prepared(model)


def prepared(model: Any) -> Any:
    """Return the model for inference with a paged cache."""
    model.set_attn_implementation(PAGED)
    # For a warning about padding, some models read the tokens back from the device. Some configurations check types.
    object.__setattr__(model.config, "pad_token_id", None)
    if model.dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped GEMM of experts has no float64
    return model.eval().requires_grad_(False)


def open_source(path: Path, raw: Mapping[str, Any]) -> TransformersSource:
    """Open a folder with a `config.json`, whose content is `raw`. Raise ModelError for what cannot run."""
    source = TransformersSource(path, _read_config(path, raw))
    names, own = raw.get("architectures") or [], type(source.skeleton).__name__
    if own not in names and names:
        raise ModelError(
            f"{path}: architecture {shown(names)} is not {own}, which transformers makes of its config.json", hint=HINT
        )
    return source


def _read_config(path: Path, raw: Mapping[str, Any]) -> Any:
    """Read the `config.json` of a folder as transformers does. Custom code is never run."""
    name = raw.get("model_type")
    if raw.get("auto_map") and not (isinstance(name, str) and name in CONFIG_MAPPING):
        raise ModelError(
            f"{path}: transformers has no code for model_type {shown(name)}. Code comes with the model (auto_map of "
            "config.json), and specbatch never runs such code",
            hint="use a version of the model for classes of transformers itself, if there is one (names of some end in "
            "-hf), a newer transformers, or another engine",
        )
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"{path}: transformers cannot read config.json: {_brief(error)}", hint="a newer transformers may read it"
        ) from error


def model_config(source: TransformersSource, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """Return the sizes and traits of the model. Raise ModelError for what a paged cache cannot do."""
    config, calls = source.config, source.probed.calls
    first, num_layers = calls[0], len(calls)
    ties = source.skeleton.get_output_embeddings() is not None
    ties = ties and source.skeleton.get_output_embeddings().weight is source.skeleton.get_input_embeddings().weight
    return ModelConfig(
        model_type=config.model_type,
        vocab_size=source.probed.vocab_size,
        hidden_size=source.probed.hidden_size,
        intermediate_size=4 * source.probed.hidden_size,
        num_layers=num_layers,
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10_000.0),
        max_position_embeddings=_longest(config),
        tie_word_embeddings=ties,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=tuple(call.window for call in calls),
        eos_token_ids=eos_token_ids,
        attention_scale=first.scale,
        attention_soft_cap=first.soft_cap,
        attention_sinks=any(call.has_sinks for call in calls),
        tensors=tuple(_in_our_names(source).items()),
    ).checked("config.json")


def _in_our_names(source: TransformersSource) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, with the names that count them: as matrices of a layer, or as the embedding.
    All experts count as if each token read them."""
    shapes: dict[str, tuple[int, ...]] = {}
    embedding = source.skeleton.get_input_embeddings().weight
    for name, parameter in source.skeleton.named_parameters():
        ours = re.sub(r"^.*?\.(\d+)\.", r"model.layers.\1.", name, count=1).replace(".experts.", ".all_experts.")
        ours = "model.embed_tokens.weight" if parameter is embedding else ours
        shape = tuple(parameter.shape)
        shapes[ours] = shape if len(shape) < 3 else (math.prod(shape[:-1]), shape[-1])
    return shapes


def _new_skeleton(config: Any) -> Any:
    """Make the model without weights. Raise ModelError for models of another kind than decoders of text."""
    name = shown(config.model_type)
    quantised = [key for key in _QUANTISED if getattr(config, key, None) is not None]
    if quantised:
        raise _refused(name, f"it has {quantised[0]}, and only weights in model.dtype run so")
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(name, "it has an encoder")
    if (text := config.get_text_config()) is not config:
        raise ModelError(
            f"model_type {name} also reads images or sound, and cannot run with model.backend: transformers; its text "
            f"part is {shown(text.model_type)}",
            hint="leave model.backend out: specbatch's own code runs its text part"
            if config.model_type in VISION_MODELS
            else f"the text parts of these run: {', '.join(VISION_MODELS)}",
        )
    try:
        with torch.device("meta"):  # bfloat16, because some kernels of experts know no other type
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    except Exception as error:
        raise _refused(name, f"transformers has no decoder for it ({_brief(error)})") from error
    if not model._supports_attention_backend:
        raise _refused(name, "its code cannot call another attention function")
    return model.eval()


def _probed(model: Any, config: Any) -> Probed:
    name = shown(config.model_type)
    _check_cache(config, name)
    _check_rope(model, name)
    try:
        probed = probe(model)
    except Unsupported as error:
        raise _refused(name, str(error)) from error
    calls = probed.calls
    if len(calls) != config.num_hidden_layers:
        raise _refused(name, f"{len(calls)} of its {config.num_hidden_layers} layers call attention")
    for trait in ("num_heads", "num_kv_heads", "head_dim", "soft_cap"):
        values = [getattr(call, trait) for call in calls]
        if any(value != values[0] for value in values):
            distinct = ", ".join(map(str, dict.fromkeys(values)))
            raise _refused(name, f"its layers have different {trait} ({distinct}), and all layers of a cache are equal")
    return probed


def _check_cache(config: Any, name: str) -> None:
    """Refuse layers that keep something else than keys and values, such as the state of a recurrence."""
    try:
        layers = DynamicCache(config=config).layers
    except Exception as error:
        raise _refused(name, f"transformers makes no cache for it ({_brief(error)})") from error
    for layer in layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise _refused(name, f"its cache has layers of the type {type(layer).__name__}, which are not paged")


def _check_rope(model: nn.Module, name: str) -> None:
    """Refuse rotary embeddings whose angles depend on the longest position of a call: on what runs with a row."""
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        for kind in found.values() if isinstance(found, dict) else [found]:
            if kind is not None and kind not in _FIXED_ROPE:
                raise _refused(name, f"its rotary embeddings are of the type {shown(kind)}, and depend on the batch")


def _longest(config: Any) -> int:
    for key in _LENGTHS:
        if (value := getattr(config, key, None)) is not None:
            return whole_number(value, f"config.json: {key}")
    raise ModelError(f"config.json has none of {', '.join(_LENGTHS)}", hint=HINT)


def _refused(name: str, why: str) -> ModelError:
    return ModelError(f"model_type {name} cannot run with model.backend: transformers: {why}", hint=HINT)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {shown(str(error).strip().splitlines()[0] if str(error).strip() else '')}"
