"""Checkpoints of gpt-oss, which have the experts of a layer in one tensor. Each expert's tensors are slices, which are
read one at a time.

Outputs of gate and up alternate. The tensors are `mlp.experts.gate_up_proj` (X, E, 2I) and `mlp.experts.down_proj`
(X, I, E), with inputs first, as transformers saves them, and biases `..._bias` (X, 2I) and (X, E). In the published
files the matrices are in MXFP4, with outputs first: `gate_up_proj_blocks` (X, 2I, E / 32, 16), `gate_up_proj_scales`
(X, 2I, E / 32), and the same for `down_proj`. `load` dequantises them to bfloat16, which is exact.

Shape suffixes: X experts, I inner features of an expert, E hidden size; N outputs, B bytes of a row, G groups of a row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.kernels.mxfp4 import MXFP4_GROUP
from specbatch.kernels.torch.parts.mxfp4 import MAX_SCALE, dequantise
from specbatch.models.checks import shown
from specbatch.models.formats.tensor_files import SafetensorsSource, TensorSource, TorchBinSource

_NAME = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)(|_bias|_blocks)")
_DIMENSIONS = {"": 3, "_bias": 2, "_blocks": 4}
_PARTS = {
    "gate_up_proj": (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))),
    "down_proj": (("down_proj", slice(None)),),
}
_PACKED = "mxfp4"  # type of packed tensors in descriptions


class _Slice(NamedTuple):
    """A tensor of one expert. `outputs`: those of its stacked tensor."""

    stored: str
    expert: int
    outputs: slice


class GptOssExperts(TensorSource):
    """The tensors of `files` under their canonical names, one for each expert."""

    def __init__(self, files: SafetensorsSource | TorchBinSource) -> None:
        """Raise ModelError for blocks of an unknown size, or without scales that fit them, and for an expert's tensor
        that is there twice."""
        self._files, self.kind = files, files.kind
        self._slices: dict[str, _Slice] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        stored = files.shapes()
        for name, shape in stored.items():
            found = _NAME.fullmatch(name)
            if found is not None and len(shape) == _DIMENSIONS[found[3]]:
                self._add(name, shape, *found.groups())
            elif not (name.endswith("_scales") and _blocks_of(name) in stored):
                self._add_one(name, shape, files.dtypes[name])

    def _add_one(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """Add a tensor under its canonical name."""
        if name in self._shapes:
            raise ModelError(f"{shown(name)} is there twice: the files have it in two forms")
        self._shapes[name], self.dtypes[name] = shape, dtype

    def _add(self, name: str, shape: tuple[int, ...], prefix: str, projection: str, ending: str) -> None:
        """Add the slices of a stacked tensor."""
        num_outputs, inputs = (shape[2], shape[1:2]) if ending == "" else (shape[1], ())
        dtype = self._files.dtypes[name]
        if ending == "_blocks":
            _check_scales(self._files, name)
            inputs, dtype = (shape[2] * MXFP4_GROUP,), _PACKED
        for part, outputs in _PARTS[projection]:
            size = len(range(*outputs.indices(num_outputs)))
            for expert in range(shape[0]):
                one = f"{prefix}{expert}.{part}.{'bias' if ending == '_bias' else 'weight'}"
                self._add_one(one, (size, *inputs), dtype)
                self._slices[one] = _Slice(name, expert, outputs)

    @property
    def is_packed(self) -> bool:
        """Return whether experts are in MXFP4."""
        return _PACKED in self.dtypes.values()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def load(self, name: str) -> Tensor:
        if (part := self._slices.get(name)) is None:
            return self._files.load(name)
        if self.dtypes[name] == _PACKED:
            return dequantise(*self.packed(name), torch.bfloat16)
        whole = self._load(part.stored, part.expert)
        return (whole.T if whole.dim() == 2 else whole)[part.outputs].contiguous()

    def packed(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the values (N, B) and the scales (N, G) of a weight in MXFP4, see `kernels/torch/parts/mxfp4.py`."""
        part = self._slices[name]
        blocks = self._load(part.stored, part.expert)[part.outputs]
        scales = self._load(_scales_of(part.stored), part.expert)[part.outputs]
        if int(scales.max()) > MAX_SCALE:
            raise ModelError(f"{name} has scales that are no finite numbers", hint="download the file again")
        return blocks.flatten(1).contiguous(), scales.contiguous()

    def _load(self, stored: str, expert: int) -> Tensor:
        return self._files.load_rows(stored, expert, 0, self._files.shapes()[stored][1])

    def close(self) -> None:
        self._files.close()


def _scales_of(blocks: str) -> str:
    return f"{blocks.removesuffix('_blocks')}_scales"


def _blocks_of(scales: str) -> str:
    return f"{scales.removesuffix('_scales')}_blocks"


def _check_scales(files: SafetensorsSource | TorchBinSource, blocks: str) -> None:
    shapes, scales = files.shapes(), _scales_of(blocks)
    size = MXFP4_GROUP // 2
    if shapes[blocks][-1] != size or shapes.get(scales) != shapes[blocks][:-1]:
        found = f"{list(shapes[blocks])}, and {scales} is {list(shapes[scales]) if scales in shapes else 'missing'}"
        raise ModelError(f"{blocks} is {found}: blocks of {size} bytes with a scale each are supported")
    if not files.dtypes[blocks] == files.dtypes[scales] == "uint8":
        raise ModelError(f"{blocks} and {scales} are {files.dtypes[blocks]} and {files.dtypes[scales]}, not uint8")
