"""Qwen2 and Qwen2.5, whose queries, keys and values have biases; Qwen3, which norms each head of queries and keys."""

from __future__ import annotations

from specbatch.models.checks import whole_number
from specbatch.models.config import ModelConfig
from specbatch.models.families.family import Family
from specbatch.models.families.hf_config import HfConfig

_WINDOW_KEYS = frozenset(("use_sliding_window", "sliding_window", "max_window_layers"))


def _read_qwen2(config: HfConfig) -> ModelConfig:
    activation = config.activation("hidden_act", only=("silu", "swish"))
    return config.model_config(_windows(config), max_position=32768, qkv_bias=True, activation=activation)


def _read_qwen3(config: HfConfig) -> ModelConfig:
    activation = config.activation("hidden_act", only=("silu", "swish"))
    has_bias = config.flag("attention_bias")
    return config.model_config(
        _windows(config),
        head_dim=128,
        max_position=32768,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        activation=activation,
    )


def _windows(config: HfConfig) -> tuple[int | None, ...]:
    """Return the windows of the layers from `max_window_layers` on, or of those that `layer_types` names."""
    is_on = config.flag("use_sliding_window")
    window = config.optional_size("sliding_window") if "sliding_window" in config.raw else 4096
    why = "sliding_window is null" if is_on else "use_sliding_window is not true"
    first = 0
    if is_on and window is not None and config.raw.get("layer_types") is None:
        first = whole_number(config.raw.get("max_window_layers", 28), "config.json: max_window_layers", at_least=0)
    return config.windows(config.num_layers(), window if is_on else None, why, first)


QWEN2 = Family(
    architectures=("Qwen2ForCausalLM",),
    read=_read_qwen2,
    keys=_WINDOW_KEYS,
    neutral={"mlp_bias": (False,), "qkv_bias": (True,)},
)
QWEN3 = Family(
    architectures=("Qwen3ForCausalLM",),
    read=_read_qwen3,
    keys=_WINDOW_KEYS | {"attention_bias"},
    neutral={"mlp_bias": (False,), "qkv_bias": (False,)},
)
