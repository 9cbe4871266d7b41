"""GGUF files: header and tensors, under Hugging Face names (the model configuration: `gguf_config.py`). Tensors are
dequantised, or in whole numbers (`gguf_integers.py`).

The header is parsed here because `gguf.GGUFReader` spends seconds on the 150,000 token strings of a vocabulary (each
becomes numpy objects), for every file of every run. Types, block sizes and dequantisation come from the `gguf` package.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize

from specbatch.errors import ModelError
from specbatch.models.checks import shown
from specbatch.models.config import ModelConfig
from specbatch.models.formats.gguf_integers import FORMS, GgufIntegers, read_integers
from specbatch.models.linears.integer import IntegerNumbers

T = TypeVar("T")
_Q = GGMLQuantizationType
# fmt: off
SUPPORTED_TENSOR_TYPES = (
    _Q.F32, _Q.F16, _Q.BF16, _Q.Q8_0, _Q.Q4_0, _Q.Q4_1, _Q.Q5_0, _Q.Q5_1, _Q.Q4_K, _Q.Q5_K, _Q.Q6_K,
)
# fmt: on

# Little-endian struct codes of the scalar metadata types 0..12; 8 is string, 9 is array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Bounds, many times above those of any model, so that a damaged number costs neither minutes nor gigabytes.
_HEADER_BYTES = 1 << 27
_MAX_ITEMS = 1 << 22  # elements of all arrays together
_MAX_DEPTH = 4  # depth of nested arrays
_MAX_DIMS = 4  # dimensions of a tensor, as in ggml
# Elements dequantised at a time: temporaries stay in the processor's cache (2-5x faster than whole tensors).
_CHUNK_ELEMENTS = 1 << 18
_MAX_THREADS = min(16, os.cpu_count() or 1)


@dataclass(frozen=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]  # row-major, i.e. GGUF's dimensions reversed
    type: GGMLQuantizationType
    start: int  # bytes from the start of the file
    num_bytes: int


class GgufFile:
    """An open GGUF file (versions 2 and 3, little-endian): its metadata, and its tensors as memory-mapped bytes.

    Raises ModelError where the file is missing, truncated, damaged or of another format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._items_left = _MAX_ITEMS
        try:
            self.data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelError(f"cannot open {path}: {error}") from error
        try:
            self._read_header(memoryview(self.data[:_HEADER_BYTES]))  # type: ignore[arg-type]
        except (struct.error, UnicodeDecodeError) as error:
            raise self._damaged(f"its header ends early or is malformed ({error})") from error

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens the file itself."""
        return GgufFile, (self.path,)

    def _damaged(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is truncated or damaged: {why}", hint="download the file again")

    def _read_header(self, buffer: memoryview) -> None:
        magic, version, num_tensors, num_entries = struct.unpack_from("<4sIQQ", buffer, 0)
        if magic != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file (it starts with {magic!r})")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported", hint="supported versions: 2, 3")
        offset = 24
        for _ in range(num_entries):  # a number that is too large ends with the file
            key, offset = _read_string(buffer, offset)
            (kind,) = struct.unpack_from("<I", buffer, offset)
            self.metadata[key], offset = self._read_value(buffer, offset + 4, kind)
        infos: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, offset = _read_string(buffer, offset)
            (num_dims,) = struct.unpack_from("<I", buffer, offset)
            if num_dims > _MAX_DIMS:
                raise self._damaged(f"tensor {shown(name)} has {num_dims} dimensions")
            dims = struct.unpack_from(f"<{num_dims}Q", buffer, offset + 4)
            type_id, start = struct.unpack_from("<IQ", buffer, offset + 4 + 8 * num_dims)
            offset += 16 + 8 * num_dims
            infos.append((name, tuple(reversed(dims)), type_id, start))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._damaged(f"general.alignment is {shown(alignment)}")
        data_start = (offset + alignment - 1) // alignment * alignment
        for name, shape, type_id, start in infos:
            if start % alignment:
                raise self._damaged(f"tensor {shown(name)} begins at {start:,}, which is not a multiple of {alignment}")
            self._add_tensor(name, shape, type_id, data_start + start)
        in_order = sorted(self.tensors.values(), key=lambda tensor: (tensor.start, tensor.num_bytes))
        # As ggml wants it. A tensor of a wrong type, whose numbers would mean nothing, mostly has another size.
        for one, other in itertools.pairwise(in_order):
            end = one.start + one.num_bytes
            if end > other.start:
                raise self._damaged(f"tensors {shown(one.name)} and {shown(other.name)} overlap")
            if other.start - end >= alignment:
                gap = f"{other.start - end:,} bytes between its end and {shown(other.name)}"
                raise self._damaged(f"tensor {shown(one.name)} of type {one.type.name} leaves {gap}")

    def _read_value(self, buffer: memoryview, offset: int, kind: int, depth: int = 0) -> tuple[Any, int]:
        if kind == _STRING:
            return _read_string(buffer, offset)
        if kind in _SCALARS:
            (value,) = struct.unpack_from("<" + _SCALARS[kind], buffer, offset)
            return value, offset + struct.calcsize(_SCALARS[kind])
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise self._damaged(f"unknown metadata type {kind}" if kind != _ARRAY else "arrays nested too deep")
        item_kind, count = struct.unpack_from("<IQ", buffer, offset)
        offset += 12
        self._items_left -= count
        if self._items_left < 0:
            raise self._damaged(f"an array of {count:,} items")
        if item_kind in _SCALARS:
            values = struct.unpack_from(f"<{count}{_SCALARS[item_kind]}", buffer, offset)
            return list(values), offset + count * struct.calcsize(_SCALARS[item_kind])
        items = []
        for _ in range(count):
            item, offset = self._read_value(buffer, offset, item_kind, depth + 1)
            items.append(item)
        return items, offset

    def _add_tensor(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> None:
        if name in self.tensors:
            raise self._damaged(f"tensor {shown(name)} appears twice")
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise _unsupported_type(self.path, name, str(type_id)) from None
        if kind not in SUPPORTED_TENSOR_TYPES:
            raise _unsupported_type(self.path, name, kind.name)
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        num_elements = math.prod(shape)
        # Blocks lie along a row. (A tensor of no dimensions is one number.)
        if (shape[-1] if shape else 1) % block_size:
            raise self._damaged(f"tensor {shown(name)} of shape {shape} does not divide into {kind.name} blocks")
        num_bytes = num_elements // block_size * block_bytes
        if start + num_bytes > len(self.data):
            end = f"{start + num_bytes:,}"
            raise self._damaged(f"tensor {shown(name)} ends at byte {end}, the file has {len(self.data):,}")
        self.tensors[name] = GgufTensor(name, shape, kind, start, num_bytes)

    def load(self, name: str, index: int | None = None) -> torch.Tensor:
        """The tensor as float32 on the CPU, dequantised. `index`: one of its matrices or rows alone, along the first
        dimension."""
        tensor = self.tensors[name]
        start, num_bytes, shape = tensor.start, tensor.num_bytes, tensor.shape
        if index is not None:
            num_bytes, shape = num_bytes // shape[0], shape[1:]
            start += index * num_bytes
        raw = self.data[start : start + num_bytes]
        result = np.empty(math.prod(shape), dtype=np.float32)
        block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
        step = _CHUNK_ELEMENTS // block_size

        def fill(first: int) -> None:
            chunk = np.array(raw[first * block_bytes : (first + step) * block_bytes])  # a copy: aligned and not mapped
            values = dequantize(chunk.reshape(1, -1), tensor.type).reshape(-1)
            result[first * block_size : first * block_size + len(values)] = values

        # numpy releases Python's lock. One thread takes 14 seconds for a billion numbers of Q4_K or Q6_K.
        with ThreadPoolExecutor(_MAX_THREADS) as threads:
            list(threads.map(fill, range(0, len(result) // block_size, step)))
        return torch.from_numpy(result.reshape(shape))

    def integers(self, name: str, device: torch.device) -> IntegerNumbers:
        """Return a matrix of one of the types FORMS."""
        tensor = self.tensors[name]
        raw = torch.from_numpy(np.array(self.data[tensor.start : tensor.start + tensor.num_bytes])).to(device)
        return read_integers(raw, tensor.shape, tensor.type)

    def text(self, key: str) -> str | None:
        """A text of the metadata, None where there is none."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{self.path}: {key} must be a text, not {shown(value)}")
        return value

    def items(self, key: str, kind: type[T]) -> list[T]:
        """An array of the metadata, empty where there is none."""
        value = self.metadata.get(key)
        if value is not None and not (isinstance(value, list) and all(type(item) is kind for item in value)):
            raise ModelError(f"{self.path}: {key} must be an array of {kind.__name__}, not {shown(value)}")
        return value or []

    def close(self) -> None:
        # The mapping is closed with its last reference, which is this one.
        del self.data


