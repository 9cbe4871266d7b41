"""The keys of a `config.json`: each is applied, refused, known to change nothing, or named in a note.

Families read different keys (`families/`). A key that one family reads changes nothing in another, as in transformers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from specbatch.errors import ModelError
from specbatch.models.checks import is_one_of, shown

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings")
_QUANTIZATION = ("quantization_config", "compression_config")
APPLIED = frozenset(
    (
        *("model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings"),
        *("rms_norm_eps", "tie_word_embeddings", "eos_token_id", "layer_types", *_ROPE, *_QUANTIZATION),
    )
)
# Keys that would change what is computed, with the values under which they change nothing. null is one in each case.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    name: values
    for values, names in (
        (
            (False,),
            """
            is_encoder_decoder add_cross_attention cross_attention_hidden_size tie_encoder_decoder
            use_bidirectional_attention use_parallel_residual parallel_attn alibi use_alibi
            use_qk_norm qk_norm qk_layernorm rope_interleaved use_mrope use_nope
            attention_sinks use_attention_sinks attn_output_gate
            """,
        ),
        ((True,), "is_causal"),
        (
            (0, False),
            """
            attn_logit_softcapping attn_logit_softcap attn_softcap final_logit_softcapping final_logit_softcap
            logits_soft_cap clip_qkv qk_clip_threshold
            attention_chunk_size no_rope_layer_interval
            num_experts num_local_experts n_routed_experts moe_num_experts moe_intermediate_size
            n_shared_experts num_shared_experts moe_num_shared_experts shared_expert_intermediate_size
            shared_intermediate_size num_zero_experts first_k_dense_replace kv_lora_rank q_lora_rank
            """,
        ),
        (
            (1,),
            """
            logit_scale logits_scaling logits_scale embedding_multiplier residual_multiplier lm_head_multiplier
            embed_scale scale_emb rotary_pct n_group num_expert_group topk_group routed_scaling_factor moe_layer_freq
            decoder_sparse_step
            """,
        ),
        ((), "attention_multiplier query_pre_attn_scalar scale_depth dim_model_base attn_temperature_tuning"),
        (
            ({}, []),
            """
            per_layer_config pruned_heads no_rope_layers sliding_window_pattern
            vision_config audio_config text_config decoder encoder mlp_only_layers
            """,
        ),
        (("silu", "swish"), "hidden_activation mlp_activation activation_function"),
        (("softmax",), "scoring_func"),
        (("greedy",), "topk_method"),
    )
    for name in names.split()
}
# Keys that no answer depends on: names, versions, training, classification, how a program runs the model.
_HARMLESS_NAMES = """
    _name_or_path name_or_path transformers_version torch_dtype dtype _commit_hash model_name
    transformers.js_config is_llama_config unsloth_version unsloth_fixed
    output_hidden_states output_attentions return_dict return_dict_in_generate output_scores use_return_dict
    chunk_size_feed_forward id2label label2id num_labels problem_type finetuning_task task_specific_params
    tokenizer_class prefix bos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
    tf_legacy_loss use_bfloat16 torchscript gradient_checkpointing tie_last_hidden_states is_decoder
    initializer_range initializer_factor attention_dropout hidden_dropout hidden_dropout_prob dropout attn_dropout
    attention_probs_dropout_prob attn_pdrop resid_pdrop embd_pdrop classifier_dropout
    residual_dropout embedding_dropout n_ctx
    summary_type summary_use_proj summary_activation summary_first_dropout summary_proj_to_labels
    use_cache cache_implementation pretraining_tp _attn_implementation attn_implementation
    _attn_implementation_autoset _attn_implementation_internal _flash_attn_2_enabled
    _experts_implementation experts_implementation use_flash_attn use_flash_attention
    output_router_logits router_aux_loss_coef router_jitter_noise
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
_EMPTY: tuple[Any, ...] = (None, False, 0, "", [], {})
# What each type of rotary embedding reads of its parameters.
_ROPE_KEYS = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"))
_ROPE_KEYS_OF: Mapping[str, frozenset[str]] = {
    "default": _ROPE_KEYS,
    "linear": _ROPE_KEYS | {"factor"},
    "dynamic": _ROPE_KEYS | {"factor"},
    "llama3": _ROPE_KEYS | {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": _ROPE_KEYS
    | {"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
    "longrope": _ROPE_KEYS | {"factor", "attention_factor", "short_factor", "long_factor"},
}


def check_keys(
    config: Mapping[str, Any],
    read: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
    model_type: str | None = None,
) -> None:
    """Raise ModelError for a key that changes the computation and is not supported.

    `read`: the keys that the family reads. `neutral` and `model_type`: also refuse keys that this family does not have
    with other values than these. Without them the config may be that of a draft head, whose traits are those that its
    tensors show.
    """
    for key, values in {**_NEUTRAL, **(neutral or {})}.items():
        value = config.get(key)
        if key not in read and value is not None and not is_one_of(value, values):
            raise ModelError(
                f"config.json: {key} {shown(value)} is not supported"
                + (f" in a {model_type} model" if model_type else ""),
                hint="the model computes more than specbatch does: use another checkpoint, or another engine",
            )


def unknown_keys(config: Mapping[str, Any], read: Collection[str], neutral: Collection[str]) -> list[str]:
    """Return the keys that are neither applied, nor refused, nor known to change nothing. `read` and `neutral`: the
    keys of the family."""
    known = {*APPLIED, *read, *_HARMLESS, *_NEUTRAL, *neutral}
    unknown = [key for key, value in config.items() if key not in known and not is_one_of(value, _EMPTY)]
    section = next((name for name in ("rope_scaling", "rope_parameters") if config.get(name)), None)
    if section is not None:
        unknown += [name for name in _unknown_rope_keys(config[section], section) if name not in read]
    return unknown


def _unknown_rope_keys(rope: Mapping[str, Any], section: str) -> list[str]:
    nested = {key: value for key, value in rope.items() if isinstance(value, Mapping)}  # parameters of a layer type
    kind = rope.get("rope_type", rope.get("type", "default"))
    read = _ROPE_KEYS_OF.get(kind, _ROPE_KEYS) | nested.keys()
    unknown = [f"{section}.{key}" for key, value in rope.items() if key not in read and value is not None]
    return unknown + [name for key, value in nested.items() for name in _unknown_rope_keys(value, f"{section}.{key}")]
