"""Qwen2 and Qwen2.5, whose queries, keys and values have biases; Qwen3, which norms each head of queries and keys. Of
both there are models with experts."""

from __future__ import annotations

from specbatch.errors import ModelError
from specbatch.models.checks import shown, whole_number
from specbatch.models.config import ModelConfig, MoeConfig
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


def _read_qwen2_moe(config: HfConfig) -> ModelConfig:
    activation = config.activation("hidden_act", only=("silu", "swish"))
    moe = _experts(config, shared_size=config.size("shared_expert_intermediate_size"))
    has_bias = config.flag("qkv_bias", default=True)
    return config.model_config(
        _windows_of_experts(config, every_second=True),
        num_kv_heads=16,
        max_position=32768,
        qkv_bias=has_bias,
        activation=activation,
        moe=moe,
    )


def _read_qwen3_moe(config: HfConfig) -> ModelConfig:
    activation = config.activation("hidden_act", only=("silu", "swish"))
    has_bias = config.flag("attention_bias")
    return config.model_config(
        _windows_of_experts(config, every_second=False),
        num_kv_heads=4,
        max_position=32768,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        activation=activation,
        moe=_experts(config),
    )


def _experts(config: HfConfig, shared_size: int = 0) -> MoeConfig:
    """Read which layers have experts: each `decoder_sparse_step`-th, without those of `mlp_only_layers`."""
    step = config.optional_size("decoder_sparse_step") or 1
    dense = config.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelError(f"config.json: mlp_only_layers must be a list of layers, not {shown(dense)}")
    numbers = {whole_number(layer, "config.json: mlp_only_layers", at_least=0) for layer in dense}
    return config.experts(
        ("num_experts", "num_local_experts"),
        config.size("moe_intermediate_size"),
        tuple(i not in numbers and (i + 1) % step == 0 for i in range(config.num_layers())),
        norm_topk_prob=config.flag("norm_topk_prob"),
        shared_size=shared_size,
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


def _windows_of_experts(config: HfConfig, *, every_second: bool) -> tuple[int | None, ...]:
    """Return the windows of a model with experts, as transformers decides them: of all layers, or of every second one
    below `max_window_layers`."""
    num_layers, is_on = config.num_layers(), config.flag("use_sliding_window")
    window = (config.optional_size("sliding_window") if "sliding_window" in config.raw else 4096) if is_on else None
    if config.raw.get("layer_types") is not None:
        why = "sliding_window is null" if is_on else "use_sliding_window is not true"
        return config.windows(num_layers, window, why)
    last = num_layers
    if every_second:
        last = whole_number(config.raw.get("max_window_layers", 28), "config.json: max_window_layers", at_least=0)
    return tuple(window if i < last and not (every_second and i % 2) else None for i in range(num_layers))


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
_EXPERT_KEYS = frozenset(
    (
        *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        *("decoder_sparse_step", "mlp_only_layers"),
    )
)
QWEN2_MOE = Family(
    architectures=("Qwen2MoeForCausalLM",),
    read=_read_qwen2_moe,
    keys=_WINDOW_KEYS | _EXPERT_KEYS | {"qkv_bias", "shared_expert_intermediate_size"},
    neutral={"mlp_bias": (False,)},
)
QWEN3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM",),
    read=_read_qwen3_moe,
    keys=_WINDOW_KEYS | _EXPERT_KEYS | {"attention_bias"},
    neutral={"mlp_bias": (False,), "qkv_bias": (False,)},
)
