"""Llama 2 and 3, SmolLM2 and others of their kind; Mistral, which has a sliding window; Mixtral, a Mistral with
experts."""

from __future__ import annotations

from typing import Any

from specbatch.errors import ModelError
from specbatch.models.config import ModelConfig
from specbatch.models.families.family import Family
from specbatch.models.families.hf_config import WINDOW_HINT, HfConfig

_ACTIVATIONS = ("silu", "swish")
# Fields of `MoeConfig`: the names of Mixtral's tensors.
MIXTRAL_NAMES: dict[str, Any] = {"block": "block_sparse_moe", "projections": ("w1", "w3", "w2")}


def _read_llama(config: HfConfig) -> ModelConfig:
    activation = config.activation("hidden_act", only=_ACTIVATIONS)
    has_bias = config.flag("attention_bias")
    return config.model_config(
        config.windows(config.num_layers(), None, "a llama model has no window"),
        max_position=2048,
        eos=2,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=config.flag("mlp_bias"),
        activation=activation,
    )


def _read_mistral(config: HfConfig) -> ModelConfig:
    activation = config.activation("hidden_act", only=_ACTIVATIONS)
    window = config.optional_size("sliding_window") if "sliding_window" in config.raw else 4096
    if window is not None and not config.flag("use_sliding_window", default=True):
        raise ModelError(f"config.json: use_sliding_window is false, but sliding_window is {window}", hint=WINDOW_HINT)
    return config.model_config(
        # transformers reads a Mistral that has `layer_types` as a Ministral.
        config.windows(config.num_layers(), window, "sliding_window is null"),
        num_kv_heads=8,
        max_position=4096 * 32,
        eos=2,
        activation=activation,
    )


def _read_mixtral(config: HfConfig) -> ModelConfig:
    activation = config.activation("hidden_act", only=_ACTIVATIONS)
    num_layers = config.num_layers()
    moe = config.experts(
        ("num_local_experts",),
        config.size("intermediate_size"),
        (True,) * num_layers,
        norm_topk_prob=True,
        **MIXTRAL_NAMES,
    )
    return config.model_config(
        config.one_window(num_layers, config.optional_size("sliding_window")),
        num_kv_heads=8,
        max_position=4096 * 32,
        eos=2,
        eps=1e-5,
        theta=1e6,
        activation=activation,
        moe=moe,
    )


LLAMA = Family(
    architectures=("LlamaForCausalLM",),
    read=_read_llama,
    keys=frozenset(("attention_bias", "mlp_bias")),
    neutral={"use_sliding_window": (False,), "qkv_bias": (False,)},
)
MISTRAL = Family(
    architectures=("MistralForCausalLM",),
    read=_read_mistral,
    keys=frozenset(("use_sliding_window", "sliding_window")),
    neutral={"attention_bias": (False,), "mlp_bias": (False,), "qkv_bias": (False,)},
)
MIXTRAL = Family(
    architectures=("MixtralForCausalLM",),
    read=_read_mixtral,
    keys=frozenset(("sliding_window", "num_local_experts", "num_experts_per_tok")),
    neutral={
        **{"attention_bias": (False,), "mlp_bias": (False,), "qkv_bias": (False,)},
        "norm_topk_prob": (True,),
    },
)
