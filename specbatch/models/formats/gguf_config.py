"""The model configuration that a GGUF file describes: its metadata, and which optional tensors it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specbatch.errors import ModelError
from specbatch.models.checks import MAX_LAYERS, MAX_SIZE, norm_eps, number, shown, whole_number
from specbatch.models.config import ModelConfig, MoeConfig
from specbatch.models.families.gemma import SANDWICH_NORMS
from specbatch.models.families.hf_config import MAX_EXPERTS
from specbatch.models.families.llama import MIXTRAL_NAMES
from specbatch.models.formats.gguf import GgufFile
from specbatch.models.rope import RopeConfig

# Our model types, by architecture. A `llama` with experts is a `mixtral`.
_MODEL_TYPES = {
    **{"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"},
    **{"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "olmoe": "olmoe"},
    **{"gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text"},
}
_NORMS_TOPK = {"mixtral": True, "qwen2_moe": False, "qwen3_moe": True, "olmoe": False}
SUPPORTED_ARCHITECTURES = tuple(_MODEL_TYPES)


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """Raises ModelError for what is not supported, missing, of a wrong type or out of range."""
    source = str(file.path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{source}: GGUF architecture {shown(architecture)} is not supported",
            hint=f"supported architectures: {', '.join(SUPPORTED_ARCHITECTURES)} (Mistral models are 'llama' in GGUF)",
        )
    if file.metadata.get("general.type", "model") != "model":
        raise ModelError(
            f"{source} is no model but {shown(file.metadata['general.type'])} (general.type)",
            hint="an adapter has to be merged into its model: llama-export-lora",
        )
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(f"{source} is one part of a split GGUF", hint="merge them first: llama-gguf-split --merge")
    meta = _Metadata(file, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{source} has no tensor 'token_embd.weight' of two dimensions")
    hidden_size, num_heads = meta.size("embedding_length"), meta.size("attention.head_count")
    num_layers = meta.size("block_count", at_most=MAX_LAYERS)
    head_dim = meta.size("attention.key_length", max(1, hidden_size // num_heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.size(key, head_dim) != head_dim:
            raise ModelError(f"{source}: {key} {meta.get(key)} differs from the head size {head_dim}")
    model_type = _MODEL_TYPES[architecture]
    _check_neutral(source, meta, _GEMMA_KEYS.get(model_type, ()))
    window = meta.size("attention.sliding_window", 0, at_least=0) or None
    context = meta.size("context_length")
    rope = _rope_config(file, meta, head_dim, context)
    if model_type == "llama" and meta.get("expert_count", 0):
        model_type = "mixtral"
    read = ModelConfig(
        model_type=model_type,
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=meta.size("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=meta.size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=norm_eps(meta.number("attention.layer_norm_rms_epsilon"), meta.name("layer_norm_rms_epsilon")),
        rope=rope,
        max_position_embeddings=rope.context_length(context, meta.name("context_length")),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_windows=(window,) * num_layers,
        eos_token_ids=_eos_token_ids(file),
        qk_norm_whole=model_type == "olmoe",
        moe=_experts(file, meta, model_type, num_layers),
    )
    return (_gemma(read, meta, context) if model_type.startswith("gemma") else read).checked(source)


# Keys that are read for a Gemma in addition to those of all models.
_GEMMA_KEYS = {
    "gemma2": ("attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3_text": ("final_logit_softcapping",),
}
# Numbers of layers of the models of 27 billion parameters. llama.cpp, too, knows by them that scores are divided by the
# root of hidden size / heads.
_LAYERS_27B = {"gemma2": 46, "gemma3_text": 62}
_WINDOW_PERIODS = {"gemma2": 2, "gemma3_text": 6}


def _gemma(read: ModelConfig, meta: _Metadata, context: int) -> ModelConfig:
    """Add the traits of a Gemma, for which a file has no keys. Its norms have weights to which 1 is added already."""
    kind, num_layers = read.model_type, read.num_layers
    traits: dict[str, Any] = {
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(read.hidden_size),
        "wide_norms": True,
        "tie_word_embeddings": True,
    }
    if kind == "gemma":
        return replace(read, **traits)
    window, period = meta.size("attention.sliding_window"), _WINDOW_PERIODS[kind]
    scalar = read.hidden_size // read.num_heads if num_layers == _LAYERS_27B[kind] else read.head_dim
    traits |= {
        trait: meta.number(key) if meta.get(key) else None
        for trait, key in (
            ("attention_soft_cap", "attn_logit_softcapping"),
            ("logits_soft_cap", "final_logit_softcapping"),
        )
        if key in _GEMMA_KEYS[kind]
    }
    if kind == "gemma3_text":  # context_length includes the scaling
        traits |= {
            "rope": replace(read.rope, original_max_position=0),
            "window_rope": RopeConfig(theta=meta.number("rope.freq_base_swa", 10000.0)),
            "max_position_embeddings": context,
            "qk_norm": True,
        }
    return replace(
        read,
        **traits,
        norms=SANDWICH_NORMS,
        attention_scale=scalar**-0.5,
        sliding_windows=tuple(window if (i + 1) % period else None for i in range(num_layers)),
    )


def _experts(file: GgufFile, meta: _Metadata, model_type: str, num_layers: int) -> MoeConfig | None:
    """Read a mixture of experts. A layer with a router has one."""
    if model_type not in _NORMS_TOPK:
        if meta.get("expert_count", 0):
            raise ModelError(f"{meta.name('expert_count')}: a {model_type} model with experts is not supported")
        return None
    for key, neutral in (
        ("expert_gating_func", (1,)),
        ("expert_weights_scale", (0, 1)),
        ("expert_weights_norm", (_NORMS_TOPK[model_type],)),
        ("expert_group_count", (0, 1)),
    ):
        if (value := meta.get(key)) is not None and value not in neutral:
            raise ModelError(f"{meta.name(key)} {shown(value)} is not supported in a {model_type} model")
    num_experts, top_k = (meta.size(f"expert_{key}", at_most=MAX_EXPERTS) for key in ("count", "used_count"))
    if top_k > num_experts:
        raise ModelError(f"{meta.name('expert_used_count')} {top_k} is more than expert_count {num_experts}")
    return MoeConfig(
        num_experts,
        top_k,
        meta.size("expert_feed_forward_length", meta.size("feed_forward_length")),
        _NORMS_TOPK[model_type],
        tuple(f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(num_layers)),
        shared_size=meta.size("expert_shared_feed_forward_length") if model_type == "qwen2_moe" else 0,
        **(MIXTRAL_NAMES if model_type == "mixtral" else {}),
    )


# Keys that would change what is computed, with the value under which they change nothing.
_NEUTRAL = {
    "attention.causal": True,
    "attention.scale": None,
    "attention.clamp_kqv": 0,
    "attention.sliding_window_pattern": None,
    "attention.chunk_size": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "embedding_scale": 1,
    "use_parallel_residual": False,
}


def _check_neutral(source: str, meta: _Metadata, read: Sequence[str]) -> None:
    """Raise ModelError for a key that changes the computation. `read`: the keys that are read for this model."""
    for key, neutral in _NEUTRAL.items():
        value = meta.get(key, neutral)
        if value != neutral and key not in read:
            raise ModelError(
                f"{source}: metadata {key} {shown(value)} is not supported",
                hint="the model computes more than specbatch does: use another file, or another engine",
            )


class _Metadata:
    """The keys under one architecture's name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def name(self, key: str) -> str:
        return f"{self._file.path}: metadata {self._architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        value = self._file.metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(value, list):
            if not value or any(each != value[0] for each in value[1:]):
                raise ModelError(f"{self._file.path}: {key} differs between layers, which is not supported")
            return value[0]
        return value

    def size(self, key: str, default: int | None = None, *, at_least: int = 1, at_most: int = MAX_SIZE) -> int:
        return whole_number(self._present(key, default), self.name(key), at_least=at_least, at_most=at_most)

    def number(self, key: str, default: float | None = None) -> float:
        value = number(self._present(key, default), self.name(key))
        # Stored as float32; the shortest decimal with those bits is what config.json said (1e-05, not 9.99999975e-06).
        with np.errstate(over="ignore"):
            return number(float(str(np.float32(value))), self.name(key))

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.name(key)} is missing")
        return value


