"""gpt-oss: a mixture of experts in each layer, a window in every other one, and attention sinks."""

from __future__ import annotations

from typing import Any

from specbatch.errors import ModelError
from specbatch.kernels.activations import SWIGLU_ALPHA, SWIGLU_LIMIT
from specbatch.models.config import ModelConfig
from specbatch.models.families.family import Family
from specbatch.models.families.hf_config import FULL, SLIDING, HfConfig, windows_of

_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read_gpt_oss(config: HfConfig) -> ModelConfig:
    if not (config.raw.get("rope_scaling") or config.raw.get("rope_parameters")):
        config = HfConfig({**config.raw, "rope_parameters": _ROPE}, config.generation)
    config.activation("hidden_act", only=("silu", "swish"))
    for key, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        found = config.optional_number(key, value)
        if found != value:
            raise ModelError(f"config.json: {key} is {found}; only {value} is supported")
    num_layers = config.num_layers()
    types = config.layer_types(num_layers) or [FULL if i % 2 else SLIDING for i in range(num_layers)]
    window = config.optional_size("sliding_window") if "sliding_window" in config.raw else 128
    moe = config.experts(
        ("num_local_experts", "num_experts"),
        config.size("intermediate_size"),
        (True,) * num_layers,
        norm_topk_prob=False,
        scoring="softmax_of_chosen",
        router="router",
        router_bias=True,
        expert_bias=True,
        is_interleaved=True,
    )
    has_bias = config.flag("attention_bias", default=True)
    return config.model_config(
        windows_of(types, window, "sliding_window is null"),
        num_kv_heads=8,
        head_dim=64,
        max_position=131072,
        eps=1e-5,
        theta=150000.0,
        qkv_bias=has_bias,
        output_bias=has_bias,
        activation="clamped_swiglu",
        attention_sinks=True,
        moe=moe,
    )


GPT_OSS = Family(
    architectures=("GptOssForCausalLM",),
    read=_read_gpt_oss,
    keys=frozenset(
        (
            *("attention_bias", "sliding_window", "num_local_experts", "num_experts", "num_experts_per_tok"),
            *("swiglu_alpha", "swiglu_limit"),
            # Published files repeat two numbers under other names, which transformers does not read.
            *("experts_per_token", "initial_context_length"),
        )
    ),
    neutral={"mlp_bias": (False,), "qkv_bias": (True,)},
)
