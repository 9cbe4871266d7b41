"""The tensors of a checkpoint: safetensors and `.bin` files, which are opened but not read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from specbatch.errors import ModelError
from specbatch.models.checks import first_names, shown
from specbatch.models.formats.files import is_there, read_json
from specbatch.models.linears.integer_quantization import WHOLE_NUMBERS
from specbatch.models.linears.layer_quantization import QUANTIZED_HINT


class TensorSource(Protocol):
    """A set of tensors that is opened but not loaded."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def load(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in its stored dtype (GGUF: dequantised float32; random weights: as they will be used,
        on their device). Raises KeyError for unknown names."""
        ...

    def close(self) -> None: ...


class PackedReader(Protocol):
    """A reader of weights in MXFP4, see `kernels/torch/parts/mxfp4.py`."""

    def packed(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values and the scales of a weight by its canonical name."""
        ...


_FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SAFETENSORS_TYPES = dict(
    zip(
        ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "U8", "I32", "I64"),
        (*_FLOATS, "uint8", "int32", "int64"),
        strict=True,
    )
)
_MAX_OPEN = 2  # files, because a layer can begin in one and end in another
# Tensors of draft heads that count or choose tokens.
_WHOLE_NUMBERS = ("d2t", "t2d")
# Tensors of weights in whole numbers (`linears/integer_quantization.py`). Which types these may have depends on the
# quantization, see `checkpoint.py`.
_PACKED_INTEGERS = re.compile(rf".+\.({'|'.join(WHOLE_NUMBERS)})")
_PACKED_EXPERTS = re.compile(r".+\.experts\.\w+_(blocks|scales)")  # those of gpt-oss in MXFP4


