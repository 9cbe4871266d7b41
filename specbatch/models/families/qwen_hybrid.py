"""Qwen3-Next and the text part of Qwen3.5: most layers have a Gated DeltaNet, the others gated attention whose heads
rotate in part. Norms multiply by 1 + weight. Of both there are models with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbatch.errors import ModelError
from specbatch.models.checks import mapping, shown
from specbatch.models.config import DeltaConfig, ModelConfig
from specbatch.models.families.family import Family, TensorNames
from specbatch.models.families.hf_config import FULL, HfConfig
from specbatch.models.families.qwen import sparse_experts
from specbatch.models.families.vision import plain_rope
from specbatch.models.hybrids.layer import HybridLayer

LINEAR = "linear_attention"  # the type of layers with a Gated DeltaNet
_ACTIVATIONS = ("silu", "swish")


def _read_dense(config: HfConfig) -> ModelConfig:
    return _model_config(config, num_kv_heads=4)


def _read_next(config: HfConfig) -> ModelConfig:
    shared_size = config.optional_size("shared_expert_intermediate_size") or 512
    moe = sparse_experts(config, shared_size, norm_topk_prob=True)
    return _model_config(config, num_kv_heads=2, intermediate_size=_inner_size(config, 5632), moe=moe)


def _read_moe(config: HfConfig) -> ModelConfig:
    num_layers = config.num_layers()
    moe = config.experts(
        ("num_experts",),
        config.size("moe_intermediate_size"),
        (True,) * num_layers,
        norm_topk_prob=True,  # transformers' class has no other router
        shared_size=config.size("shared_expert_intermediate_size"),
    )
    return _model_config(config, num_kv_heads=2, intermediate_size=moe.expert_size, moe=moe)


def _inner_size(config: HfConfig, default: int) -> int:
    return config.optional_size("intermediate_size") or default


def _model_config(config: HfConfig, **traits: Any) -> ModelConfig:
    if not config.flag("attn_output_gate", default=True):
        raise ModelError(f"config.json: attn_output_gate false is not supported in a {config.model_type} model")
    if (state_dtype := config.raw.get("mamba_ssm_dtype", "float32")) != "float32":
        raise ModelError(f"config.json: mamba_ssm_dtype {shown(state_dtype)} is not supported; states are float32")
    layers = _delta_layers(config)
    delta = DeltaConfig(
        layers,
        config.optional_size("linear_num_key_heads") or 16,
        config.optional_size("linear_num_value_heads") or 32,
        config.optional_size("linear_key_head_dim") or 128,
        config.optional_size("linear_value_head_dim") or 128,
        config.optional_size("linear_conv_kernel_dim") or 4,
    )
    if delta.num_value_heads % delta.num_key_heads:
        raise ModelError(
            f"config.json: linear_num_value_heads {delta.num_value_heads} is not a multiple of linear_num_key_heads "
            f"{delta.num_key_heads}"
        )
    has_bias = config.flag("attention_bias")
    if has_bias:
        raise ModelError(f"config.json: attention_bias true is not supported in a {config.model_type} model")
    return HfConfig(_with_plain_rope(config.raw), config.generation).model_config(
        (None,) * len(layers),
        head_dim=256,
        max_position=32768,
        partial=0.25,
        qk_norm=True,
        norm_offset=1.0,
        activation=config.activation("hidden_act", only=_ACTIVATIONS),
        delta=delta,
        gated_attention=True,
        num_mtp_layers=config.count("mtp_num_hidden_layers", config.num_mtp_layers(1)),
        **traits,
    )


def _with_plain_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    sections = {key: raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)}
    return {**raw, **{key: plain_rope(mapping(rope, f"config.json: {key}")) for key, rope in sections.items()}}


def _delta_layers(config: HfConfig) -> tuple[bool, ...]:
    """Return which layers have a Gated DeltaNet: those of `layer_types`, or all but each `full_attention_interval`-th.
    Raise ModelError if none or all have one."""
    num_layers, types = config.num_layers(), config.raw.get("layer_types")
    if types is None:
        period = config.optional_size("full_attention_interval") or 4
        types = [LINEAR if (i + 1) % period else FULL for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (FULL, LINEAR) for kind in types):
        raise ModelError(
            f"config.json: layer_types must be a list of {num_layers} times {FULL!r} or {LINEAR!r}, not {shown(types)}"
        )
    if len(set(types)) < 2:
        raise ModelError(f"config.json: all layers have {types[0]}; a {config.model_type} model has both kinds")
    return tuple(kind == LINEAR for kind in types)


_KEYS = frozenset(
    (
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_conv_kernel_dim", "full_attention_interval", "attn_output_gate", "attention_bias"),
        *("mtp_num_hidden_layers", "num_nextn_predict_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"),
        *(
            f"{section}.{key}"
            for section in ("rope_parameters", "rope_scaling")
            for key in ("mrope_section", "mrope_interleaved")
        ),
    )
)
_EXPERT_KEYS = _KEYS | {
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
}
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{"mlp_bias": (False,), "qkv_bias": (False,), "use_sliding_window": (False,), "sliding_window": ()},
}
_GATED_QUERIES = {"self_attn.q_proj": ("self_attn.q_proj", "self_attn.gate_proj")}
_NAMES = TensorNames(
    joined=_GATED_QUERIES
    | {"linear_attn.in_proj_qkv": ("linear_attn.in_proj_q", "linear_attn.in_proj_k", "linear_attn.in_proj_v")},
    joins_heads={"self_attn.q_proj": "query"},
)
_NEXT_NAMES = TensorNames(
    joined=_GATED_QUERIES
    | {
        "linear_attn.in_proj_qkvz": tuple(f"linear_attn.in_proj_{part}" for part in "qkvz"),
        "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    },
    joins_heads={
        "self_attn.q_proj": "query",
        "linear_attn.in_proj_qkvz": "delta",
        "linear_attn.in_proj_ba": "delta",
    },
)
QWEN3_5 = Family(("Qwen3_5ForCausalLM",), _read_dense, _KEYS, _NEUTRAL, HybridLayer, _NAMES)
QWEN3_5_MOE = Family(("Qwen3_5MoeForCausalLM",), _read_moe, _EXPERT_KEYS, _NEUTRAL, HybridLayer, _NAMES)
QWEN3_NEXT = Family(("Qwen3NextForCausalLM",), _read_next, _EXPERT_KEYS, _NEUTRAL, HybridLayer, _NEXT_NAMES)