def _read_string(buffer: memoryview, offset: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", buffer, offset)
    end = offset + 8 + length
    if end > len(buffer):
        raise struct.error(f"a string of {length} bytes at byte {offset}")
    return str(buffer[offset + 8 : end], "utf-8"), end


def _unsupported_type(path: Path, tensor: str, kind: str) -> ModelError:
    names = ", ".join(t.name for t in SUPPORTED_TENSOR_TYPES)
    return ModelError(
        f"{path}: tensor {shown(tensor)} has type {kind}, which is not supported", hint=f"supported types: {names}"
    )


_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _canonical_name(name: str, names: Mapping[str, str]) -> str:
    """The Hugging Face name; a name that has none is kept, for the check of unknown tensors to report. `names`: the
    names of a layer's modules."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in names:
        return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
    return _TOP_NAMES.get(name, name)


def _block_names(config: ModelConfig) -> dict[str, str]:
    """Return the Hugging Face names of a layer's modules. `*` is the number of an expert: a file has all experts of a
    layer in one tensor."""
    moe = config.moe
    if len(config.norms) == 4:  # norms before and after attention and MLP
        return _BLOCK_NAMES | _SANDWICH_NAMES
    if moe is None:
        return _BLOCK_NAMES
    kinds = ("gate", "up", "down")
    experts = {f"ffn_{kind}_exps": f"{moe.block}.experts.*.{moe.projections[i]}" for i, kind in enumerate(kinds)}
    shared = {f"ffn_{kind}_shexp": f"{moe.block}.{moe.shared_name}.{kind}_proj" for kind in kinds}
    gates = {"ffn_gate_inp": f"{moe.block}.{moe.router}", "ffn_gate_inp_shexp": f"{moe.block}.{moe.shared_name}_gate"}
    return _BLOCK_NAMES | experts | shared | gates


class GgufSource:
    """A `TensorSource` over a GGUF file: canonical names, float32, one tensor for each expert, rows of q and k in
    Hugging Face order."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        # rope_freqs.weight is used by the configuration (RopeConfig.frequency_divisors).
        self._names: dict[str, tuple[str, int | None]] = {}  # the tensor in the file, and the number of an expert in it
        names = _block_names(config)
        for stored, tensor in file.tensors.items():
            if stored == "rope_freqs.weight":
                continue
            name = _canonical_name(stored, names)
            if ".*." not in name or len(tensor.shape) != 3:
                self._names[name] = stored, None
                continue
            self._names |= {name.replace("*", str(i)): (stored, i) for i in range(tensor.shape[0])}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._shape(name) for name in self._names}

    def _shape(self, name: str) -> tuple[int, ...]:
        stored, index = self._names[name]
        shape = self._file.tensors[stored].shape
        if name.endswith("_expert_gate.weight") and len(shape) == 1:
            return (1, *shape)  # converters leave out a dimension of 1
        return shape if index is None else shape[1:]

    def load(self, name: str) -> torch.Tensor:
        return self._in_order(name, self._file.load(*self._names[name]).view(self._shape(name)))

    def _in_order(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's rows as Hugging Face has them."""
        if self._config.model_type in ("llama", "mixtral"):
            if ".q_proj." in name:
                return _unpermute(tensor, self._config.num_heads)
            if ".k_proj." in name:
                return _unpermute(tensor, self._config.num_kv_heads)
        return tensor

    def integer_quantization(self) -> GgufIntegers | None:
        """Return the quantization of the linear layers that are whole numbers; None: there are none. Experts are
        dequantised."""
        layers = {name.removesuffix(".weight"): name for name in self._names if name.endswith("_proj.weight")}
        types = {layer: self._file.tensors[self._names[name][0]].type for layer, name in layers.items()}
        found = {layer: kind for layer, kind in types.items() if kind in FORMS and ".experts." not in layer}
        return GgufIntegers(method="GGUF", types=found) if found else None

    def integers(self, name: str, device: torch.device) -> IntegerNumbers:
        """Return a weight of a layer that `integer_quantization` covers, on `device`."""
        found = self._file.integers(self._names[name][0], device)
        numbers, scales = (self._in_order(name, one) for one in (found.numbers_OI, found.scales_OG))
        zeros = None if found.zeros_OG is None else self._in_order(name, found.zeros_OG)
        return replace(found, numbers_OI=numbers, scales_OG=scales, zeros_OG=zeros).checked(name)

    def close(self) -> None:
        self._file.close()


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Convert the row order of interleaved RoPE (pairs adjacent) to that of Hugging Face (halves of a head). Both give
    the same rotation."""
    half = tensor.shape[0] // num_heads // 2
    return tensor.reshape(num_heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def gguf_description(file: GgufFile) -> str:
    """Describe the weights of a file, such as "Q4_K_M dequantised" or "GGUF F16"."""
    try:
        name = LlamaFileType(file.metadata["general.file_type"]).name
    except (KeyError, ValueError):  # no such key, no such number
        sizes: dict[str, int] = {}
        for tensor in file.tensors.values():
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.num_bytes
        name = max(sizes, key=lambda kind: sizes[kind])
    name = name.removeprefix("MOSTLY_").removeprefix("ALL_")
    return f"GGUF {name}" if name in ("F32", "F16", "BF16") else f"{name} dequantised"