class SafetensorsSource:
    """One or more safetensors files. Only their headers are read until `load`.

    Files are mapped into memory, and what was read of them stays there as long as they are open. So only the files that
    were read last are: a model of many files takes the memory of two of them while it is loaded.
    """

    kind = "safetensors"

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._handles: dict[Path, Any] = {}  # open files, the one that was read last at the end
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}  # the types that are known here as torch calls them
        for file in files:
            try:
                handle = self._handle(file)
            except (SafetensorError, OSError, ValueError) as error:  # ValueError: a path that is no Unicode
                raise ModelError(
                    f"{file} is truncated, damaged or not a safetensors file: {error}", hint="download the file again"
                ) from error
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in self._file_of:
                    raise ModelError(f"tensor {name!r} is in two files of {file.parent}")
                part = handle.get_slice(name)
                self._file_of[name] = file
                self._shapes[name] = tuple(part.get_shape())
                self.dtypes[name] = _SAFETENSORS_TYPES.get(part.get_dtype(), part.get_dtype())

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files itself."""
        return type(self), (self._files,)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def load(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle(self._file_of[name]).get_tensor(name)
        return tensor

    def _handle(self, file: Path) -> Any:
        """Return the open file. Another one is closed if there are too many. Tensors of it that are in use stay."""
        handle = self._handles.pop(file, None) or safe_open(str(file), framework="pt", device="cpu")
        self._handles[file] = handle
        if len(self._handles) > _MAX_OPEN:
            del self._handles[next(iter(self._handles))]
        return handle

    def load_rows(self, name: str, index: int, first: int, last: int) -> torch.Tensor:
        """Read rows `first` to `last` of entry number `index` of a tensor with two or more dimensions."""
        rows: torch.Tensor = self._handle(self._file_of[name]).get_slice(name)[index, first:last]
        return rows

    def close(self) -> None:
        self._file_of.clear()
        self._handles.clear()


class TorchBinSource:
    """One or more `pytorch_model*.bin` files, memory-mapped and unpickled with weights_only=True."""

    kind = "pytorch"

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            try:
                state = torch.load(str(file), map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # zip, pickle and I/O errors have no common base
                raise ModelError(
                    f"cannot read {file}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
                    hint="download the file again, or convert the checkpoint to safetensors",
                ) from error
            if not isinstance(state, dict) or not all(map(_is_plain, state.keys(), state.values())):
                raise ModelError(f"{file} does not hold a plain state dict of tensors")
            twice = sorted(self._tensors.keys() & state.keys())
            if twice:
                raise ModelError(f"tensor {twice[0]!r} is in two files of {file.parent}")
            self._tensors.update(state)

    @property
    def dtypes(self) -> dict[str, str]:
        return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._tensors.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the files itself."""
        return type(self), (self._files,)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def load(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def load_rows(self, name: str, index: int, first: int, last: int) -> torch.Tensor:
        """Read rows `first` to `last` of entry number `index` of a tensor with two or more dimensions."""
        return self._tensors[name][index, first:last]

    def close(self) -> None:
        self._tensors.clear()


class RenamedSource:
    """Some tensors of `files` under other names. `names`: those in the files, by the new ones."""

    def __init__(self, files: SafetensorsSource | TorchBinSource, names: Mapping[str, str]) -> None:
        self._files, self._names = files, names
        self.kind = files.kind

    @property
    def dtypes(self) -> Mapping[str, str]:
        dtypes = self._files.dtypes
        return {name: dtypes[stored] for name, stored in self._names.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._files.shapes()
        return {name: shapes[stored] for name, stored in self._names.items()}

    def load(self, name: str) -> torch.Tensor:
        return self._files.load(self._names[name])

    def load_rows(self, name: str, index: int, first: int, last: int) -> torch.Tensor:
        """Read rows `first` to `last` of entry number `index` of a tensor with two or more dimensions."""
        return self._files.load_rows(self._names[name], index, first, last)

    def close(self) -> None:
        self._files.close()


def _is_plain(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided


def open_tensors(directory: Path) -> SafetensorsSource | TorchBinSource:
    """Open the weights of a Hugging Face directory: safetensors before `.bin`, one file or an index with shards.

    Raises ModelError where there are none, or they are damaged or no floating-point numbers.
    """
    tensors = _open_files(directory)
    for name, dtype in tensors.dtypes.items():
        is_packed = _PACKED_EXPERTS.fullmatch(name) or _PACKED_INTEGERS.fullmatch(name)
        if dtype not in _FLOATS and not (name in _WHOLE_NUMBERS or is_packed or is_stored_mask(name)):
            tensors.close()
            raise ModelError(
                f"tensor {shown(name)} of {directory} has the type {dtype}; weights must be floating-point numbers",
                hint=f"if the checkpoint is quantised, {QUANTIZED_HINT}",
            )
    return tensors


def _open_files(directory: Path) -> SafetensorsSource | TorchBinSource:
    for single, source in (("model.safetensors", SafetensorsSource), ("pytorch_model.bin", TorchBinSource)):
        if is_there(directory / single):
            return source([directory / single])
        if is_there(directory / f"{single}.index.json"):
            return source(_shards(directory / f"{single}.index.json"))
    others = [path for path in sorted(directory.glob("*.safetensors")) if is_there(path)]
    if len(others) == 1:
        return SafetensorsSource(others)
    if others:
        raise ModelError(
            f"{directory} has {len(others)} safetensors files but no model.safetensors.index.json",
            hint="download the index too; it lists the files of the model",
        )
    ggufs = sorted(directory.glob("*.gguf"))
    raise ModelError(
        f"{directory} has no weights (model.safetensors, pytorch_model.bin or an index of shards)",
        hint=f"name the GGUF file itself: {ggufs[0]}" if ggufs else None,
    )


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map")
    for name in weight_map.values():
        # By name only: files of a hub cache are links to elsewhere.
        if not isinstance(name, str) or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ModelError(f"{index} names a shard outside its folder: {shown(name)}")
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not is_there(index.parent / name)]
    if missing:
        raise ModelError(
            f"{index.parent} lacks {len(missing)} of {len(names)} shards: {first_names(missing)}",
            hint="the download is incomplete; fetch the missing files",
        )
    return [index.parent / name for name in names]


def is_stored_mask(name: str) -> bool:
    """Return whether a tensor is the causal mask of an attention, which old files of GPT-2 and GPT-NeoX have."""
    return re.fullmatch(r"(.+\.)?(attention|attn)\.(masked_)?bias", name) is not None


def is_stored_rotary(name: str) -> bool:
    return re.fullmatch(r"(.+\.)?rotary_emb\.inv_freq", name) is not None
