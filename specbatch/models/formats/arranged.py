"""Checkpoints whose tensors have other names than Llama's, or another arrangement: projections of the same input in one
tensor, rotations of neighbouring dimensions.

The rest of the program asks for canonical names, and gets rows of the tensors of the files.

Shape suffixes: O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from specbatch.errors import ModelError
from specbatch.models.config import ModelConfig, expected_tensors
from specbatch.models.families.family import TensorNames
from specbatch.models.formats.stacked_experts import StackedSource
from specbatch.models.formats.tensor_files import RenamedSource, SafetensorsSource, TensorSource, TorchBinSource

Files = SafetensorsSource | TorchBinSource | RenamedSource | StackedSource
_SCALES = ("weight_scale_inv", "weight_scale")  # scales of rows and blocks, which hybrids divide with their weights
_EMBEDDING = "model.embed_tokens.weight"
# Beginnings of the names of a text part, in files with other parts.
_TEXT_PARTS = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "model.text_model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}


class _Rows(NamedTuple):
    """Rows `first` to `last` of a tensor of the files. `heads`: the number of heads whose dimensions are reordered; 0:
    they keep their order. `groups`: rows are those of this number of equal parts, each of which has `first` to `last`
    of all rows, divided by `groups`."""

    stored: str
    first: int
    last: int
    heads: int = 0
    groups: int = 1
    is_transposed: bool = False  # the tensor of the files is (in, out)


class ArrangedSource(TensorSource):
    """The tensors of `files` under their canonical names."""

    def __init__(self, files: Files, config: ModelConfig, names: TensorNames, *, is_text_part: bool = False) -> None:
        """Raise ModelError if a tensor that is divided has a wrong number of rows, or has scales. `is_text_part`: the
        files also have parts for images or sounds, which are left out."""
        self._files, self._rotary_dim = files, config.rope.rotary_dim(config.head_dim)
        stored = {_short(name) if is_text_part else name: name for name in files.shapes()}
        stored.pop("", None)
        if names.optional and not any(name.startswith(names.optional) for name in stored):
            stored = {
                name if name.startswith("lm_head.") else f"{names.optional}{name}": stored[name] for name in stored
            }
        expected = expected_tensors(config)
        self._parts = self._expected(stored, expected, config, names)
        self._parts |= self._others(stored, _plain_modules(expected, names), config)

    def _expected(
        self,
        stored: Mapping[str, str],
        expected: Mapping[str, tuple[int, ...]],
        config: ModelConfig,
        names: TensorNames,
    ) -> dict[str, _Rows]:
        """Find the rows of the tensors that the model needs. `stored`: names in the files, by shorter ones."""
        shapes, parts = self._files.shapes(), {}
        for name, shape in expected.items():
            module, _, kind = name.rpartition(".")
            file_module, before, total = _place(module, names, expected, kind)
            found = stored.get(f"{file_module}.{kind}")
            if found is None:
                continue
            is_transposed = kind == "weight" and _split_file(file_module, names) in names.transposed
            rows = (shapes[found] or (0,))[-1 if is_transposed else 0]
            is_divided = total != shape[0]
            if is_divided and rows != total:
                raise ModelError(f"{found} is {list(shapes[found])}, expected {total} rows")
            heads = _num_heads(name, config) if config.is_interleaved else 0
            groups = _num_groups(_split_file(file_module, names), names, config) if is_divided else 1
            last = before + (shape[0] if is_divided else rows)
            parts[name] = _Rows(found, before, last, heads, groups, is_transposed)
        return parts

    def _others(self, stored: Mapping[str, str], modules: Mapping[str, str], config: ModelConfig) -> dict[str, _Rows]:
        """Return the other tensors of the files, such as scales, with their names translated. `modules`: see
        `_plain_modules`."""
        shapes, used = self._files.shapes(), {part.stored for part in self._parts.values()}
        changed = {
            part.stored.rpartition(".")[0]
            for part in self._parts.values()
            if part.heads or part.last - part.first != (_outputs_first(shapes[part.stored], part) or (0,))[0]
        }
        canonical = {file: module for module, file in modules.items()}
        parts: dict[str, _Rows] = {}
        for short, name in stored.items():
            if name in used:
                continue
            module, _, kind = short.rpartition(".")
            ours = canonical.get(module, module)
            if (
                config.delta is not None
                and kind in _SCALES
                and (divided := self._divided(name, module_of=name.rpartition(".")[0]))
            ):
                parts |= divided
                continue
            # The weight itself may be packed, under another name.
            is_reordered = config.is_interleaved and _num_heads(f"{ours}.weight", config)
            if name.rpartition(".")[0] in changed or is_reordered:
                raise ModelError(
                    f"{name} belongs to a weight whose rows are divided or reordered while it is loaded, which is only "
                    "supported for weights that are not quantised",
                    hint="use the unquantised checkpoint; model.quantization: fp8 quantises it while it is loaded",
                )
            canonical_name = f"{ours}.{kind}".removeprefix(".")
            if canonical_name in self._parts:
                raise ModelError(
                    f"{name} and {self._parts[canonical_name].stored} are two tensors for the same weight",
                    hint="the files may come from different models",
                )
            parts[canonical_name] = _Rows(name, 0, shapes[name][0] if shapes[name] else 0)
        return parts

    def _divided(self, scales: str, module_of: str) -> dict[str, _Rows]:
        """Divide the scales of a weight that is divided, if each scale belongs to rows of one part. Otherwise return
        nothing. `module_of`: the weight's module in the files."""
        shapes, stored = self._files.shapes(), f"{module_of}.weight"
        own = {name: part for name, part in self._parts.items() if part.stored == stored}
        if len(own) < 2 or len(shapes[scales]) != 2 or shapes[stored][0] % shapes[scales][0]:
            return {}
        rows, kind = shapes[stored][0] // shapes[scales][0], scales.rpartition(".")[2]  # rows of a scale
        if any(
            part.heads or part.first % (rows * part.groups) or part.last % (rows * part.groups) for part in own.values()
        ):
            return {}
        return {
            f"{name.rpartition('.')[0]}.{kind}": _Rows(
                scales, part.first // rows, part.last // rows, groups=part.groups
            )
            for name, part in own.items()
        }

    @property
    def kind(self) -> str:
        return self._files.kind

    @property
    def dtypes(self) -> Mapping[str, str]:
        dtypes = self._files.dtypes
        return {name: dtypes[part.stored] for name, part in self._parts.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._files.shapes()
        return {
            name: (part.last - part.first, *_outputs_first(shapes[part.stored], part)[1:])
            if shapes[part.stored]
            else ()
            for name, part in self._parts.items()
        }

    def load(self, name: str) -> Tensor:
        part = self._parts[name]
        tensor = self._files.load(part.stored)
        tensor = tensor.t().contiguous() if part.is_transposed else tensor
        if part.last - part.first < (tensor.shape or (0,))[0]:
            rows = tensor.view(part.groups, -1, *tensor.shape[1:])
            tensor = rows[:, part.first // part.groups : part.last // part.groups].flatten(0, 1).clone()
        return half_by_half(tensor, part.heads, self._rotary_dim) if part.heads else tensor

    def close(self) -> None:
        self._files.close()


def _outputs_first(shape: tuple[int, ...], part: _Rows) -> tuple[int, ...]:
    return shape[::-1] if part.is_transposed else shape


def half_by_half(tensor_O: Tensor, num_heads: int, rotary_dim: int) -> Tensor:
    """Return the rows of each head in the order of a rotation by halves: of the pairs (0, 1), (2, 3) ... that rotate
    first all first dimensions, then all second ones. Scores of queries and keys are the same then."""
    rows = tensor_O.view(num_heads, -1, *tensor_O.shape[1:])
    pairs = torch.arange(rotary_dim).view(-1, 2)
    order = torch.cat((pairs[:, 0], pairs[:, 1], torch.arange(rotary_dim, rows.shape[1])))
    return rows[:, order].reshape(tensor_O.shape)


def _short(name: str) -> str:
    """Return the name of a tensor of the text part as if there was no other part; "" for one of other parts."""
    for beginning, short in _TEXT_PARTS.items():
        if name.startswith(beginning):
            return short + name.removeprefix(beginning)
    return name if name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.")) else ""


def _place(module: str, names: TensorNames, expected: Mapping[str, tuple[int, ...]], kind: str) -> tuple[str, int, int]:
    """Return the module of the files that has the rows of a canonical one, the number of rows before them, and all
    rows of that module."""
    prefix, inner = _split(module)
    own = expected[f"{module}.{kind}"][0]
    for joined, parts in names.joined.items():
        if inner in parts:
            sizes = [expected[f"{prefix}{part}.{kind}"][0] for part in parts]
            at = parts.index(inner)
            return f"{_prefix(prefix, names)}{joined}", sum(sizes[:at]), sum(sizes)
    return f"{_prefix(prefix, names)}{names.modules.get(inner, inner)}", 0, own


def _plain_modules(expected: Mapping[str, tuple[int, ...]], names: TensorNames) -> dict[str, str]:
    """Return the module of the files for each canonical module that has one of its own."""
    joined = {part for parts in names.joined.values() for part in parts}
    modules = {name.rpartition(".")[0] for name in expected}
    split = {module: _split(module) for module in modules}
    return {
        module: f"{_prefix(prefix, names)}{names.modules.get(inner, inner)}"
        for module, (prefix, inner) in split.items()
        if inner not in joined
    }


def _split(module: str) -> tuple[str, str]:
    """Divide a name into the beginning of its layer's names, which is empty outside of layers, and the rest."""
    if not module.startswith("model.layers."):
        return "", module
    number, _, inner = module.removeprefix("model.layers.").partition(".")
    return f"model.layers.{number}.", inner


def _split_file(module: str, names: TensorNames) -> str:
    """Return the name of a module of the files without the beginning of its layer's names."""
    return module.removeprefix(names.layers).partition(".")[2] if module.startswith(names.layers) else module


def _prefix(prefix: str, names: TensorNames) -> str:
    return prefix.replace("model.layers.", names.layers, 1)


def _num_groups(inner: str, names: TensorNames, config: ModelConfig) -> int:
    """Return the number of equal parts of a module of the files, each with rows of all the modules that it joins."""
    kind = names.joins_heads.get(inner)
    if kind is None:
        return 1
    if kind == "query":
        return config.num_heads
    assert config.delta is not None
    return config.delta.num_key_heads


def _num_heads(name: str, config: ModelConfig) -> int:
    """Return the number of heads whose rows a tensor has; 0 if they do not rotate."""
    inner = _split(name)[1].rpartition(".")[0]
    heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}
    return heads.get(inner, 1 if inner in ("self_attn.q_norm", "self_attn.k_norm") else 0)


def arranged(
    files: Files,
    config: ModelConfig,
    names: TensorNames | None,
    *,
    is_text_part: bool,
) -> TensorSource:
    """Return the tensors under their canonical names, whatever the files call them."""
    if names is None and not config.is_interleaved and not is_text_part:
        return files
    return ArrangedSource(files, config, names or TensorNames(), is_text_part=is_text_part)