def _rope_config(file: GgufFile, meta: _Metadata, head_dim: int, context: int) -> RopeConfig:
    theta = meta.number("rope.freq_base", 10000.0)
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.number("rope.scaling.factor", 1.0)
    if kind == "none" and meta.number("rope.scale_linear", 1.0) != 1.0:  # files from before rope.scaling.type
        kind, factor = "linear", meta.number("rope.scale_linear")
    divisors: tuple[float, ...] | None = None
    if "rope_freqs.weight" in file.tensors:
        shape = file.tensors["rope_freqs.weight"].shape
        if shape != (head_dim // 2,):
            raise ModelError(f"{file.path}: rope_freqs.weight has the shape {list(shape)}, expected [{head_dim // 2}]")
        divisors = tuple(file.load("rope_freqs.weight").tolist())
    rope = RopeConfig(theta=theta, frequency_divisors=divisors)
    original = "rope.scaling.original_context_length"
    if kind == "linear":
        rope = replace(rope, scaling="linear", factor=factor, original_max_position=meta.size(original, context))
    elif kind == "yarn":
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
            if meta.get(f"rope.scaling.{key}", 1.0) != 1.0:
                raise ModelError(f"{file.path}: rope.scaling.{key} is not supported")
        rope = replace(
            rope,
            scaling="yarn",
            factor=factor,
            original_max_position=meta.size(original),
            beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    elif kind != "none":
        raise ModelError(
            f"{file.path}: rope scaling {shown(kind)} is not supported", hint="supported: none, linear, yarn"
        )
    return rope.checked(str(file.path))


# Tokens that end a turn, in chat templates that name them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>")
# Further ids that the generation_config.json of a family's chat models lists, which GGUF has no key for.
_FAMILY_ENDS = {"qwen2": ("<|im_end|>", "<|endoftext|>"), "llama-bpe": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")}


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    ids = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        value = file.metadata.get(f"tokenizer.ggml.{key}")
        if value is not None:
            ids.append(whole_number(value, f"{file.path}: tokenizer.ggml.{key}", at_least=0, at_most=2**32 - 1))
    template = file.text("tokenizer.chat_template")
    if template:
        wanted = {text for text in _TURN_ENDS if text in template}
        wanted.update(_FAMILY_ENDS.get(file.text("tokenizer.ggml.pre") or "", ()))
        kinds = file.items("tokenizer.ggml.token_type", int)
        for i, text in enumerate(file.items("tokenizer.ggml.tokens", str)):
            if text in wanted and (i >= len(kinds) or kinds[i] != 1):  # 1: an ordinary token with the same text
                ids.append(i)
    return tuple(dict.fromkeys(ids))
