"""OLMo 2 and 3, FlexOlmo (an OLMo 2 with experts), OLMoE and EXAONE 4. All but OLMoE have norms after attention and
after the MLP, and none before. OLMo 3 and the larger EXAONE 4 have windows in three of four layers. Norms of queries
and keys are over all heads in OLMo, over each head in EXAONE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specbatch.models.config import ModelConfig, MoeConfig
from specbatch.models.decoder_layer import MLP, Attention, DecoderLayer, ForwardPass
from specbatch.models.families.family import Family
from specbatch.models.families.hf_config import FULL, SLIDING, HfConfig, windows_of
from specbatch.models.layers import RMSNorm, Rotary
from specbatch.models.linears.linear import Residual
from specbatch.models.mixture import mixture_of
from specbatch.models.stages import Stages
from specbatch.models.weight_loader import WeightLoader

_ACTIVATIONS = ("silu", "swish")
_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")


class OlmoLayer(DecoderLayer):
    """A layer with norms of the outputs of attention and MLP, before the residual is added."""

    def __init__(self, config: ModelConfig, layer: int, weights: WeightLoader, prefix: str, rotary: Rotary) -> None:
        self.attention = Attention(config, layer, weights, f"{prefix}self_attn.", rotary)
        self._attention_norm, self._mlp_norm = (
            weights.norm(f"{prefix}{name}", config.rms_norm_eps, is_wide=config.wide_norms) for name in _NORMS
        )
        self.mixture = mixture_of(config, layer, weights, prefix)
        self._mlp = self.mixture or MLP(config, weights, f"{prefix}mlp.")

    def queries(self, x_TI: Tensor, step: ForwardPass) -> Tensor:
        return self.attention.queries(x_TI, step, None)

    def after_attention(
        self,
        attended_THD: Tensor,
        residual_TE: Tensor,
        next_norm: RMSNorm | None = None,
        counts: Sequence[int] | None = None,
    ) -> Stages[Residual]:
        y_TE = self.attention.output(attended_THD)
        del attended_THD
        if self.mixture is not None and self.mixture.travels:
            x_TE, _ = self._attention_norm.added(y_TE, residual_TE, None)
            y_TE = yield from self.mixture.travel(x_TE, counts)
            return Residual(*self._mlp_norm.added(y_TE, x_TE, next_norm))
        yield
        x_TE, _ = self._attention_norm.added(y_TE, residual_TE, None)
        y_TE = self._mlp(x_TE)
        yield
        return Residual(*self._mlp_norm.added(y_TE, x_TE, next_norm))


def _read_olmo2(config: HfConfig) -> ModelConfig:
    return _model_config(config, max_position=2048, eos=50279, eps=1e-5, norms=_NORMS, wide_norms=True)


def _read_olmo3(config: HfConfig) -> ModelConfig:
    max_position, theta = config.optional_size("max_position_embeddings") or 2048, config.raw.get("rope_theta")
    # transformers reads rope_theta for the layers without a window only.
    rope, window_rope = config.ropes(max_position, 500000.0 if theta is None else theta, 500000.0)
    return _model_config(
        config,
        config.windows_but_each(4, 4096),
        max_position=max_position,
        eos=50279,
        eps=1e-5,
        rope=rope,
        window_rope=window_rope,
        norms=_NORMS,
        wide_norms=True,
    )


def _read_flex_olmo(config: HfConfig) -> ModelConfig:
    experts = _experts(config)
    return _model_config(
        config, max_position=4096, eos=100257, theta=500000.0, norms=_NORMS, wide_norms=True, moe=experts
    )


def _read_olmoe(config: HfConfig) -> ModelConfig:
    return _model_config(config, max_position=4096, eos=50279, eps=1e-5, moe=_experts(config))


def _read_exaone4(config: HfConfig) -> ModelConfig:
    window = config.optional_size("sliding_window") if "sliding_window" in config.raw else 4096
    num_layers, pattern = config.num_layers(), config.raw.get("sliding_window_pattern", 4)
    types = config.layer_types(num_layers)
    if types is None:
        period = 0 if window is None or not pattern else config.size("sliding_window_pattern") if pattern != 4 else 4
        types = [SLIDING if period and (i + 1) % period else FULL for i in range(num_layers)]
    windows = windows_of(types, window, "sliding_window is null")
    nope = tuple(window is not None and kind == FULL for kind in types)
    return config.model_config(
        windows,
        num_kv_heads=32,
        max_position=2048,
        eos=2,
        eps=1e-5,
        qk_norm=True,
        activation=config.activation("hidden_act", only=_ACTIVATIONS),
        norms=_NORMS,
        nope_layers=nope,
    )


def _model_config(config: HfConfig, windows: tuple[int | None, ...] | None = None, **values: Any) -> ModelConfig:
    has_bias = config.flag("attention_bias")
    return config.model_config(
        windows or config.one_window(config.num_layers(), None),
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        qk_norm_whole=True,
        activation=config.activation("hidden_act", only=_ACTIVATIONS),
        **values,
    )


def _experts(config: HfConfig) -> MoeConfig:
    return config.experts(
        ("num_experts", "num_local_experts"),
        config.size("intermediate_size"),
        (True,) * config.num_layers(),
        norm_topk_prob=config.flag("norm_topk_prob"),
    )


_NEUTRAL: dict[str, tuple[Any, ...]] = {"mlp_bias": (False,), "qkv_bias": (False,), "clip_qkv": ()}
_EXPERT_KEYS = frozenset(("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"))
OLMO2 = Family(
    architectures=("Olmo2ForCausalLM",),
    read=_read_olmo2,
    keys=frozenset(("attention_bias",)),
    neutral=_NEUTRAL,
    layer=OlmoLayer,
)
OLMO3 = Family(
    architectures=("Olmo3ForCausalLM",),
    read=_read_olmo3,
    keys=frozenset(("attention_bias", "sliding_window")),
    neutral=_NEUTRAL,
    layer=OlmoLayer,
)
FLEX_OLMO = Family(
    architectures=("FlexOlmoForCausalLM",),
    read=_read_flex_olmo,
    keys=_EXPERT_KEYS | {"attention_bias"},
    neutral=_NEUTRAL,
    layer=OlmoLayer,
)
OLMOE = Family(
    architectures=("OlmoeForCausalLM",),
    read=_read_olmoe,
    keys=_EXPERT_KEYS | {"attention_bias"},
    neutral=_NEUTRAL,
)
EXAONE4 = Family(
    architectures=("Exaone4ForCausalLM",),
    read=_read_exaone4,
    keys=frozenset(("sliding_window", "sliding_window_pattern")),
    neutral={"attention_bias": (False,), "mlp_bias": (False,), "qkv_bias": (False,)},
    layer=OlmoLayer,
)
