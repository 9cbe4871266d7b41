"""Models whose router scores experts by sigmoids, with a correction for the choice: GLM-4.5, dots.llm1, Solar Open,
Hunyuan 3 and MiniMax-M2. All but the last have shared experts and scale the weights, and the first three choose among
groups, as DeepSeek-V3 does."""

from __future__ import annotations

from typing import Any

from specbatch.errors import ModelError
from specbatch.models.checks import shown
from specbatch.models.config import ModelConfig, MoeConfig
from specbatch.models.families.family import Family
from specbatch.models.families.hf_config import MAX_EXPERTS, MTP_KEYS, WINDOW_HINT, HfConfig
from specbatch.models.families.llama import MIXTRAL_NAMES

_ACTIVATIONS = ("silu", "swish")


def _read_glm4_moe(config: HfConfig) -> ModelConfig:
    # The files name the layers that predict further tokens, and transformers does not load them.
    num_mtp_layers = config.num_mtp_layers(1)
    return _model_config(
        config,
        config.one_window(config.num_layers(), None),
        num_kv_heads=8,
        max_position=131072,
        eps=1e-5,
        partial=0.5,
        qkv_bias=config.flag("attention_bias"),
        qk_norm=config.flag("use_qk_norm"),
        num_mtp_layers=num_mtp_layers,
        moe=_experts(config, first=1, num_shared=1, norm_topk_prob=True),
    )


def _read_dots1(config: HfConfig) -> ModelConfig:
    num_layers, has_bias = config.num_layers(), config.flag("attention_bias")
    window = config.optional_size("sliding_window") if "sliding_window" in config.raw else 4096
    if window is not None and not config.flag("use_sliding_window", default=True):
        raise ModelError(f"config.json: use_sliding_window is false, but sliding_window is {window}", hint=WINDOW_HINT)
    first = config.count("max_window_layers", 62)
    return _model_config(
        config,
        config.windows(num_layers, window, "sliding_window is null", first),
        num_kv_heads=None if "num_key_value_heads" in config.raw else 32,
        max_position=2048,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        moe=_experts(config, first=0, num_shared=0, norm_topk_prob=False),
    )


def _read_solar_open(config: HfConfig) -> ModelConfig:
    return _model_config(
        config,
        config.one_window(config.num_layers(), None),
        num_kv_heads=8,
        head_dim=128,
        max_position=131072,
        eps=1e-5,
        theta=1e6,
        intermediate_size=config.size("moe_intermediate_size"),  # no layer has an MLP
        qkv_bias=config.flag("attention_bias"),
        moe=_experts(config, first=0, num_shared=1, norm_topk_prob=True),
    )


def _read_hy_v3(config: HfConfig) -> ModelConfig:
    num_layers, has_bias = config.num_layers(), config.flag("attention_bias")
    expert_size = config.size("moe_intermediate_size")
    layers = config.sparse_layers("mlp_layer_types", tuple(layer > 0 for layer in range(num_layers)))
    # Published files repeat the number of dense layers here, which transformers does not read.
    first = config.count("first_k_dense_replace", layers.count(False))
    if config.raw.get("first_k_dense_replace") is not None and layers != tuple(
        layer >= first for layer in range(num_layers)
    ):
        raise ModelError(f"config.json: first_k_dense_replace {first} and mlp_layer_types, or its default, differ")
    moe = config.experts(
        ("num_experts", "num_local_experts"),
        expert_size,
        layers,
        norm_topk_prob=True,
        shared_size=config.count("num_shared_experts", 1) * expert_size,
        shared_gate=False,
        shared_name="shared_mlp",
        scoring="sigmoid",
        scale=config.positive_number("router_scaling_factor", 2.826) or 1.0,
        router="router.gate",
        wide_router=True,
        correction_bias="expert_bias",
    )
    return _model_config(
        config,
        config.one_window(num_layers, None),
        num_kv_heads=8,
        head_dim=128,
        max_position=131072,
        eps=1e-5,
        theta=11158840.0,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        num_mtp_layers=config.num_mtp_layers(1),
        moe=moe,
    )


def _read_minimax_m2(config: HfConfig) -> ModelConfig:
    num_layers, head_dim = config.num_layers(), config.optional_size("head_dim") or 128
    turned = config.optional_size("rotary_dim")
    types = config.raw.get("attn_type_list") or []
    if not isinstance(types, list) or any(kind != 1 for kind in types):
        raise ModelError(
            f"config.json: attn_type_list is {shown(types)}; only 1 for each layer, softmax attention, is supported"
        )
    moe = config.experts(
        ("num_local_experts", "num_experts"),
        config.size("intermediate_size"),
        (True,) * num_layers,
        norm_topk_prob=True,
        **MIXTRAL_NAMES,
        scoring="sigmoid",
        correction_bias="e_score_correction_bias",
    )
    return _model_config(
        config,
        config.one_window(num_layers, None),
        num_kv_heads=8,
        head_dim=head_dim,
        max_position=196608,
        eos=200020,
        theta=5e6,
        partial=1.0 if turned is None else turned / head_dim,
        qk_norm=True,
        qk_norm_whole=True,
        num_mtp_layers=config.count("num_mtp_modules", 0),
        moe=moe,
    )


