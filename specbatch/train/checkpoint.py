"""Writes the checkpoint of a drafter.

Shape suffixes: W draft vocabulary, V vocabulary of the target.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specbatch.errors import InputError

SAME_COMMAND = "run the same command again to continue"


def stored(weights: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return copies of weights as they are stored. Maps of the vocabulary, which are no floats, keep their type."""
    return {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in weights.items()
    }


def vocabulary_maps(draft_ids_W: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return the maps d2t (W,) int64, target id minus draft id, and t2d (V,) bool, which is True for the tokens of the
    draft vocabulary."""
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
    t2d_V[draft_ids_W] = True
    return {"d2t": draft_ids_W - torch.arange(draft_ids_W.shape[0]), "t2d": t2d_V}


def save_checkpoint(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> Path:
    """Write the checkpoint into `folder`, weights first and by rename. So a folder with a config.json is complete.
    Return the path of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    temporary = folder / "model.safetensors.tmp"
    try:
        save_file(dict(tensors), temporary, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write {temporary}: {first_line(error)}", SAME_COMMAND) from error
    temporary.replace(path)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
