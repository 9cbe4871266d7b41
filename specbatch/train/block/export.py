"""The checkpoint of a trained block drafter: as vLLM's speculators writes it (`speculators_model_type` dflash or
dspark), or as SpecForge does (Domino). Its embedding and its LM head are the target's. With a reduced vocabulary, files
of speculators have a copy of these rows of the LM head, which other engines read."""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.models.blocks.config import BlockConfig, DominoConfig, MarkovConfig
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.train.block.drafter import TrainedBlocks
from specbatch.train.checkpoint import stored


def checkpoint_tensors(
    drafter: TrainedBlocks, target: Checkpoint, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Return the tensors of a drafter's file."""
    weights, block = drafter.state_dict(), drafter.block
    if block.has_vocab_map and not isinstance(block.head, DominoConfig):
        lm_head_VE = target.tensors.load(target.config.lm_head_name)
        weights["lm_head.weight"] = lm_head_VE[weights["t2d"].to(lm_head_VE.device)]
    return stored(weights, dtype)


def config_json(block: BlockConfig, target_name: str) -> dict[str, object]:
    """Return the config.json of a drafter. `target_name`: the model that it was trained for."""
    c, head = block.decoder, block.head
    layers: dict[str, object] = {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "max_position_embeddings": c.max_position_embeddings,
        "num_attention_heads": c.num_heads,
        "num_hidden_layers": c.num_layers,
        "num_key_value_heads": c.num_kv_heads,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope.theta,
        "vocab_size": c.vocab_size,
    }
    if isinstance(head, DominoConfig):
        return {
            "architectures": ["DominoDraftModel"],
            **layers,
            "block_size": block.block_size,
            "draft_vocab_size": block.draft_vocab_size,
            "dflash_config": {
                "projector_type": "domino",
                "emb_dim": head.embedding_size,
                "gru_hidden_dim": head.state_size,
                "pure_draft_prefix_len": head.first - block.first,
                "shift_label": block.first == 0,
                "mask_token_id": block.mask_token_id,
                "target_layer_ids": [layer - 1 for layer in block.aux_layers],  # their outputs
            },
        }
    kind = "dflash" if head is None else "dspark"
    config: dict[str, object] = {
        "architectures": ["DFlashDraftModel" if head is None else "DSparkDraftModel"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": block.max_drafts}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": list(block.aux_layers),
        "block_size": block.block_size,
        "draft_vocab_size": block.draft_vocab_size,
        "mask_token_id": block.mask_token_id,
        "sample_from_anchor": block.first == 0,
    }
    if isinstance(head, MarkovConfig):
        config |= {"markov_rank": head.rank, "markov_head_type": head.kind, "enable_confidence_head": False}
    return config
