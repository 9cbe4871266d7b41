"""OLMoE, whose experts are those of Qwen and whose norms of queries and keys are over all heads."""

from __future__ import annotations

from specbatch.models.config import ModelConfig
from specbatch.models.families.family import Family
from specbatch.models.families.hf_config import HfConfig

_ACTIVATIONS = ("silu", "swish")


def _read_olmoe(config: HfConfig) -> ModelConfig:
    num_layers, has_bias = config.num_layers(), config.flag("attention_bias")
    moe = config.experts(
        ("num_experts", "num_local_experts"),
        config.size("intermediate_size"),
        (True,) * num_layers,
        norm_topk_prob=config.flag("norm_topk_prob"),
    )
    return config.model_config(
        config.one_window(num_layers, None),
        max_position=4096,
        eos=50279,
        eps=1e-5,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        qk_norm_whole=True,
        activation=config.activation("hidden_act", only=_ACTIVATIONS),
        moe=moe,
    )


OLMOE = Family(
    architectures=("OlmoeForCausalLM",),
    read=_read_olmoe,
    keys=frozenset(("attention_bias", "num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob")),
    neutral={"mlp_bias": (False,), "qkv_bias": (False,), "clip_qkv": ()},
)
