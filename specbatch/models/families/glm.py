"""GLM-4 in its two forms: `glm` has the norms of Llama, `glm4` (the models of 2025) norms after attention and MLP, too.
Half of each head rotates, in pairs of neighbouring dimensions."""

from __future__ import annotations

from typing import Any

from specbatch.models.config import ModelConfig
from specbatch.models.families.family import Family, TensorNames
from specbatch.models.families.gemma import SANDWICH_NORMS, SandwichLayer
from specbatch.models.families.hf_config import HfConfig
from specbatch.models.families.pre_norms import full_windows

_JOINED = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
_SANDWICH = dict(
    zip(
        SANDWICH_NORMS,
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        strict=True,
    )
)


def _read_glm(config: HfConfig) -> ModelConfig:
    return _model_config(config)


def _read_glm4(config: HfConfig) -> ModelConfig:
    return _model_config(config, norms=SANDWICH_NORMS)


def _model_config(config: HfConfig, **traits: Any) -> ModelConfig:
    return config.model_config(
        full_windows(config),
        num_kv_heads=2,
        head_dim=128,
        max_position=131072,
        eos=[151329, 151336, 151338],
        eps=1.5625e-07,
        partial=0.5,
        qkv_bias=config.flag("attention_bias", default=True),
        activation=config.activation("hidden_act", only=("silu", "swish")),
        is_interleaved=True,
        **traits,
    )


_KEYS = frozenset(("attention_bias",))
_NEUTRAL: dict[str, tuple[Any, ...]] = {"mlp_bias": (False,), "qkv_bias": (True,)}
GLM = Family(("GlmForCausalLM",), _read_glm, _KEYS, _NEUTRAL, names=TensorNames(joined=_JOINED))
GLM4 = Family(
    ("Glm4ForCausalLM",), _read_glm4, _KEYS, _NEUTRAL, SandwichLayer, TensorNames(modules=_SANDWICH, joined=_JOINED)
)
