"""Families whose layers are those of Llama, with other traits: windows by layer, queries that grow with their position,
biases, an MLP without a gate, norms of queries and keys after their rotation, layers that do not rotate, multipliers,
fused projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specbatch.errors import ModelError
from specbatch.models.checks import mapping, number, shown, whole_number
from specbatch.models.config import ModelConfig, QueryGrowth
from specbatch.models.families.family import Family, TensorNames
from specbatch.models.families.hf_config import FULL, PLAIN_ACTIVATIONS, SLIDING, HfConfig, renamed_keys, windows_of

_ACTIVATIONS = ("silu", "swish")
_NEUTRAL: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "mlp_bias": (False,), "qkv_bias": (False,)}
_NO_QKV_BIAS: dict[str, tuple[Any, ...]] = {"qkv_bias": (False,)}
PHI3_NAMES = TensorNames(
    joined={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
)


def full_windows(config: HfConfig) -> tuple[int | None, ...]:
    """Return the windows of a model that has none. Raise ModelError if `layer_types` names other layers."""
    return config.one_window(config.num_layers(), None)


def _silu(config: HfConfig) -> Any:
    return config.activation("hidden_act", only=_ACTIVATIONS)


def _read_ministral(config: HfConfig) -> ModelConfig:
    window = config.optional_size("sliding_window") if "sliding_window" in config.raw else 4096
    windows = config.windows(config.num_layers(), window, "sliding_window is null")
    return config.model_config(windows, num_kv_heads=8, max_position=4096 * 32, eos=2, activation=_silu(config))


def _read_ministral3(config: HfConfig) -> ModelConfig:
    max_position = config.optional_size("max_position_embeddings") or 262144
    rope = config.raw.get("rope_scaling") or config.raw.get("rope_parameters")
    if not rope:
        rope = {
            **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        }
        config = HfConfig({**config.raw, "rope_parameters": rope}, config.generation)
    parameters = mapping(rope, "config.json: rope_parameters")
    beta, period = (parameters.get(key) for key in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    growth = None
    if beta is not None and number(beta, "config.json: llama_4_scaling_beta") != 0:
        growth = QueryGrowth(float(beta), whole_number(period, "config.json: original_max_position_embeddings"))
    return config.model_config(
        config.one_window(config.num_layers(), config.optional_size("sliding_window")),
        num_kv_heads=8,
        head_dim=128,
        max_position=max_position,
        eos=2,
        eps=1e-5,
        activation=_silu(config),
        query_growth=growth,
    )


def _read_exaone(config: HfConfig) -> ModelConfig:
    config = HfConfig(renamed_keys(config.raw, _EXAONE_KEYS), config.generation)
    has_bias = config.flag("attention_bias")
    return config.model_config(
        full_windows(config),
        num_kv_heads=8,
        max_position=4096,
        eos=361,
        eps=1e-5,
        theta=500000.0,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=config.flag("mlp_bias"),
        activation=_silu(config),
    )


def _read_internlm3(config: HfConfig) -> ModelConfig:
    attention, mlp = (
        any(config.flag(key) for key in keys) for keys in (("attention_bias", "qkv_bias"), ("mlp_bias", "bias"))
    )
    if attention != mlp:
        raise ModelError("config.json: qkv_bias and bias differ, which is not supported in an internlm3 model")
    return config.model_config(
        full_windows(config),
        num_kv_heads=2,
        head_dim=128,
        max_position=32768,
        eos=2,
        eps=1e-5,
        qkv_bias=attention,
        output_bias=attention,
        mlp_bias=mlp,
        activation=_silu(config),
    )


def _read_seed_oss(config: HfConfig) -> ModelConfig:
    return config.model_config(
        full_windows(config),
        num_kv_heads=8,
        head_dim=128,
        max_position=524288,
        eos=2,
        qkv_bias=config.flag("attention_bias", default=True),
        output_bias=config.flag("attention_out_bias"),
        mlp_bias=config.flag("mlp_bias"),
        activation=_silu(config),
    )


def _read_cwm(config: HfConfig) -> ModelConfig:
    if not (config.raw.get("rope_scaling") or config.raw.get("rope_parameters")):
        rope = {
            **{"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "high_freq_factor": 4.0},
            **{"low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
        }
        config = HfConfig({**config.raw, "rope_parameters": rope}, config.generation)
    num_layers = config.num_layers()
    types = config.layer_types(num_layers) or [SLIDING if i % 4 else FULL for i in range(num_layers)]
    window = config.optional_size("sliding_window") if "sliding_window" in config.raw else 8192
    return config.model_config(
        windows_of(types, window, "sliding_window is null"),
        num_kv_heads=8,
        head_dim=128,
        max_position=131072,
        eos=[128001, 128008, 128009],
        eps=1e-5,
        theta=1e6,
        mlp_bias=config.flag("mlp_bias"),
        activation=_silu(config),
    )


def _read_arcee(config: HfConfig) -> ModelConfig:
    has_bias = config.flag("attention_bias")
    return config.model_config(
        full_windows(config),
        max_position=4096,
        eos=128001,
        eps=1e-5,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=config.flag("mlp_bias"),
        activation=config.activation("hidden_act", only=PLAIN_ACTIVATIONS, default="relu2"),
        gated_mlp=False,
    )


def _read_helium(config: HfConfig) -> ModelConfig:
    return config.model_config(
        full_windows(config),
        num_kv_heads=20,
        head_dim=128,
        max_position=4096,
        eos=2,
        eps=1e-8,
        theta=100000.0,
        qkv_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
        activation=_silu(config),
        wide_norms=True,
        is_interleaved=True,
    )


def _read_hunyuan(config: HfConfig) -> ModelConfig:
    head_dim = config.optional_size("head_dim")
    for section in ("rope_scaling", "rope_parameters"):
        rope = mapping(config.raw.get(section) or {}, f"config.json: {section}")
        if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):
            # transformers does not compute "dynamic" frequencies then: it multiplies their base by a power of alpha.
            size = head_dim or config.size("hidden_size") // config.size("num_attention_heads")
            theta = rope.get("rope_theta", config.raw.get("rope_theta", 10000.0))
            base = number(theta, "config.json: rope_theta") * number(rope["alpha"], "config.json: alpha") ** (
                size / (size - 2)
            )
            config = HfConfig({**config.raw, section: {"rope_type": "default", "rope_theta": base}}, config.generation)
    has_bias = config.flag("attention_bias")
    return config.model_config(
        full_windows(config),
        max_position=2048,
        eos=2,
        eps=1e-5,
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=True,
        qk_norm_last=True,
        activation=_silu(config),
    )


def _read_ernie(config: HfConfig) -> ModelConfig:
    has_bias = config.flag("use_bias")
    return config.model_config(
        full_windows(config),
        num_kv_heads=2,
        head_dim=128,
        max_position=131072,
        eos=2,
        eps=1e-5,
        theta=500000.0,
        tied=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        activation=_silu(config),
        is_interleaved=True,
    )


def _read_smollm3(config: HfConfig) -> ModelConfig:
    num_layers, has_bias = config.num_layers(), config.flag("attention_bias")
    period = config.optional_size("no_rope_layer_interval") or 4
    given = config.raw.get("no_rope_layers")
    if given is None:
        given = [int((i + 1) % period != 0) for i in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or any(one not in (0, 1) for one in given):
        raise ModelError(f"config.json: no_rope_layers must be a list of {num_layers} times 0 or 1, not {shown(given)}")
    nope = tuple(not one for one in given)
    window = config.optional_size("sliding_window") if config.flag("use_sliding_window") else None
    types = config.layer_types(num_layers)
    if types is None:
        types = [SLIDING if window is not None and no_rope else FULL for no_rope in nope]
    return config.model_config(
        windows_of(types, window, "use_sliding_window is not true, or sliding_window is null"),
        num_kv_heads=4,
        max_position=32768,
        eos=128001,
        theta=2e6,
        tied=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=config.flag("mlp_bias"),
        activation=_silu(config),
        nope_layers=nope,
    )


def _read_granite(config: HfConfig) -> ModelConfig:
    return _granite(config, mlp_bias=config.flag("mlp_bias"))


def _read_granite_moe(config: HfConfig) -> ModelConfig:
    moe = config.experts(
        ("num_local_experts",),
        config.size("intermediate_size"),
        (True,) * config.num_layers(),
        norm_topk_prob=False,
        scoring="softmax_of_chosen",
        router="router.layer",
        block="block_sparse_moe",
        stacks=("input_linear.weight", "output_linear.weight"),
        shared_size=config.count("shared_intermediate_size", 0),
        shared_gate=False,
        shared_name="shared_mlp",
    )
    return _granite(config, moe=moe)


def _granite(config: HfConfig, **traits: Any) -> ModelConfig:
    has_bias = config.flag("attention_bias")
    read = config.model_config(
        full_windows(config),
        max_position=2048,
        eos=2,
        qkv_bias=has_bias,
        output_bias=has_bias,
        activation=_silu(config),
        attention_scale=config.positive_number("attention_multiplier", 1.0),
        logits_scale=1 / (config.positive_number("logits_scaling", 1.0) or 1.0),
        **traits,
    )
    residual = config.positive_number("residual_multiplier", 1.0) or 1.0
    return replace(
        read,
        embedding_scale=(config.positive_number("embedding_multiplier", 1.0) or 1.0) / residual,
        wide_embedding_scale=True,
        rms_norm_eps=read.rms_norm_eps / residual**2,
        residual_scale=residual,
    )


def _read_phi3(config: HfConfig) -> ModelConfig:
    rope = mapping(config.raw.get("rope_scaling") or {}, "config.json: rope_scaling")
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):  # older names
        raw = {**config.raw, "rope_scaling": {**rope, "rope_type": "longrope"}}
        config = HfConfig(raw, config.generation)
    if config.raw.get("original_max_position_embeddings") is None:
        config = HfConfig({**config.raw, "original_max_position_embeddings": 4096}, config.generation)
    return config.model_config(
        config.one_window(config.num_layers(), config.optional_size("sliding_window")),
        max_position=4096,
        eos=32000,
        eps=1e-5,
        partial=1.0,
        activation=_silu(config),
    )


_SECTIONS = ("parameters", "scaling")  # rope_parameters of transformers 5, and the older rope_scaling
MINISTRAL = Family(("MinistralForCausalLM",), _read_ministral, frozenset(("sliding_window",)), _NEUTRAL)
MINISTRAL3 = Family(
    ("Ministral3ForCausalLM",),
    _read_ministral3,
    frozenset(
        (
            "sliding_window",
            *(f"rope_{kind}.llama_4_scaling_beta" for kind in _SECTIONS),
            *(f"rope_{kind}.max_position_embeddings" for kind in _SECTIONS),
        )
    ),
    _NEUTRAL,
)
SEED_OSS = Family(
    ("SeedOssForCausalLM",),
    _read_seed_oss,
    frozenset(("attention_bias", "attention_out_bias", "mlp_bias")),
    _NO_QKV_BIAS,
)
CWM = Family(
    ("CwmForCausalLM",),
    _read_cwm,
    frozenset(("mlp_bias", "sliding_window")),
    {"attention_bias": (False,), "qkv_bias": (False,)},
)
ARCEE = Family(("ArceeForCausalLM",), _read_arcee, frozenset(("attention_bias", "mlp_bias")), _NO_QKV_BIAS)
HELIUM = Family(("HeliumForCausalLM",), _read_helium, frozenset(("attention_bias", "mlp_bias")), _NO_QKV_BIAS)
# What published files have in their parameters of a "dynamic" rotary embedding, of which only alpha is read.
_ALPHA_KEYS = ("alpha", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim")
HUNYUAN = Family(
    ("HunYuanDenseV1ForCausalLM",),
    _read_hunyuan,
    frozenset(("attention_bias", "eod_token_id", *(f"rope_{kind}.{key}" for kind in _SECTIONS for key in _ALPHA_KEYS))),
    {
        **{"mlp_bias": (False,), "qkv_bias": (False,), "use_qk_norm": (True,), "use_cla": (False,)},
        **{"num_experts": (1,), "num_shared_expert": (1,)},
    },
    names=TensorNames({"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}),
)
ERNIE4_5 = Family(("Ernie4_5ForCausalLM",), _read_ernie, frozenset(("use_bias",)), _NEUTRAL)
SMOLLM3 = Family(
    ("SmolLM3ForCausalLM",),
    _read_smollm3,
    frozenset(
        (
            *("attention_bias", "mlp_bias", "use_sliding_window", "sliding_window"),
            *("no_rope_layers", "no_rope_layer_interval"),
        )
    ),
    _NO_QKV_BIAS,
)
GRANITE = Family(
    ("GraniteForCausalLM",),
    _read_granite,
    frozenset(
        (
            *("attention_bias", "mlp_bias", "embedding_multiplier", "logits_scaling"),
            *("residual_multiplier", "attention_multiplier"),
        )
    ),
    _NO_QKV_BIAS,
)
_GRANITE_MOE = frozenset(
    (
        *("attention_bias", "embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"),
        *("num_local_experts", "num_experts_per_tok"),
    )
)
GRANITE_MOE = Family(
    ("GraniteMoeForCausalLM",), _read_granite_moe, _GRANITE_MOE, {"mlp_bias": (False,), "qkv_bias": (False,)}
)
GRANITE_MOE_SHARED = Family(
    ("GraniteMoeSharedForCausalLM",),
    _read_granite_moe,
    _GRANITE_MOE | {"shared_intermediate_size"},
    {"mlp_bias": (False,), "qkv_bias": (False,)},
    names=TensorNames(
        {"block_sparse_moe.shared_mlp.down_proj": "shared_mlp.output_linear"},
        {
            "shared_mlp.input_linear": (
                "block_sparse_moe.shared_mlp.gate_proj",
                "block_sparse_moe.shared_mlp.up_proj",
            )
        },
    ),
)
# Keys of published files by our names.
_EXAONE_KEYS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
EXAONE = Family(
    ("ExaoneForCausalLM", "LlamaForCausalLM"),
    _read_exaone,
    frozenset((*_EXAONE_KEYS, "attention_bias", "mlp_bias")),
    _NO_QKV_BIAS,
    names=TensorNames(
        {
            **{"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"},
            **{f"self_attn.{name}_proj": f"attn.attention.{name}_proj" for name in "qkv"},
            **{"self_attn.o_proj": "attn.attention.out_proj", "input_layernorm": "ln_1"},
            **{"post_attention_layernorm": "ln_2", "mlp.gate_proj": "mlp.c_fc_0"},
            **{"mlp.up_proj": "mlp.c_fc_1", "mlp.down_proj": "mlp.c_proj"},
        },
        layers="transformer.h.",
    ),
)
INTERNLM3 = Family(
    ("InternLM3ForCausalLM", "LlamaForCausalLM"),
    _read_internlm3,
    frozenset(("attention_bias", "qkv_bias", "mlp_bias", "bias")),
)
PHI3 = Family(("Phi3ForCausalLM",), _read_phi3, frozenset(("sliding_window",)), _NEUTRAL, names=PHI3_NAMES)
