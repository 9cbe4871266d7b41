"""Qwen2 and Qwen2.5, whose queries, keys and values have biases; Qwen3, which norms each head of queries and keys. Of
both there are models with experts."""

from __future__ import annotations

from typing import Any

from specbatch.errors import ModelError
from specbatch.models.checks import shown, whole_number
from specbatch.models.config import ModelConfig, MoeConfig
from specbatch.models.families.family import Family
from specbatch.models.families.hf_config import FULL, MTP_KEYS, HfConfig, windows_of

_ACTIVATIONS = ("silu", "swish")
_WINDOW_KEYS = frozenset(("use_sliding_window", "sliding_window", "max_window_layers"))


def _read_qwen2(config: HfConfig) -> ModelConfig:
    activation = config.activation("hidden_act", only=_ACTIVATIONS)
    return config.model_config(_windows(config), max_position=32768, qkv_bias=True, activation=activation)


def _read_qwen3(config: HfConfig) -> ModelConfig:
    return _qwen3(config, _windows(config), head_dim=128)


def _read_qwen2_moe(config: HfConfig) -> ModelConfig:
    activation = config.activation("hidden_act", only=_ACTIVATIONS)
    moe = sparse_experts(config, shared_size=config.size("shared_expert_intermediate_size"))
    has_bias = config.flag("qkv_bias", default=True)
    return config.model_config(
        _windows_of_qwen2_moe(config),
        num_kv_heads=16,
        max_position=32768,
        qkv_bias=has_bias,
        activation=activation,
        moe=moe,
    )


def _read_qwen3_moe(config: HfConfig) -> ModelConfig:
    windows = config.one_window(config.num_layers(), _window(config)[0])
    return _qwen3(config, windows, num_kv_heads=4, moe=sparse_experts(config))


def _read_mellum(config: HfConfig) -> ModelConfig:
    max_position = config.optional_size("max_position_embeddings") or 131072
    if config.raw.get("rope_scaling"):
        raise ModelError("config.json: rope_scaling is not supported in a mellum model, which has rope_parameters")
    rope, window_rope = config.ropes(max_position, 500000.0, 10000.0)
    window = config.optional_size("sliding_window") if "sliding_window" in config.raw else 1024
    num_layers = config.num_layers()
    types = config.layer_types(num_layers) or [FULL] * num_layers
    moe = config.experts(
        ("num_local_experts", "num_experts"),
        config.size("moe_intermediate_size"),
        config.sparse_layers("mlp_layer_types", (True,) * num_layers),
        norm_topk_prob=config.flag("norm_topk_prob", default=True),
    )
    return _qwen3(
        config,
        windows_of(types, window, "sliding_window is null"),
        num_kv_heads=4,
        head_dim=128,
        max_position=max_position,
        rope=rope,
        window_rope=window_rope,
        num_mtp_layers=config.num_mtp_layers(0),
        moe=moe,
    )


def _qwen3(config: HfConfig, windows: tuple[int | None, ...], **differing: Any) -> ModelConfig:
    """Read what Qwen3 with and without experts have in common. `differing`: further arguments of `model_config`."""
    has_bias = config.flag("attention_bias")
    return config.model_config(
        windows,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        activation=config.activation("hidden_act", only=_ACTIVATIONS),
        **{"max_position": 32768, **differing},
    )


def sparse_experts(config: HfConfig, shared_size: int = 0, *, norm_topk_prob: bool = False) -> MoeConfig:
    """Read which layers have experts: each `decoder_sparse_step`-th, without those of `mlp_only_layers`.
    `norm_topk_prob`: the value of a file that has none."""
    step = config.optional_size("decoder_sparse_step") or 1
    dense = config.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelError(f"config.json: mlp_only_layers must be a list of layers, not {shown(dense)}")
    numbers = {whole_number(layer, "config.json: mlp_only_layers", at_least=0) for layer in dense}
    return config.experts(
        ("num_experts", "num_local_experts"),
        config.size("moe_intermediate_size"),
        tuple(i not in numbers and (i + 1) % step == 0 for i in range(config.num_layers())),
        norm_topk_prob=config.flag("norm_topk_prob", default=norm_topk_prob),
        shared_size=shared_size,
    )


def _windows(config: HfConfig) -> tuple[int | None, ...]:
    """Return the windows of the layers from `max_window_layers` on, or of those that `layer_types` names."""
    window, why = _window(config)
    first = 0
    if window is not None and config.raw.get("layer_types") is None:
        first = _max_window_layers(config)
    return config.windows(config.num_layers(), window, why, first)


def _windows_of_qwen2_moe(config: HfConfig) -> tuple[int | None, ...]:
    """Return the windows of every second layer below `max_window_layers`, or of those that `layer_types` names."""
    num_layers, (window, why) = config.num_layers(), _window(config)
    if config.raw.get("layer_types") is not None:
        return config.windows(num_layers, window, why)
    last = _max_window_layers(config)
    return tuple(window if i < last and i % 2 == 0 else None for i in range(num_layers))


def _window(config: HfConfig) -> tuple[int | None, str]:
    """Return the size of the sliding window, and the reason if there is none."""
    if not config.flag("use_sliding_window"):
        return None, "use_sliding_window is not true"
    return config.optional_size("sliding_window") if "sliding_window" in config.raw else 4096, "sliding_window is null"


def _max_window_layers(config: HfConfig) -> int:
    return whole_number(config.raw.get("max_window_layers", 28), "config.json: max_window_layers", at_least=0)


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
MELLUM = Family(
    architectures=("MellumForCausalLM",),
    read=_read_mellum,
    keys=frozenset(
        (
            *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
            *("mlp_layer_types", "sliding_window", "attention_bias"),
            *(*MTP_KEYS, "mtp_layer_types", "mtp_mlp_layer_types"),
        )
    ),
    neutral={"mlp_bias": (False,), "qkv_bias": (False,), "use_sliding_window": (True,)},
)
