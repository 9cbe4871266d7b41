"""Gemma 1, 2 and 3 (text).

All scale their embeddings by the root of the hidden size, multiply norms by 1 + weight, and have a GELU in the MLP.
Gemma 2 and 3 also have norms after attention and after the MLP, and sliding windows in most layers; Gemma 2 soft caps
of scores and logits; Gemma 3 norms of queries and keys, and rotary embeddings of their own for layers with a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from specbatch.errors import ModelError
from specbatch.models.checks import whole_number
from specbatch.models.config import PRE_NORMS, ModelConfig
from specbatch.models.decoder_layer import MLP, Attention, DecoderLayer, ForwardPass
from specbatch.models.families.family import Family
from specbatch.models.families.hf_config import HfConfig
from specbatch.models.layers import RMSNorm, Rotary
from specbatch.models.linears.linear import Residual
from specbatch.models.rope import RopeConfig
from specbatch.models.stages import Stages
from specbatch.models.weight_loader import WeightLoader

SANDWICH_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GELU = "gelu_pytorch_tanh"


class SandwichLayer(DecoderLayer):
    """A layer with norms before attention and MLP, and in most families (Gemma 2 and 3, GLM-4) also after them."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightLoader, prefix: str, rotary: Rotary) -> None:
        eps, offset, is_wide = config.rms_norm_eps, config.norm_offset, config.wide_norms
        norms = {name: weights.norm(f"{prefix}{name}", eps, offset, is_wide=is_wide) for name in config.norms}
        has_output_norms = config.norms == SANDWICH_NORMS
        self._input_norm = norms["input_layernorm"]
        self._attention_norm = norms["post_attention_layernorm"] if has_output_norms else None
        self._mlp_input_norm = norms["pre_feedforward_layernorm" if has_output_norms else "post_attention_layernorm"]
        self._mlp_norm = norms["post_feedforward_layernorm"] if has_output_norms else None
        self.attention = Attention(config, layer, weights, f"{prefix}self_attn.", rotary)
        self._mlp = MLP(config, weights, f"{prefix}mlp.")

    @property
    def first_norm(self) -> RMSNorm:
        return self._input_norm

    def queries(self, x_TI: Tensor, step: ForwardPass) -> Tensor:
        return self.attention.queries(self._input_norm(x_TI), step, None)

    def after_attention(
        self,
        attended_THD: Tensor,
        residual_TE: Tensor,
        next_norm: RMSNorm | None = None,
        counts: Sequence[int] | None = None,
    ) -> Stages[Residual]:
        y_TE = self.attention.output(attended_THD)
        del attended_THD
        yield
        x = _added(y_TE, residual_TE, self._attention_norm, self._mlp_input_norm)
        y_TE = self._mlp(x.normed(self._mlp_input_norm))
        yield
        return _added(y_TE, x.x_TE, self._mlp_norm, next_norm)


def _added(y_TE: Tensor, residual_TE: Tensor, norm: RMSNorm | None, next_norm: RMSNorm | None) -> Residual:
    """Add norm(y) to the residual; without a norm, y."""
    if norm is not None:
        return Residual(*norm.added(y_TE, residual_TE, next_norm))
    return Residual(residual_TE + y_TE)


def _read_gemma(config: HfConfig) -> ModelConfig:
    # Old files say "gelu" and mean its tanh approximation, see transformers' GemmaConfig.
    given = config.raw.get("hidden_activation") or config.raw.get("hidden_act") or _GELU
    plain = HfConfig({**config.raw, "hidden_act": _GELU if given == "gelu" else given}, config.generation)
    windows = config.windows(config.num_layers(), None, "a gemma model has no window")
    return _model_config(plain, windows, norms=PRE_NORMS, max_position=8192, key="hidden_act")


def _read_gemma2(config: HfConfig) -> ModelConfig:
    return _model_config(
        config,
        config.windows_but_each(2, 4096),
        max_position=8192,
        attention_soft_cap=config.positive_number("attn_logit_softcapping", 50.0),
        logits_soft_cap=config.positive_number("final_logit_softcapping", 30.0),
        attention_scale=_attention_scale(config),
    )


def _read_gemma3(config: HfConfig) -> ModelConfig:
    max_position = config.optional_size("max_position_embeddings") or 131072
    rope, window_rope = _ropes(config, max_position)
    return _model_config(
        config,
        config.windows_but_each(whole_number(_pattern(config.raw), "config.json: sliding_window_pattern"), 4096),
        max_position=max_position,
        rope=rope,
        window_rope=window_rope,
        qk_norm=True,
        logits_soft_cap=config.positive_number("final_logit_softcapping"),
        attention_scale=_attention_scale(config),
    )


def _model_config(
    config: HfConfig,
    windows: tuple[int | None, ...],
    *,
    norms: tuple[str, ...] = SANDWICH_NORMS,
    key: str = "hidden_activation",
    **traits: Any,
) -> ModelConfig:
    has_bias = config.flag("attention_bias")
    return config.model_config(
        windows,
        num_kv_heads=16 if config.model_type == "gemma" else 4,
        head_dim=256,
        eos=1,
        tied=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        activation=config.activation(key, only=(_GELU,), default=_GELU),
        norms=norms,
        norm_offset=1.0,
        embedding_scale=math.sqrt(config.size("hidden_size")),
        **traits,
    )


def _attention_scale(config: HfConfig) -> float | None:
    scalar = config.positive_number("query_pre_attn_scalar", 256.0)
    if scalar is None:
        raise ModelError("config.json: query_pre_attn_scalar is null")
    return scalar**-0.5


def _pattern(raw: Mapping[str, Any]) -> object:
    """Return the period of the layers without a window. Files of transformers 5 have it under a private name."""
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    return next((raw[name] for name in names if raw.get(name) is not None), 6)


def _ropes(config: HfConfig, max_position: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary embeddings of layers without and with a window."""
    theta, local = config.raw.get("rope_theta"), config.raw.get("rope_local_base_freq")
    ropes = config.ropes(max_position, 1e6 if theta is None else theta, 1e4 if local is None else local)
    # max_position_embeddings of Gemma 3 includes the linear scaling, as vLLM reads it too.
    full, window = (replace(r, original_max_position=0) if r.scaling == "linear" else r for r in ropes)
    return full, window


_KEYS = frozenset(("attention_bias", "hidden_activation"))
_KEYS_23 = _KEYS | {"sliding_window", "query_pre_attn_scalar", "final_logit_softcapping"}
GEMMA = Family(("GemmaForCausalLM",), _read_gemma, _KEYS, layer=SandwichLayer)
GEMMA2 = Family(("Gemma2ForCausalLM",), _read_gemma2, _KEYS_23 | {"attn_logit_softcapping"}, layer=SandwichLayer)
GEMMA3 = Family(
    ("Gemma3ForCausalLM",),
    _read_gemma3,
    _KEYS_23 | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
    layer=SandwichLayer,
)
