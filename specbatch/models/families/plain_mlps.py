"""Families with LayerNorms that have biases, most of them with an MLP without a gate: StarCoder2, StableLM, Nemotron
and Minitron, Phi-1 to Phi-2, Pythia and other GPT-NeoX, GPT-2, GPT-J."""

from __future__ import annotations

from typing import Any

from specbatch.errors import ModelError
from specbatch.models.checks import shown
from specbatch.models.config import PRE_NORMS, ModelConfig
from specbatch.models.families.family import Family, TensorNames
from specbatch.models.families.hf_config import PLAIN_ACTIVATIONS, HfConfig, renamed_keys
from specbatch.models.families.layer_norms import LayerNormLayer
from specbatch.models.families.pre_norms import full_windows
from specbatch.models.rope import NO_ROPE


def _read_starcoder2(config: HfConfig) -> ModelConfig:
    has_bias = config.flag("use_bias", default=True)
    return _model_config(
        config,
        config.one_window(config.num_layers(), config.optional_size("sliding_window")),
        num_kv_heads=2,
        max_position=4096,
        eos=50256,
        eps_key="norm_epsilon",
        tied=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=has_bias,
        activation=config.activation("hidden_act", only=PLAIN_ACTIVATIONS, default="gelu_pytorch_tanh"),
    )


def _read_stablelm(config: HfConfig) -> ModelConfig:
    is_parallel = config.flag("use_parallel_residual")
    return _model_config(
        config,
        num_kv_heads=32,
        max_position=4096,
        eos=0,
        eps_key="layer_norm_eps",
        partial=0.25,
        qkv_bias=config.flag("use_qkv_bias"),
        activation=config.activation("hidden_act", only=("silu", "swish")),
        gated_mlp=True,
        norms=PRE_NORMS[:1] if is_parallel else PRE_NORMS,
        is_parallel=is_parallel,
    )


def _read_nemotron(config: HfConfig) -> ModelConfig:
    has_bias = config.flag("attention_bias")
    return _model_config(
        config,
        max_position=4096,
        eos=3,
        eps_key="norm_eps",
        partial=0.5,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=config.flag("mlp_bias"),
        activation=config.activation("hidden_act", only=PLAIN_ACTIVATIONS, default="relu2"),
        norm_offset=1.0,
    )


def _read_phi(config: HfConfig) -> ModelConfig:
    return _model_config(
        config,
        max_position=2048,
        eos=2,
        eps_key="layer_norm_eps",
        partial=0.5,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation=config.activation("hidden_act", only=PLAIN_ACTIVATIONS, default="gelu_new"),
        norms=PRE_NORMS[:1],
        is_parallel=True,
        lm_head_bias=True,
    )


def _read_gpt_neox(config: HfConfig) -> ModelConfig:
    raw = dict(config.raw)
    # transformers' class does not read the newer names outside of rope_parameters.
    for old, new, default in (("rotary_pct", "partial_rotary_factor", 0.25), ("rotary_emb_base", "rope_theta", 1e4)):
        value = default if raw.get(old) is None else raw[old]
        if raw.get(new) not in (None, value):
            raise ModelError(f"config.json: {new} is {shown(raw[new])}, but {old}, or its default, is {shown(value)}")
        raw[new] = value
    config = HfConfig(raw, config.generation)
    has_bias = config.flag("attention_bias", default=True)
    return _model_config(
        config,
        max_position=2048,
        eos=2,
        eps_key="layer_norm_eps",
        partial=0.25,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=True,
        activation=config.activation("hidden_act", only=PLAIN_ACTIVATIONS, default="gelu"),
        is_parallel=config.flag("use_parallel_residual", default=True),
    )


def _read_gpt2(config: HfConfig) -> ModelConfig:
    config = _renamed(config, max_position_embeddings=1024)
    return _model_config(
        config,
        max_position=1024,
        eos=50256,
        eps_key="layer_norm_epsilon",
        rope=NO_ROPE,
        tied=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation=config.activation("hidden_act", only=PLAIN_ACTIVATIONS),
        learned_positions=config.size("max_position_embeddings"),
    )


def _read_gptj(config: HfConfig) -> ModelConfig:
    config = _renamed(config)
    turned = config.optional_size("rotary_dim") if "rotary_dim" in config.raw else 64
    head_dim = config.size("hidden_size") // config.size("num_attention_heads")
    return _model_config(
        config,
        max_position=2048,
        eos=50256,
        eps_key="layer_norm_epsilon",
        partial=1.0 if turned is None else turned / head_dim,
        mlp_bias=True,
        activation=config.activation("hidden_act", only=PLAIN_ACTIVATIONS),
        norms=PRE_NORMS[:1],
        is_parallel=True,
        is_interleaved=True,
        lm_head_bias=True,
    )


