"""Checkpoints with all experts of a layer in one tensor, as transformers 5 has them in memory.

`mlp.experts.gate_up_proj` is (X, 2I, E): of each expert the gate, then the up projection. `mlp.experts.down_proj` is
(X, E, I). The rest of the program asks for one tensor an expert, and each is read as a slice. Granite has other names
for the two tensors (`MoeConfig.stacks`). Files of gpt-oss are different: see `gpt_oss_experts.py`.

Shape suffixes: X experts, I inner features of an expert, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from specbatch.errors import ModelError
from specbatch.models.checks import shown
from specbatch.models.config import ModelConfig
from specbatch.models.formats.tensor_files import RenamedSource, SafetensorsSource, TensorSource, TorchBinSource

_MEMORY_BLOCK = "mlp"  # the name of the block of experts in the memory of transformers, for all families


class _Slice(NamedTuple):
    """Rows `first` to `last` of one expert in a tensor of the files."""

    stored: str
    expert: int
    first: int
    last: int


class StackedSource(TensorSource):
    """The tensors of `files` under their canonical names, one for each expert."""

    def __init__(self, files: SafetensorsSource | TorchBinSource | RenamedSource, config: ModelConfig) -> None:
        """Raise ModelError if a tensor has another shape than the configuration says, or is there in both forms."""
        self._files = files
        self._slices: dict[str, _Slice] = {}
        self._names: dict[str, str] = {}  # names in the files of the other tensors, by canonical name
        stacks = _stacks(config)
        for name, shape in files.shapes().items():
            if (found := stacks.get(name)) is None:
                self._names[_canonical(name, config)] = name
            elif shape != found.shape:
                raise ModelError(f"{name} is {list(shape)}, expected {list(found.shape)} (experts, outputs, inputs)")
            else:
                self._slices |= found.slices(name)
        if twice := sorted(self._slices.keys() & self._names.keys()):
            raise ModelError(
                f"{shown(twice[0])} is there twice: as a tensor, and as a part of the tensor of all experts"
            )

    @property
    def kind(self) -> str:
        return self._files.kind

    @property
    def dtypes(self) -> Mapping[str, str]:
        dtypes = self._files.dtypes
        found = {name: dtypes[part.stored] for name, part in self._slices.items()}
        return found | {name: dtypes[stored] for name, stored in self._names.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._files.shapes()
        found = {name: (part.last - part.first, shapes[part.stored][2]) for name, part in self._slices.items()}
        return found | {name: shapes[stored] for name, stored in self._names.items()}

    def load(self, name: str) -> Tensor:
        if (part := self._slices.get(name)) is None:
            return self._files.load(self._names[name])
        return self._files.load_rows(part.stored, part.expert, part.first, part.last)

    def close(self) -> None:
        self._files.close()


def unstacked(
    files: SafetensorsSource | TorchBinSource | RenamedSource, config: ModelConfig
) -> SafetensorsSource | TorchBinSource | RenamedSource | StackedSource:
    """Return the tensors with one for each expert, whatever the files have."""
    return StackedSource(files, config) if _stacks(config).keys() & files.shapes().keys() else files


class _Stack(NamedTuple):
    """One tensor of all experts: its shape, and the canonical names of its parts."""

    shape: tuple[int, int, int]
    experts: str  # beginning of the names
    projections: tuple[str, ...]  # names of the projections of an expert, one after the other

    def slices(self, stored: str) -> dict[str, _Slice]:
        size = self.shape[1] // len(self.projections)
        return {
            f"{self.experts}{expert}.{projection}.weight": _Slice(stored, expert, i * size, (i + 1) * size)
            for expert in range(self.shape[0])
            for i, projection in enumerate(self.projections)
        }


def _stacks(config: ModelConfig) -> dict[str, _Stack]:
    """Return the tensors of all experts that a file of this model can have, by their names there."""
    moe = config.moe
    if moe is None:
        return {}
    gate, up, down = moe.projections
    num, inner, hidden = moe.num_experts, moe.expert_size, config.hidden_size
    shapes = (num, 2 * inner, hidden), (num, hidden, inner)
    return {
        f"model.layers.{layer}.{block}.{name}": _Stack(shape, f"model.layers.{layer}.{moe.block}.experts.", projections)
        for layer in range(config.num_layers)
        if moe.layers[layer]
        for block in {_MEMORY_BLOCK, moe.block}
        for name, shape, projections in zip(moe.stacks, shapes, ((gate, up), (down,)), strict=True)
    }


def _canonical(name: str, config: ModelConfig) -> str:
    """Return the canonical name of a tensor of a file with stacked experts, such as that of a router."""
    moe = config.moe
    assert moe is not None
    before, found, rest = name.partition(f".{_MEMORY_BLOCK}.")
    if not found:
        return name
    module, dot, kind = rest.partition(".")
    ours = {"gate": moe.router, "e_score_correction_bias": moe.correction_bias, "shared_experts": moe.shared_name}
    return f"{before}.{moe.block}.{ours.get(module) or module}{dot}{kind}"
