"""Small random models of the decoders of transformers, by the names of their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 264  # the tokenizer of bytes has as many tokens
# Sizes by key. A configuration gets those that it has.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "head_dim", "index_topk", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    "num_key_value_heads": 2,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 12,
    "rotary_dim": 4,
    "sliding_window": 9,
    "num_kv_shared_layers": 0,
    "eos_token_id": 0,
    "bos_token_id": 1,
    "pad_token_id": 2,
}
_MLA = {"num_key_value_heads": 4}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 100.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 100.0,
}
_PLAIN = """
    afmoe apertus apertus1p5_text arcee aria_text beam bitnet codegen ctrl cwm dots1 ernie4_5 ernie4_5_moe exaone
    exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox
    gpt_oss gptj granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama mellum minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral modernbert-decoder moshi nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3
    phimoe qwen2 qwen2_moe qwen3 qwen3_moe sarvam_moe seed_oss smollm3 solar_open starcoder2 vaultgemma
"""
# The model types and changes of keys of variants that run with transformers' code.
EQUAL: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in _PLAIN.split()}
EQUAL |= {name: (name, _MLA) for name in ("deepseek_v2", "glm4_moe_lite", "sarvam_mla")}
EQUAL |= {name: (name, _MLA | {"head_dim": 4}) for name in ("axk1", "deepseek_v3", "youtu")}
EQUAL |= {name: (name, {"logit_scale": 1.0}) for name in ("cohere", "cohere2", "cohere2_moe")}
EQUAL |= {
    "granite": (
        "granite",
        {"attention_multiplier": 0.3, "logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    ),
    "minicpm3": ("minicpm3", _MLA | {"scale_emb": 2.0}),
    "gemma2-caps": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    "phi3-partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    "opt-norm-after": ("opt", {"do_layer_norm_before": False}),
    "gpt2-scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
}
_FACTORS = [1.0, 1.5]
_NO_INTERFACE = "bloom falcon falcon_mamba jamba mamba mpt qwen3_5_text qwen3_next rwkv stablelm xglm"
# Variants that are refused, with a part of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    **{name: (name, {}, "cannot call another attention function") for name in _NO_INTERFACE.split()},
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 100.0,
                "short_factor": _FACTORS * 2,
                "long_factor": _FACTORS[::-1] * 2,
                "original_max_position_embeddings": 64,
            },
        },
        "rotary embeddings are of the type 'longrope'",
    ),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}},
        "rotary embeddings are of the type 'dynamic'",
    ),
    "gemma4_text": ("gemma4_text", {}, "different head_dim"),
    "mimo_v2_flash": ("mimo_v2_flash", {}, "different num_kv_heads"),
    "deepseek_v32": ("deepseek_v32", _MLA, "DynamicIndexedLayer"),
    "minimax": ("minimax", {}, "LinearAttentionLayer"),
    "recurrent_gemma": ("recurrent_gemma", {}, "LinearAttentionLayer"),
    "diffllama": ("diffllama", {}, "attends more than once"),
    "hrm_text": ("hrm_text", {}, "attends more than once"),
    "doge": ("doge", {}, "a mask that the model makes itself"),
    "llama4_text": ("llama4_text", {}, "its mask"),
    "bert": ("bert", {}, "neither causal nor that of a sliding window"),
}


def small_config(model_type: str, **changes: Any) -> Any:
    """Return transformers' configuration with small sizes. Layers have each of the types that the default has."""
    default = AutoConfig.for_model(model_type).to_dict()
    values = {key: value for key, value in _SIZES.items() if key in default} | changes
    for key, kinds in default.items():
        if key.endswith("layer_types") and isinstance(kinds, list) and key not in changes:
            values[key] = (list(dict.fromkeys(kinds)) * 4)[: _SIZES["num_hidden_layers"]]
    return AutoConfig.for_model(model_type, **values)


def write_model(folder: Path, model_type: str, changes: dict[str, Any], seed: int = 0) -> Path:
    """Write a model of random weights to `folder`. Norms and biases are random, too: as they are initialised they would
    hide mistakes."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(small_config(model_type, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def own_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Read the model with transformers' own attention: of its ways, only eager applies soft caps and sinks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # transformers' grouped GEMM has no float64
    return model