def _renamed(config: HfConfig, **defaults: Any) -> HfConfig:
    """Return the configuration of a GPT-2 or GPT-J with our names of keys."""
    given = {key: value for key, value in config.raw.items() if value is not None}
    given.pop("intermediate_size", None)  # transformers reads n_inner only
    raw = {"hidden_act": "gelu_new", **defaults} | renamed_keys(given, _GPT2_KEYS)
    raw.setdefault("intermediate_size", 4 * HfConfig(raw).size("hidden_size"))
    return HfConfig(raw, config.generation)


def _model_config(config: HfConfig, windows: tuple[int | None, ...] | None = None, **values: Any) -> ModelConfig:
    defaults: dict[str, Any] = {"gated_mlp": False, "layer_norms": True, "norm_bias": True, "eps": 1e-5}
    return config.model_config(windows or full_windows(config), **(defaults | values))


_NEUTRAL: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "mlp_bias": (False,), "qkv_bias": (False,)}
STARCODER2 = Family(
    ("Starcoder2ForCausalLM",),
    _read_starcoder2,
    frozenset(("use_bias", "norm_epsilon", "sliding_window")),
    # Published files repeat the kinds of norm and MLP, which transformers does not read.
    _NEUTRAL | {"norm_type": ("layer_norm",), "mlp_type": ("default",)},
    LayerNormLayer,
    TensorNames({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
)
STABLELM = Family(
    ("StableLmForCausalLM",),
    _read_stablelm,
    frozenset(("use_parallel_residual", "use_qkv_bias", "layer_norm_eps")),
    _NEUTRAL,
    LayerNormLayer,
)
NEMOTRON = Family(
    ("NemotronForCausalLM",),
    _read_nemotron,
    frozenset(("attention_bias", "mlp_bias", "norm_eps")),
    {"qkv_bias": (False,)},
    LayerNormLayer,
)
PHI = Family(
    ("PhiForCausalLM",),
    _read_phi,
    frozenset(("layer_norm_eps",)),
    {"attention_bias": (True,), "mlp_bias": (True,), "qkv_bias": (True,)},
    LayerNormLayer,
    TensorNames(
        {
            **{"model.norm": "model.final_layernorm", "self_attn.o_proj": "self_attn.dense"},
            **{"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
        }
    ),
)
GPT_NEOX = Family(
    ("GPTNeoXForCausalLM",),
    _read_gpt_neox,
    frozenset(("attention_bias", "layer_norm_eps", "use_parallel_residual", "rotary_pct", "rotary_emb_base")),
    {"mlp_bias": (True,), "qkv_bias": (True,)},
    LayerNormLayer,
    TensorNames(
        {
            **{"model.embed_tokens": "gpt_neox.embed_in", "model.norm": "gpt_neox.final_layer_norm"},
            **{"lm_head": "embed_out", "self_attn.o_proj": "attention.dense"},
            **{"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"},
        },
        {"attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
        layers="gpt_neox.layers.",
        joins_heads={"attention.query_key_value": "query"},
    ),
)
# Names of keys in files by ours.
_GPT2_KEYS = {
    **{"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    **{"n_positions": "max_position_embeddings", "n_inner": "intermediate_size", "activation_function": "hidden_act"},
}
# transformers' classes do not read these. Positions of GPT-2 do not rotate, and the base of GPT-J's is fixed.
_OTHER_NAMES: dict[str, tuple[Any, ...]] = {
    **{"hidden_act": (), "partial_rotary_factor": ()},
    **{"rope_theta": (10000,), "rope_scaling": ({},), "rope_parameters": ({},)},
}
GPT2 = Family(
    ("GPT2LMHeadModel",),
    _read_gpt2,
    frozenset((*_GPT2_KEYS, "layer_norm_epsilon")),
    _OTHER_NAMES
    | {
        **{"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        "reorder_and_upcast_attn": (False, True),  # it changes the precision only
    },
    LayerNormLayer,
    TensorNames(
        {
            **{"model.embed_tokens": "transformer.wte", "model.embed_positions": "transformer.wpe"},
            **{"model.norm": "transformer.ln_f", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"},
            **{"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
        },
        {"attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
        layers="transformer.h.",
        transposed=frozenset(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
        optional="transformer.",
    ),
)
GPTJ = Family(
    ("GPTJForCausalLM",),
    _read_gptj,
    frozenset((*_GPT2_KEYS, "layer_norm_epsilon", "rotary_dim")),
    _OTHER_NAMES | {"scale_attn_weights": (True,), "rotary": (True,), "attention_bias": (False,), "mlp_bias": (True,)},
    LayerNormLayer,
    TensorNames(
        {
            **{"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "input_layernorm": "ln_1"},
            **{f"self_attn.{name}_proj": f"attn.{name}_proj" for name in "qkv"},
            **{"self_attn.o_proj": "attn.out_proj", "mlp.up_proj": "mlp.fc_in", "mlp.down_proj": "mlp.fc_out"},
        },
        layers="transformer.h.",
    ),
)
