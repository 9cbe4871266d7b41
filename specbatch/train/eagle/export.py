"""A trained head as a checkpoint under the public names (those of yuhuili/EAGLE3-LLaMA3.1-Instruct-8B): config.json
with `LlamaForCausalLMEagle3`, model.safetensors with d2t and t2d, no embedding."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specbatch.models.config import ModelConfig
from specbatch.models.eagle_config import EagleConfig
from specbatch.train.checkpoint import stored, vocabulary_maps

_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def config_json(head: EagleConfig, target: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, object]:
    """Return the config.json of a head, which other engines read. `target` gives the tokens that end a text."""
    c = head.decoder
    ends = list(target.eos_token_ids)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "draft_vocab_size": head.draft_vocab_size,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "max_position_embeddings": c.max_position_embeddings,
        "mlp_bias": False,
        "num_attention_heads": c.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": c.num_kv_heads,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": c.rope.theta,
        "tie_word_embeddings": False,
        "torch_dtype": _DTYPE_NAMES[dtype],
        "use_cache": True,
        "vocab_size": c.vocab_size,
    }


def checkpoint_tensors(
    weights: Mapping[str, Tensor], draft_ids_W: Tensor, vocab_size: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Return the tensors of the checkpoint: the weights in `dtype`, and the maps of the vocabulary."""
    return stored(weights, dtype) | vocabulary_maps(draft_ids_W, vocab_size)
