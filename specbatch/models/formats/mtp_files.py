"""The layer for multi-token prediction (MTP) in the checkpoint of a hybrid. It drafts: `hybrids/mtp_head.py`.

Its tensors are named `mtp.*`. Those of its decoder layer get the names of a model's first layer, and are arranged as
those of the target. speculators saves a layer that was trained further in a folder of its own, under other names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.models.checks import tensor_problems
from specbatch.models.eagle_config import expected_eagle_tensors, layer_prefix, mtp_config
from specbatch.models.families.registry import FAMILIES
from specbatch.models.formats.arranged import ArrangedSource
from specbatch.models.formats.checkpoint import Checkpoint
from specbatch.models.formats.eagle_files import EagleCheckpoint
from specbatch.models.formats.stacked_experts import unstacked
from specbatch.models.formats.tensor_files import RenamedSource, open_tensors

_LAYER, _SCALE = "mtp.layers.0.", "_scale_inv"
_NO_MTP = "use speculation.method: ngram, or a checkpoint with its mtp tensors"


class Fp8AsFloats(RenamedSource):
    """Tensors of which those in FP8 with a scale for each block are dequantised: the layer is small."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: shape for name, shape in super().shapes().items() if not name.endswith(_SCALE)}

    @property
    def dtypes(self) -> Mapping[str, str]:
        dtypes = super().dtypes
        return {
            name: "bfloat16" if f"{name}{_SCALE}" in dtypes else dtype
            for name, dtype in dtypes.items()
            if not name.endswith(_SCALE)
        }

    def load(self, name: str) -> Tensor:
        weight = super().load(name)
        if f"{name}{_SCALE}" not in super().shapes():
            return weight
        scale, (rows, columns) = super().load(f"{name}{_SCALE}").float(), weight.shape
        blocks = [-(-size // count) for size, count in zip(weight.shape, scale.shape, strict=True)]
        whole = scale.repeat_interleave(blocks[0], 0)[:rows].repeat_interleave(blocks[1], 1)[:, :columns]
        return (weight.float() * whole).to(torch.bfloat16)


# Names of speculators, by those in the checkpoints of hybrids. Tensors of the decoder layer follow the last one.
_SPECULATORS = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    _LAYER: "mtp_layers.0.",
}


def has_mtp(target: Checkpoint) -> bool:
    """Return whether the checkpoint of a hybrid has a layer for multi-token prediction."""
    if target.config.delta is None or not target.config.num_mtp_layers:
        return False
    if target.path is None:  # random weights are made as they are asked for
        return True
    files = open_tensors(target.path)
    found = "mtp.fc.weight" in files.shapes()
    files.close()
    return found


def open_mtp(target: Checkpoint, path: Path | None = None) -> EagleCheckpoint:
    """Open and check the layer. `path`: a folder of speculators; None: the layer of the target's checkpoint. Raise
    ModelError if there is none, or if it is another one than the engine computes."""
    if target.config.delta is None:
        raise ModelError(
            f"speculation.method mtp is for hybrids such as Qwen3.5, and model.target is a {target.config.model_type}",
            hint="use another speculation.method",
        )
    if path is None and not has_mtp(target):
        raise ModelError("model.target has no layer for multi-token prediction (mtp.fc.weight)", hint=_NO_MTP)
    folder = path or target.path
    assert folder is not None, "random weights have no files"
    head, names = mtp_config(target.config), FAMILIES[target.config.model_type].names
    assert names is not None
    opened = open_tensors(folder)
    own = {_usual(name): name for name in opened.shapes() if name.startswith(("mtp.", "mtp_layers."))}
    files = Fp8AsFloats(opened, {name.replace(_LAYER, layer_prefix("mtp"), 1): stored for name, stored in own.items()})
    try:
        tensors = ArrangedSource(unstacked(files, head.decoder), head.decoder, names)
    except ModelError as error:
        files.close()
        raise ModelError(f"{folder}: {error.message}", hint=error.hint) from error
    wrong = [f"{name} is {dtype}" for name, dtype in tensors.dtypes.items() if not dtype.endswith(("16", "32", "64"))]
    problems = tensor_problems(expected_eagle_tensors(head), tensors.shapes()) or ", ".join(wrong[:3])
    if problems:
        files.close()
        raise ModelError(f"{folder}: its layer for multi-token prediction does not fit: {problems}", hint=_NO_MTP)
    return EagleCheckpoint(head, tensors)


def check_saved_layer(folder: Path) -> None:
    """Raise ModelError if the folder has no layer that speculators has saved."""
    opened = open_tensors(folder)
    names = {_usual(name) for name in opened.shapes()}
    opened.close()
    if "mtp.fc.weight" not in names:
        raise ModelError(f"{folder} has no layer for multi-token prediction (mtp_layers.0.input_proj)", hint=_NO_MTP)


def _usual(name: str) -> str:
    """Return the name that a tensor has in the checkpoints of hybrids."""
    for usual, stored in _SPECULATORS.items():
        if name.startswith(stored):
            return usual + name.removeprefix(stored)
    return name
