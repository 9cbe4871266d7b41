"""Checkpoint folders of tiny random models with a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specbatch.models.config import expected_tensors
from specbatch.models.families.registry import parse_hf_config
from specbatch.models.formats.tokenizer import byte_tokenizer

RAW: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
}


def random_state(raw: dict[str, Any] = RAW) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = expected_tensors(parse_hf_config(raw))
    rng = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    return {name: 1.0 + tensor if "norm" in name else tensor for name, tensor in rng.items()}


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """Write a checkpoint to `folder`. `changes`: keys of config.json."""
    raw = {**RAW, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer(raw["vocab_size"], (raw["eos_token_id"],)).save_pretrained(folder)
    save_file(random_state(raw), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