def _model_config(config: HfConfig, windows: tuple[int | None, ...], **values: Any) -> ModelConfig:
    activation = config.activation("hidden_act", only=_ACTIVATIONS)
    return config.model_config(windows, activation=activation, **values)


def _experts(config: HfConfig, first: int, num_shared: int, *, norm_topk_prob: bool) -> MoeConfig:
    """Read a mixture of experts as DeepSeek-V3 has it. The arguments are defaults: the first layer that has one, the
    number of shared experts, which are computed as one, and whether weights are divided by their sum."""
    expert_size = config.size("moe_intermediate_size")
    first = config.count("first_k_dense_replace", first)
    moe = config.experts(
        ("n_routed_experts", "num_local_experts"),
        expert_size,
        tuple(layer >= first for layer in range(config.num_layers())),
        norm_topk_prob=config.flag("norm_topk_prob", default=norm_topk_prob),
        shared_size=config.count("n_shared_experts", num_shared) * expert_size,
        shared_gate=False,
        shared_name="shared_experts",
        scoring="sigmoid",
        num_groups=config.optional_size("n_group", MAX_EXPERTS) or 1,
        topk_groups=config.optional_size("topk_group", MAX_EXPERTS) or 1,
        scale=config.positive_number("routed_scaling_factor", 1.0) or 1.0,
        wide_router=True,
        correction_bias="gate.e_score_correction_bias",
    )
    _check_groups(moe)
    return moe


def _check_groups(moe: MoeConfig) -> None:
    size, rest = divmod(moe.num_experts, moe.num_groups)
    if rest or (moe.num_groups > 1 and size < 2):
        raise ModelError(f"config.json: n_group {moe.num_groups} does not divide {moe.num_experts} experts into groups")
    if moe.topk_groups > moe.num_groups:
        raise ModelError(f"config.json: topk_group {moe.topk_groups} is more than n_group {moe.num_groups}")
    if moe.top_k > size * moe.topk_groups:
        raise ModelError(
            f"config.json: num_experts_per_tok {moe.top_k} is more than topk_group {moe.topk_groups} groups have"
        )


_ROUTER = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)}
_NEUTRAL: dict[str, tuple[Any, ...]] = {"mlp_bias": (False,), "qkv_bias": (False,)} | _ROUTER
_EXPERT_KEYS = frozenset(
    (
        *("n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        *("n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "attention_bias"),
    )
)
GLM4_MOE = Family(
    architectures=("Glm4MoeForCausalLM",),
    read=_read_glm4_moe,
    keys=_EXPERT_KEYS | {"first_k_dense_replace", "use_qk_norm", *MTP_KEYS},
    neutral=_NEUTRAL,
)
DOTS1 = Family(
    architectures=("Dots1ForCausalLM",),
    read=_read_dots1,
    keys=_EXPERT_KEYS | {"first_k_dense_replace", "sliding_window", "use_sliding_window", "max_window_layers"},
    neutral=_NEUTRAL,
)
SOLAR_OPEN = Family(
    architectures=("SolarOpenForCausalLM",),
    read=_read_solar_open,
    keys=_EXPERT_KEYS,
    neutral=_NEUTRAL,
)
HY_V3 = Family(
    architectures=("HYV3ForCausalLM",),
    read=_read_hy_v3,
    keys=frozenset(
        (
            *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts"),
            *("router_scaling_factor", "mlp_layer_types", "first_k_dense_replace", "attention_bias", *MTP_KEYS),
        )
    ),
    neutral={
        **_NEUTRAL,
        "norm_topk_prob": (True,),
        "enable_moe_fp32_combine": (True, False),
        # Published files have these, and transformers does not read them.
        "route_norm": (True,),
        "moe_router_use_sigmoid": (True,),
        "moe_router_enable_expert_bias": (True,),
        "qk_norm": (True,),
    },
)
MINIMAX_M2 = Family(
    architectures=("MiniMaxM2ForCausalLM",),
    read=_read_minimax_m2,
    keys=frozenset(
        (
            *("num_local_experts", "num_experts", "num_experts_per_tok", "rotary_dim", "attn_type_list"),
            *("num_mtp_modules", "mtp_transformer_layers", "use_mtp"),
        )
    ),
    neutral={
        **_NEUTRAL,
        "attention_bias": (False,),
        "norm_topk_prob": (True,),
        "use_routing_bias": (True,),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "layernorm_full_attention_beta": (1,),
        "layernorm_mlp_beta": (1,),
    },
)
