"""Command R and Aya (`cohere`), Command R7B and Command A (`cohere2`): attention and MLP read one LayerNorm without a
bias, and logits have a factor. In `cohere2`, layers with a window rotate, and the others do not."""

from __future__ import annotations

from typing import Any

from specbatch.models.config import ModelConfig
from specbatch.models.families.family import Family
from specbatch.models.families.hf_config import HfConfig
from specbatch.models.families.layer_norms import LayerNormLayer
from specbatch.models.families.pre_norms import full_windows


def _read_cohere(config: HfConfig) -> ModelConfig:
    return _model_config(config, full_windows(config), theta=500000.0)


def _read_cohere2(config: HfConfig) -> ModelConfig:
    period = config.optional_size("sliding_window_pattern") or 4
    windows = config.windows_but_each(period, 4096)
    # transformers' class does not read `head_dim`.
    raw = {key: value for key, value in config.raw.items() if key != "head_dim"}
    nope = tuple(window is None for window in windows)
    return _model_config(HfConfig(raw, config.generation), windows, nope_layers=nope)


def _model_config(config: HfConfig, windows: tuple[int | None, ...], **values: Any) -> ModelConfig:
    has_bias = config.flag("attention_bias")
    return config.model_config(
        windows,
        max_position=8192,
        eos=255001,
        eps=1e-5,
        eps_key="layer_norm_eps",
        tied=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        activation=config.activation("hidden_act", only=("silu", "swish")),
        logits_scale=config.positive_number("logit_scale", 0.0625) or 1.0,
        norms=("input_layernorm",),
        layer_norms=True,
        is_parallel=True,
        is_interleaved=True,
        **values,
    )


_KEYS = frozenset(("attention_bias", "layer_norm_eps", "logit_scale"))
_NEUTRAL: dict[str, tuple[Any, ...]] = {"mlp_bias": (False,), "qkv_bias": (False,)}
COHERE = Family(("CohereForCausalLM",), _read_cohere, _KEYS, _NEUTRAL, LayerNormLayer)
# Published files of Cohere 2 name what its class computes in any case.
_NEUTRAL2 = _NEUTRAL | {
    **{"use_gated_activation": (True,), "use_parallel_block": (True,), "use_parallel_embedding": (False, True)},
    **{"position_embedding_type": ("rope_gptj",), "rotary_pct": (1,), "use_embedding_sharing": (True,)},
    **{"order_of_interleaved_layers": ("local_attn_first",), "layer_switch": (4,)},
}
COHERE2 = Family(
    ("Cohere2ForCausalLM",),
    _read_cohere2,
    _KEYS | {"sliding_window", "sliding_window_pattern"},
    _NEUTRAL2,
    LayerNormLayer,
)
