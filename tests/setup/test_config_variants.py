"""Each key of a config.json: the logits are those of transformers, or the key is refused by name. Prompts are longer
than the sliding windows and than the lengths that rope scaling begins at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specbatch.errors import ModelError
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.setup.build import build_decoder
from tests.oracle.spans import piecewise_logits
from tests.tiny_checkpoint import random_state

LENGTH = 70
BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "eos_token_id": 1,
}
SLIDING, FULL = "sliding_attention", "full_attention"
TYPES = [FULL, SLIDING, FULL]
WINDOW = {"sliding_window": 9, "head_dim": 8}  # transformers' Ministral cannot do without head_dim
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
# Keys that a family's files have besides those of BASE.
BASE_OF: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "swiglu_limit": 7.0, "hidden_act": "silu",
    },
    "hy_v3": {**MOE, "head_dim": 12},
    "granite": {"attention_multiplier": 0.3},
    **{
        family: {"pad_token_id": None, "bos_token_id": None, "head_dim": 8}
        for family in ("glm", "glm4", "cohere", "cohere2", "phi3", "smollm3", "arcee", "ministral3", "gpt_neox")
    },
    "cohere2": {"pad_token_id": None, "bos_token_id": None, "logit_scale": 0.5},
    "gpt_neox": {"pad_token_id": None, "bos_token_id": None, "head_dim": 8, "rotary_emb_base": 500},
}  # fmt: skip
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "hidden_activation": "gelu_pytorch_tanh"}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}

# Family, changes of config.json (`...`: the key is left out), and words of the error; none: it is equal.
VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "mistral-layer-types": ("mistral", {**WINDOW, "layer_types": TYPES}, ()),
    "mistral-all-full": ("mistral", {**WINDOW, "layer_types": [FULL] * 3}, ()),
    "mistral-all-sliding": ("mistral", {**WINDOW, "layer_types": [SLIDING] * 3}, ()),
    "mistral-window": ("mistral", {"sliding_window": 9}, ()),
    "mistral-window-1": ("mistral", {"sliding_window": 1}, ()),
    "mistral-no-window": ("mistral", {"sliding_window": None}, ()),
    "mistral-types-without-window": (
        "mistral", {"sliding_window": None, "layer_types": TYPES}, ("layer_types", "sliding_window is null")
    ),
    "mistral-window-off": ("mistral", {"sliding_window": 9, "use_sliding_window": False}, ("use_sliding_window", "9")),
    "mistral-chunked": (
        "mistral", {"sliding_window": 9, "layer_types": ["chunked_attention"] * 3}, ("chunked_attention",)
    ),
    "mistral-head-dim": ("mistral", {"head_dim": 20, "sliding_window": None}, ()),
    "mistral-attention-bias": ("mistral", {"attention_bias": True}, ("attention_bias", "mistral")),
    "qwen2-layer-types": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}, ()
    ),
    "qwen2-max-window-layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}, ()),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False, "sliding_window": 9, "max_window_layers": 0}, ()),
    "qwen2-types-window-off": (
        "qwen2", {"use_sliding_window": False, "sliding_window": 9, "layer_types": TYPES}, ("use_sliding_window",)
    ),
    "qwen2-no-kv-heads": ("qwen2", {"num_key_value_heads": None}, ()),
    "qwen3-layer-types": (
        "qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "layer_types": TYPES}, ()
    ),
    "qwen3-bias": ("qwen3", {"head_dim": 16, "attention_bias": True}, ()),
    "llama-sliding-window": ("llama", {"sliding_window": 9}, ()),  # transformers' class does not have it: noted
    "llama-layer-types": ("llama", {"sliding_window": 9, "layer_types": TYPES}, ("layer_types", "llama")),
    "llama-full-types": ("llama", {"layer_types": [FULL] * 3}, ()),
    "attention-bias": ("llama", {"attention_bias": True}, ()),
    "mlp-bias": ("llama", {"mlp_bias": True}, ()),
    "head-dim": ("llama", {"head_dim": 12}, ()),
    "kv-heads-left-out": ("llama", {"num_key_value_heads": ...}, ()),
    "kv-heads-1": ("llama", {"num_key_value_heads": 1}, ()),
    "tied": ("llama", {"tie_word_embeddings": True}, ()),
    "rms-eps": ("llama", {"rms_norm_eps": 0.1}, ()),
    "rms-eps-left-out": ("llama", {"rms_norm_eps": ...}, ()),
    "rope-theta-left-out": ("llama", {"rope_theta": ...}, ()),
    "swish": ("llama", {"hidden_act": "swish"}, ()),
    "gelu": ("llama", {"hidden_act": "gelu"}, ("hidden_act", "gelu")),
    "relu2": ("llama", {"hidden_act": "relu2"}, ("hidden_act",)),
    "hidden-activation": ("llama", {"hidden_activation": "gelu_pytorch_tanh"}, ("hidden_activation",)),
    "no-cache": ("llama", {"use_cache": False}, ()),
    "torch-dtype": ("llama", {"torch_dtype": "float16"}, ()),
    "dtype": ("llama", {"dtype": "bfloat16"}, ()),
    "pretraining-tp": ("llama", {"pretraining_tp": 2}, ()),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}, ()),
    "llama3": ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, ()),
    "yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", **YARN}}, ()),
    "yarn-max-position": (
        "llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16}, ()
    ),
    "yarn-mscale": ("llama", {"rope_scaling": {"type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.3}}, ()),
    "rope-parameters": (
        "llama", {"rope_theta": ..., "rope_parameters": {"rope_type": "yarn", "rope_theta": 300.0, **YARN}}, ()
    ),
    "rope-parameters-and-theta": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, ()),
    "both-ropes": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "yarn", **YARN}},
        (),
    ),
    "both-types": ("llama", {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, ()),
    "default-rope-with-factor": ("llama", {"rope_scaling": {"rope_type": "default", "factor": 2.0}}, ()),  # noted
    "dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ()),
    "proportional": ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 9.0}}, ("proportional",)),
    "nested-rope": (
        "mistral", {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 9.0}}}, ("full_attention",)
    ),
    "partial-rotary": ("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
    "partial-rotary-in-rope": (
        "llama", {"rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}, ("partial_rotary_factor",)
    ),
    "not-causal": ("llama", {"is_causal": False}, ("is_causal",)),
    "causal": ("llama", {"is_causal": True}, ()),
    "per-layer": ("llama", {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}, ("per_layer_config",)),
    "attn-softcap": ("llama", {"attn_logit_softcapping": 5.0}, ("attn_logit_softcapping",)),
    "no-softcap": ("llama", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, ()),
    "final-softcap": ("llama", {"final_logit_softcapping": 5.0}, ("final_logit_softcapping",)),
    "attention-multiplier": ("llama", {"attention_multiplier": 0.5}, ("attention_multiplier",)),
    "logit-scale": ("llama", {"logit_scale": 0.25}, ("logit_scale",)),
    "logits-scaling": ("llama", {"logits_scaling": 8.0}, ("logits_scaling",)),
    "residual-multiplier": ("llama", {"residual_multiplier": 0.5}, ("residual_multiplier",)),
    "embedding-multiplier": ("llama", {"embedding_multiplier": 12}, ("embedding_multiplier",)),
    "qk-norm": ("llama", {"use_qk_norm": True}, ("use_qk_norm",)),
    "experts": ("llama", {"num_local_experts": 8}, ("num_local_experts",)),
    "vision": ("llama", {"vision_config": {"hidden_size": 8}}, ("vision_config",)),
    "gemma": ("gemma", {"head_dim": 12, "hidden_act": "gelu", "rope_theta": ...}, ()),
    "gemma-hidden-activation": ("gemma", {"head_dim": 12, "hidden_act": "gelu_pytorch_tanh"}, ()),
    "gemma-silu": ("gemma", {"head_dim": 12, "hidden_act": "silu"}, ("hidden_act", "silu")),
    "gemma-untied-biases": (
        "gemma", {"head_dim": 12, "tie_word_embeddings": False, "attention_bias": True, "num_key_value_heads": 1}, ()
    ),
    "gemma-layer-types": (
        "gemma", {"head_dim": 12, "sliding_window": 9, "layer_types": TYPES}, ("layer_types", "gemma")
    ),
    "gemma2": ("gemma2", {**GEMMA, "sliding_window": 9}, ()),
    "gemma2-caps": (
        "gemma2", {**GEMMA, "sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}, ()
    ),
    "gemma2-cap-0": ("gemma2", {**GEMMA, "attn_logit_softcapping": 0}, ("attn_logit_softcapping", "above 0")),
    "gemma2-no-caps": (
        "gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None}, ()
    ),
    "gemma2-layer-types": ("gemma2", {**GEMMA, "sliding_window": 9, "layer_types": TYPES}, ()),
    "gemma2-types-without-window": (
        "gemma2", {**GEMMA, "sliding_window": None, "layer_types": TYPES}, ("layer_types", "sliding_window is null")
    ),
    "gemma2-no-window": ("gemma2", {**GEMMA, "sliding_window": None}, ("layer_types", "sliding_window is null")),
    "gemma2-linear": ("gemma2", {**GEMMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, ()),
    "gemma2-bidirectional": ("gemma2", {**GEMMA, "use_bidirectional_attention": True}, ("bidirectional",)),
    "gemma2-relu": ("gemma2", {**GEMMA, "hidden_activation": "relu"}, ("hidden_activation", "relu")),
    "gemma3": (
        "gemma3_text",
        {**GEMMA, "sliding_window": 9, "sliding_window_pattern": 3, "rope_local_base_freq": 50.0},
        (),
    ),
    "gemma3-defaults": ("gemma3_text", {**GEMMA, "sliding_window": 9, "rope_theta": ...}, ()),
    "gemma3-linear": (
        "gemma3_text",
        {**GEMMA, "sliding_window": 9, "layer_types": TYPES, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        (),
    ),
    "gemma3-rope-parameters": (
        "gemma3_text",
        {
            **GEMMA, "rope_theta": ..., "sliding_window": 9, "layer_types": TYPES,
            "rope_parameters": {
                FULL: {"rope_type": "yarn", "rope_theta": 300.0, **YARN},
                SLIDING: {"rope_type": "default", "rope_theta": 20.0},
            },
        },
        (),
    ),
    "gemma3-one-rope-parameter": (
        "gemma3_text",
        {
            **GEMMA, "rope_theta": ..., "sliding_window": 9, "layer_types": TYPES,
            "rope_parameters": {FULL: {"rope_type": "linear", "factor": 2.0}},
        },
        (),
    ),
    # transformers' class wants parameters by layer type, and does not read others.
    "gemma3-flat-rope-parameters": (
        "gemma3_text",
        {**GEMMA, "rope_theta": ..., "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        ("rope_parameters", "factor"),
    ),
    "gemma3-cap": ("gemma3_text", {**GEMMA, "final_logit_softcapping": 1.5}, ()),
    # transformers' class has this key and does not read it.
    "gemma3-score-cap": ("gemma3_text", {**GEMMA, "attn_logit_softcapping": 2.0}, ("attn_logit_softcapping",)),
    "gemma3-vision": ("gemma3_text", {**GEMMA, "vision_config": {"hidden_size": 8}}, ("vision_config",)),
    "gpt-oss": ("gpt_oss", {"sliding_window": 9}, ()),
    "gpt-oss-defaults": (
        "gpt_oss",
        {
            "num_local_experts": ..., "num_experts": 6,
            "rms_norm_eps": ..., "rope_theta": ..., "swiglu_limit": ..., "hidden_act": ..., "num_key_value_heads": 3,
        },
        (),
    ),
    "gpt-oss-layer-types": ("gpt_oss", {"sliding_window": 9, "layer_types": TYPES}, ()),
    "gpt-oss-no-window": ("gpt_oss", {"sliding_window": None}, ("layer_types", "sliding_window is null")),
    "gpt-oss-rope": (
        "gpt_oss", {"rope_scaling": {"rope_type": "yarn", "beta_fast": 4.0, "truncate": False, **YARN}}, ()
    ),
    "gpt-oss-plain-rope": ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, ()),
    "gpt-oss-no-bias": ("gpt_oss", {"attention_bias": False}, ()),
    "gpt-oss-limit": ("gpt_oss", {"swiglu_limit": 5.0}, ("swiglu_limit", "5.0")),
    "gpt-oss-alpha": ("gpt_oss", {"swiglu_alpha": 1.5}, ("swiglu_alpha", "1.5")),
    "gpt-oss-gelu": ("gpt_oss", {"hidden_act": "gelu"}, ("hidden_act", "gelu")),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}, ()),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 9}, ()),
    "qwen3-moe": ("qwen3_moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}, ()),
    "qwen3-moe-dense-layers": (
        "qwen3_moe", {**MOE, "head_dim": 16, "mlp_only_layers": [0], "decoder_sparse_step": 2}, ()
    ),
    "qwen3-moe-window": ("qwen3_moe", {**MOE, "head_dim": 16, "use_sliding_window": True, "sliding_window": 9}, ()),
    "qwen3-moe-equal-types": (
        "qwen3_moe",
        {**MOE, "head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING] * 3},
        (),
    ),
    "qwen2-moe-layer-types": (
        "qwen2_moe",
        {
            **MOE, "shared_expert_intermediate_size": 8,
            "use_sliding_window": True, "sliding_window": 9, "layer_types": TYPES,
        },
        (),
    ),
    "qwen2-moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 40, "norm_topk_prob": True}, ()),
    "qwen2-moe-no-bias": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 8, "qkv_bias": False}, ()),
    "mixtral-no-theta": (
        "mixtral",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
            "rms_norm_eps": ..., "rope_theta": ...,
        },
        (),
    ),
    "olmo2": ("olmo2", {"num_key_value_heads": 6, "rms_norm_eps": ...}, ()),
    "olmo3": ("olmo3", {"sliding_window": 9}, ()),
    "olmo3-types": ("olmo3", {"sliding_window": 9, "layer_types": TYPES, "rope_theta": ...}, ()),
    "olmo3-yarn": ("olmo3", {"sliding_window": 9, "rope_scaling": {"rope_type": "yarn", **YARN}}, ()),
    "olmo3-rope-parameters": (
        "olmo3",
        {
            "sliding_window": 9, "rope_theta": ...,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        (),
    ),
    "flex-olmo": (
        "flex_olmo",
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "pad_token_id": None},
        (),
    ),
    "mellum": ("mellum", {**MOE, "head_dim": 12, "rope_theta": ...}, ()),
    "mellum-types": (
        "mellum",
        {
            **MOE, "head_dim": 12, "rope_theta": ..., "sliding_window": 9, "layer_types": TYPES,
            "mlp_layer_types": ["dense", "sparse", "sparse"], "norm_topk_prob": False,
            "rope_parameters": {
                FULL: {"rope_type": "yarn", "rope_theta": 500.0, **YARN},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        (),
    ),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}, ()),
    "olmoe-biases": (
        "olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True, "norm_topk_prob": True}, ()
    ),
    "glm4-moe": ("glm4_moe", {**ROUTED, "attention_bias": True, "head_dim": 16}, ()),
    "glm4-moe-groups": (
        "glm4_moe", {**ROUTED, **GROUPS, "use_qk_norm": True, "head_dim": 16, "norm_topk_prob": False}, ()
    ),
    "glm4-moe-rope": (
        "glm4_moe", {**ROUTED, "head_dim": 16, "rope_theta": 500.0, "partial_rotary_factor": 0.25}, ()
    ),
    "glm4-moe-whole-heads": ("glm4_moe", {**ROUTED, "head_dim": 16, "partial_rotary_factor": 1.0}, ()),
    "glm4-moe-yarn": ("glm4_moe", {**ROUTED, "head_dim": 16, "rope_scaling": {"type": "yarn", **YARN}}, ()),
    "glm4-moe-llama3": (
        "glm4_moe", {**ROUTED, "head_dim": 32, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, ()
    ),
    "glm4-moe-all-dense": ("glm4_moe", {**ROUTED, "head_dim": 16, "first_k_dense_replace": 3}, ()),
    "glm4-moe-scoring": ("glm4_moe", {**ROUTED, "head_dim": 16, "scoring_func": "sigmoid"}, ()),
    "llama-partial-rotary": ("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
    "dots1": ("dots1", {**ROUTED, **GROUPS, "n_shared_experts": 2, "sliding_window": None}, ()),
    "dots1-window": ("dots1", {**ROUTED, "n_shared_experts": 1, "sliding_window": 9, "max_window_layers": 1}, ()),
    "dots1-types": ("dots1", {**ROUTED, "n_shared_experts": 1, "sliding_window": 9, "layer_types": TYPES}, ()),
    "solar-open": ("solar_open", {**ROUTED, **GROUPS, "head_dim": 12}, ()),
    "hy-v3": ("hy_v3", {**MOE, "head_dim": 12}, ()),
    "hy-v3-published": (
        "hy_v3",
        {
            **MOE, "head_dim": 12, "first_k_dense_replace": 1, "route_norm": True, "qk_norm": True,
            "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True,
        },
        (),
    ),
    "hy-v3-2-dense": ("hy_v3", {"first_k_dense_replace": 2}, ("first_k_dense_replace 2", "mlp_layer_types")),
    "hy-v3-no-norm": ("hy_v3", {"route_norm": False}, ("route_norm", "hy_v3")),
    "hy-v3-softmax": ("hy_v3", {"moe_router_use_sigmoid": False}, ("moe_router_use_sigmoid", "hy_v3")),
    "hy-v3-types": (
        "hy_v3",
        {**MOE, "head_dim": 12, "mlp_layer_types": ["sparse", "dense", "sparse"], "router_scaling_factor": 0.5},
        (),
    ),
    "minimax-m2": ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12}, ()),
    "minimax-m2-rotary": (
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12, "rotary_dim": 4, "use_qk_norm": True},
        (),
    ),
    "longrope-short-row": (
        "llama",
        {
            "rope_scaling": {"type": "longrope", "factor": 2.0, "long_factor": [2.0] * 4, "short_factor": [1.5] * 4},
            "original_max_position_embeddings": 128,
        },
        (),
    ),
    "longrope-3-factors": (
        "llama",
        {"rope_scaling": {"type": "longrope", "factor": 2.0, "long_factor": [2.0] * 3, "short_factor": [1.0] * 4}},
        ("short_factor", "4 numbers"),
    ),
    "longrope-no-factors": ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, ("short_factor",)),
    "ministral-types": ("ministral", {**WINDOW, "layer_types": TYPES}, ()),
    "ministral-all": ("ministral", WINDOW, ()),
    "ministral3": ("ministral3", {"rope_theta": ...}, ()),
    "ministral3-window": ("ministral3", {"sliding_window": 9}, ()),
    "ministral3-no-growth": (
        "ministral3",
        {"rope_theta": ..., "rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.0, **YARN}},
        (),
    ),
    "ministral3-growth": (
        "ministral3",
        {"rope_theta": ..., "rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.5, **YARN}},
        (),
    ),
    "seed-oss": ("seed_oss", {"head_dim": 8, "attention_out_bias": True, "attention_bias": False}, ()),
    "seed-oss-mlp-bias": ("seed_oss", {"head_dim": 8, "mlp_bias": True}, ()),
    "cwm": ("cwm", {"sliding_window": 9, "head_dim": 8}, ()),
    "cwm-types": ("cwm", {"head_dim": 8, "sliding_window": 9, "layer_types": TYPES, "mlp_bias": True}, ()),
    "cwm-no-window": ("cwm", {"sliding_window": None}, ("layer_types", "sliding_window is null")),
    "arcee-gelu": ("arcee", {"hidden_act": "gelu"}, ()),
    "arcee-silu-bias": ("arcee", {"hidden_act": "silu", "mlp_bias": True, "attention_bias": True}, ()),
    "arcee-tanh": ("arcee", {"hidden_act": "tanh"}, ("hidden_act", "tanh")),
    "helium": ("helium", {"head_dim": 8}, ()),
    "helium-bias": ("helium", {"head_dim": 8, "attention_bias": True}, ()),
    "hunyuan-alpha": (
        "hunyuan_v1_dense", {"head_dim": 8, "rope_scaling": {"type": "dynamic", "alpha": 9.0, "factor": 1.0}}, ()
    ),
    "hunyuan-dynamic": (
        "hunyuan_v1_dense", {"head_dim": 8, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ()
    ),
    "hunyuan-no-norm": ("hunyuan_v1_dense", {"head_dim": 8, "use_qk_norm": False}, ("use_qk_norm",)),
    "ernie-bias": ("ernie4_5", {"head_dim": 8, "use_bias": True, "tie_word_embeddings": False}, ()),
    "smollm3-layers": ("smollm3", {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True}, ()),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 9, "no_rope_layer_interval": 2}, ()),
    "smollm3-types": ("smollm3", {"layer_types": TYPES}, ("layer_types", "use_sliding_window")),
    "smollm3-no-rope-of-2": ("smollm3", {"no_rope_layers": [0, 1]}, ("no_rope_layers", "3 times")),
    "granite": (
        "granite",
        {"embedding_multiplier": 5, "logits_scaling": 0.5, "residual_multiplier": 0.3, "attention_bias": True},
        (),
    ),
    "granite-multiplier-0": ("granite", {"residual_multiplier": 0}, ("residual_multiplier", "above 0")),
    "exaone-published-keys": (
        "exaone",
        {
            **{"num_hidden_layers": ..., "num_layers": 3, "rms_norm_eps": ..., "layer_norm_epsilon": 1e-3},
            "activation_function": "silu",
        },
        (),
    ),
    "internlm3-published-keys": ("internlm3", {"head_dim": 8, "qkv_bias": True, "bias": True}, ()),
    "internlm3-two-biases": ("internlm3", {"head_dim": 8, "qkv_bias": True, "bias": False}, ("qkv_bias", "bias")),
    "exaone4-types": ("exaone4", {"sliding_window": 9, "layer_types": TYPES}, ()),
    "exaone4-period": ("exaone4", {"sliding_window": 9, "sliding_window_pattern": 3, "head_dim": 8}, ()),
    "exaone4-letters": (
        "exaone4", {"sliding_window": 9, "sliding_window_pattern": "LLLG", "layer_types": TYPES}, ()
    ),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.75, "sliding_window": 9}, ()),
    "phi3-su": (
        "phi3",
        {
            "rope_scaling": {
                "type": "su", "long_factor": [2.0] * 4, "short_factor": [1.0, 1.2, 1.4, 2.0],
                "original_max_position_embeddings": 128,
            },
            "original_max_position_embeddings": 128,
        },
        (),
    ),
    "phi3-layer-types": ("phi3", {"sliding_window": 9, "layer_types": TYPES}, ("layer_types", "phi3")),
    "glm-no-bias": ("glm", {"attention_bias": False, "partial_rotary_factor": 1.0}, ()),
    "glm4": ("glm4", {"partial_rotary_factor": 0.25}, ()),
    "cohere": ("cohere", {"attention_bias": True, "logit_scale": 2.0, "layer_norm_eps": 1e-3}, ()),
    "cohere-qk-norm": ("cohere", {"use_qk_norm": True}, ("use_qk_norm",)),
    "cohere2-types": ("cohere2", {"sliding_window": 9, "layer_types": TYPES}, ()),
    "cohere2-period": ("cohere2", {"sliding_window": 9, "sliding_window_pattern": 2, "head_dim": 8}, ()),
    "starcoder2": ("starcoder2", {"use_bias": False, "sliding_window": 9, "norm_epsilon": 1e-3}, ()),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}, ()),
    "stablelm-qk-norm": ("stablelm", {"qk_layernorm": True}, ("qk_layernorm",)),
    "nemotron": ("nemotron", {"norm_eps": 1e-3, "attention_bias": True, "mlp_bias": True, "head_dim": 12}, ()),
    "phi": ("phi", {"partial_rotary_factor": 1.0, "layer_norm_eps": 1e-3, "hidden_act": "relu"}, ()),
    "phi-qk-norm": ("phi", {"qk_layernorm": True}, ("qk_layernorm",)),
    "gpt-neox": (
        "gpt_neox", {"num_key_value_heads": ..., "rotary_pct": 0.5, "rope_theta": ..., "hidden_act": "gelu"}, ()
    ),
    "gpt-neox-old-rope": (
        "gpt_neox",
        {"num_key_value_heads": ..., "rotary_emb_base": 900, "rope_theta": ..., "use_parallel_residual": False},
        (),
    ),
    "gpt-neox-two-thetas": ("gpt_neox", {"rotary_emb_base": 900}, ("rope_theta is 500.0", "rotary_emb_base", "900")),
    "qwen2-mlp-bias": ("qwen2", {"mlp_bias": True}, ("mlp_bias", "qwen2")),
}  # fmt: skip
TIED = ("gemma", "cohere", "smollm3", "ernie", "starcoder2")  # the families whose embeddings are tied by default
# A default run has one of each kind.
NOT_WIDE = {
    *("mistral-layer-types", "mistral-types-without-window", "mistral-window-off", "qwen2-types-window-off"),
    *("llama-layer-types", "not-causal", "per-layer", "attn-softcap", "logit-scale", "experts", "both-ropes"),
    *("gemma2-caps", "gemma3", "gemma3-rope-parameters", "gemma2-types-without-window"),
    *("gemma-layer-types", "gemma2-no-window", "gemma3-flat-rope-parameters"),
    *("qwen3-moe-dense-layers", "qwen2-moe", "olmoe-biases", "glm4-moe-groups", "minimax-m2-rotary"),
    *("hy-v3-published", "hy-v3-2-dense", "hy-v3-no-norm", "hy-v3-softmax"),
    *("gpt-oss", "gpt-oss-no-window", "gpt-oss-limit"),
    *(
        "longrope-3-factors",
        "phi3-su",
        "smollm3-types",
        "granite-multiplier-0",
        "cohere-qk-norm",
        "gpt-neox-two-thetas",
    ),
}


def base_of(family: str) -> dict[str, Any]:
    return BASE | BASE_OF.get(family, {})


def config_of(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    raw = {"model_type": family, **base_of(family), **changes}
    return {key: value for key, value in raw.items() if value is not ...}


def write(folder: Path, raw: dict[str, Any], state: dict[str, Tensor]) -> None:
    tied = raw.get("tie_word_embeddings", raw["model_type"].startswith(TIED)) and "lm_head.weight"
    save_file({name: t.contiguous() for name, t in state.items() if name != tied}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    "name", [name if name in NOT_WIDE else pytest.param(name, marks=pytest.mark.wide) for name in VARIANTS]
)
def test_a_variant_is_equal_or_refused(name: str, tmp_path: Path) -> None:
    family, changes, words = VARIANTS[name]
    raw = config_of(family, changes)
    if words:
        plain = config_of(family, {key: base_of(family).get(key, ...) for key in changes})
        write(tmp_path, plain, random_state(plain))
        open_checkpoint(tmp_path)
        write(tmp_path, raw, random_state(plain))
        with pytest.raises(ModelError) as caught:
            open_checkpoint(tmp_path)
        assert all(word in caught.value.message for word in words), caught.value.message
        return
    (tmp_path / "config.json").write_text(json.dumps(raw))
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(tmp_path),
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    with torch.no_grad():
        corrections = [(key, buffer) for key, buffer in model.named_buffers() if key.endswith("bias")]
        # Norms of 1 and biases of 0 would hide mistakes.
        for key, parameter in (*model.named_parameters(), *corrections):
            centre = 1.0 if "norm" in key else 0.0
            parameter.copy_(centre + torch.randn_like(parameter) * 0.3)
    model.save_pretrained(tmp_path)  # by the names of files: a state dict has the experts of a layer in one tensor
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, 97, (LENGTH,)).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
        found = open_checkpoint(tmp_path)
        decoder = build_decoder(found.config, found.tensors, LENGTH, torch.float64, torch.device("cpu"))
        assert expected.std() > 0.3, "logits too flat to compare"
        for pieces in ([LENGTH], [33] + [1] * 37):
            ours = piecewise_logits(decoder, tokens, pieces, torch.float64)
            # transformers' rotary angles and norms are in float32
            assert float((ours - expected).abs().max()) < 1e-4
            assert torch.equal(ours.argmax(-1), expected.argmax(-1))
