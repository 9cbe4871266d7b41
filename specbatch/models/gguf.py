"""GGUF files: header, model configuration and dequantised tensors under Hugging Face names.

The header is parsed here because `gguf.GGUFReader` spends seconds on the 150,000 token strings of a vocabulary (each
becomes numpy objects), for every file of every run. Types, block sizes and dequantisation come from the `gguf` package.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize

from specbatch.errors import ModelError
from specbatch.models.config import ModelConfig, RopeConfig

_Q = GGMLQuantizationType
# fmt: off
SUPPORTED_TENSOR_TYPES = (
    _Q.F32, _Q.F16, _Q.BF16, _Q.Q8_0, _Q.Q4_0, _Q.Q4_1, _Q.Q5_0, _Q.Q5_1, _Q.Q4_K, _Q.Q5_K, _Q.Q6_K,
)
# fmt: on
SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Little-endian struct codes of the scalar metadata types 0..12; 8 is string, 9 is array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Elements dequantised at a time: temporaries stay in the processor's cache (2-5x faster than whole tensors).
_CHUNK_ELEMENTS = 1 << 18


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
        try:
            self.data = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelError(f"cannot open {path}: {error}") from error
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError, RecursionError) as error:
            raise self._damaged(f"its header ends early or is malformed ({error})") from error

    def _damaged(self, why: str) -> ModelError:
        return ModelError(f"{self.path} is truncated or damaged: {why}", hint="download the file again")

    def _read_header(self) -> None:
        buffer = memoryview(self.data)  # type: ignore[arg-type]
        magic, version, num_tensors, num_entries = struct.unpack_from("<4sIQQ", buffer, 0)
        if magic != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file (it starts with {magic!r})")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported", hint="supported versions: 2, 3")
        offset = 24
        for _ in range(num_entries):
            key, offset = _read_string(buffer, offset)
            (kind,) = struct.unpack_from("<I", buffer, offset)
            self.metadata[key], offset = self._read_value(buffer, offset + 4, kind)
        infos: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, offset = _read_string(buffer, offset)
            (num_dims,) = struct.unpack_from("<I", buffer, offset)
            dims = struct.unpack_from(f"<{num_dims}Q", buffer, offset + 4)
            type_id, start = struct.unpack_from("<IQ", buffer, offset + 4 + 8 * num_dims)
            offset += 16 + 8 * num_dims
            infos.append((name, tuple(reversed(dims)), type_id, start))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._damaged(f"general.alignment is {alignment!r}")
        data_start = (offset + alignment - 1) // alignment * alignment
        for name, shape, type_id, start in infos:
            self._add_tensor(name, shape, type_id, data_start + start)

    def _read_value(self, buffer: memoryview, offset: int, kind: int) -> tuple[Any, int]:
        if kind == _STRING:
            return _read_string(buffer, offset)
        if kind in _SCALARS:
            (value,) = struct.unpack_from("<" + _SCALARS[kind], buffer, offset)
            return value, offset + struct.calcsize(_SCALARS[kind])
        if kind != _ARRAY:
            raise self._damaged(f"unknown metadata type {kind}")
        item_kind, count = struct.unpack_from("<IQ", buffer, offset)
        offset += 12
        if count > len(buffer):  # each item takes a byte or more; do not let damage allocate without bound
            raise self._damaged(f"an array of {count} items")
        if item_kind in _SCALARS:
            values = struct.unpack_from(f"<{count}{_SCALARS[item_kind]}", buffer, offset)
            return list(values), offset + count * struct.calcsize(_SCALARS[item_kind])
        items = []
        for _ in range(count):
            item, offset = self._read_value(buffer, offset, item_kind)
            items.append(item)
        return items, offset

    def _add_tensor(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> None:
        if name in self.tensors:
            raise self._damaged(f"tensor {name!r} appears twice")
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise _unsupported_type(self.path, name, str(type_id)) from None
        if kind not in SUPPORTED_TENSOR_TYPES:
            raise _unsupported_type(self.path, name, kind.name)
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        num_elements = int(np.prod(shape, dtype=np.int64))
        if num_elements % block_size:
            raise self._damaged(f"tensor {name!r} of shape {shape} does not divide into {kind.name} blocks")
        num_bytes = num_elements // block_size * block_bytes
        if start + num_bytes > len(self.data):
            raise self._damaged(f"tensor {name!r} ends at byte {start + num_bytes:,}, the file has {len(self.data):,}")
        self.tensors[name] = GgufTensor(name, shape, kind, start, num_bytes)

    def load(self, name: str) -> torch.Tensor:
        """The tensor as float32 on the CPU, dequantised."""
        tensor = self.tensors[name]
        raw = self.data[tensor.start : tensor.start + tensor.num_bytes]
        result = np.empty(int(np.prod(tensor.shape, dtype=np.int64)), dtype=np.float32)
        block_size, block_bytes = GGML_QUANT_SIZES[tensor.type]
        step = _CHUNK_ELEMENTS // block_size
        for first in range(0, len(result) // block_size, step):
            chunk = np.array(raw[first * block_bytes : (first + step) * block_bytes])  # a copy: aligned and not mapped
            values = dequantize(chunk.reshape(1, -1), tensor.type).reshape(-1)
            result[first * block_size : first * block_size + len(values)] = values
        return torch.from_numpy(result.reshape(tensor.shape))

    def close(self) -> None:
        # The mapping goes with its last reference; nobody else is handed one.
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
        f"{path}: tensor {tensor!r} has type {kind}, which is not supported", hint=f"supported types: {names}"
    )


def gguf_model_config(file: GgufFile) -> ModelConfig:
    """The model configuration that the metadata (and the presence of optional tensors) describe."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported",
            hint=f"supported architectures: {', '.join(SUPPORTED_ARCHITECTURES)} (Mistral models are 'llama' in GGUF)",
        )
    if file.metadata.get("split.count", 1) > 1:
        raise ModelError(
            f"{file.path} is one part of a split GGUF", hint="merge the parts first: llama-gguf-split --merge"
        )
    meta = _Metadata(file, architecture)
    if meta.get("expert_count", 0):
        raise ModelError(f"{file.path} is a mixture-of-experts model, which is not supported")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor 'token_embd.weight'")
    hidden_size, num_heads = meta.size("embedding_length"), meta.size("attention.head_count")
    num_layers = meta.size("block_count")
    if num_layers > len(file.tensors):  # before anything is sized by it: the number may be damage
        raise ModelError(f"{file.path}: block_count {num_layers} for {len(file.tensors)} tensors")
    head_dim = meta.get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.get(key, head_dim) != head_dim:
            raise ModelError(f"{file.path}: {key} {meta.get(key)} differs from the head size {head_dim}")
    window = meta.get("attention.sliding_window", 0) or None
    return ModelConfig(
        model_type=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=meta.size("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=meta.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=meta.number("attention.layer_norm_rms_epsilon", None),
        rope=_rope_config(file, meta, head_dim),
        max_position_embeddings=meta.size("context_length"),
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_windows=(window,) * num_layers,
        eos_token_ids=_eos_token_ids(file.metadata),
    )


class _Metadata:
    """The keys under one architecture's name."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{self.file.path}: {key} differs between layers, which is not supported")
            return value[0]
        return value

    def size(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or value <= 0:
            raise ModelError(f"{self.file.path}: metadata {self.architecture}.{key} is missing or not positive")
        return value

    def number(self, key: str, default: float | None) -> float:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"{self.file.path}: metadata {self.architecture}.{key} is missing")
        # Stored as float32; the shortest decimal with those bits is what config.json said (1e-05, not 9.99999975e-06).
        return float(str(np.float32(value)))


def _rope_config(file: GgufFile, meta: _Metadata, head_dim: int) -> RopeConfig:
    theta = meta.number("rope.freq_base", 10000.0)
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.number("rope.scaling.factor", 1.0)
    if kind == "none" and meta.get("rope.scale_linear", 1.0) != 1.0:  # files from before rope.scaling.type
        kind, factor = "linear", meta.number("rope.scale_linear", None)
    divisors: tuple[float, ...] | None = None
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(file.load("rope_freqs.weight").tolist())
        if len(divisors) != head_dim // 2:
            raise ModelError(f"{file.path}: rope_freqs.weight has {len(divisors)} entries, expected {head_dim // 2}")
    if kind == "none":
        return RopeConfig(theta=theta, frequency_divisors=divisors)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=factor, frequency_divisors=divisors)
    if kind == "yarn":
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
            if meta.get(f"rope.scaling.{key}", 1.0) != 1.0:
                raise ModelError(f"{file.path}: rope.scaling.{key} is not supported")
        return RopeConfig(
            theta=theta,
            scaling="yarn",
            factor=factor,
            original_max_position=meta.size("rope.scaling.original_context_length"),
            beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
            frequency_divisors=divisors,
        )
    raise ModelError(f"{file.path}: rope scaling {kind!r} is not supported", hint="supported: none, linear, yarn")


# Tokens that end a turn, in chat templates that name them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>")
# Further ids that the generation_config.json of a family's chat models lists, which GGUF has no key for.
_FAMILY_ENDS = {"qwen2": ("<|im_end|>", "<|endoftext|>"), "llama-bpe": ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")}


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    template = metadata.get("tokenizer.chat_template")
    if template:
        wanted = {text for text in _TURN_ENDS if text in template}
        wanted.update(_FAMILY_ENDS.get(metadata.get("tokenizer.ggml.pre", ""), ()))
        kinds = metadata.get("tokenizer.ggml.token_type")
        for i, text in enumerate(metadata.get("tokenizer.ggml.tokens", ())):
            if text in wanted and (kinds is None or kinds[i] != 1):  # 1: an ordinary token that merely reads so
                ids.append(i)
    return tuple(dict.fromkeys(ids))


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
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _canonical_name(name: str) -> str:
    """The Hugging Face name; a name that has none is kept, for the check of unknown tensors to report."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _BLOCK_NAMES:
        return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"
    return _TOP_NAMES.get(name, name)


class GgufSource:
    """A `TensorSource` over a GGUF file: canonical names, float32, rows of q and k in Hugging Face order."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        # rope_freqs.weight is used by the configuration (RopeConfig.frequency_divisors).
        self._names = {_canonical_name(name): name for name in file.tensors if name != "rope_freqs.weight"}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: self._file.tensors[stored].shape for name, stored in self._names.items()}

    def load(self, name: str) -> torch.Tensor:
        tensor = self._file.load(self._names[name])
        if self._config.model_type == "llama":
            if ".q_proj." in name:
                return _unpermute(tensor, self._config.num_heads)
            if ".k_proj." in name:
                return _unpermute(tensor, self._config.num_kv_heads)
        return tensor

    def close(self) -> None:
        self._file.close()


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """From interleaved-RoPE row order (pairs adjacent) to Hugging Face's (halves of a head): both rotate alike."""
    half = tensor.shape[0] // num_heads // 2
    return tensor.reshape(num_heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def gguf_description(file: GgufFile) -> str:
    """Such as "Q4_K_M dequantised" or "GGUF F16"."""
    try:
        name = LlamaFileType(file.metadata["general.file_type"]).name
    except (KeyError, ValueError):
        sizes: dict[str, int] = {}
        for tensor in file.tensors.values():
            sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.num_bytes
        name = max(sizes, key=lambda kind: sizes[kind])
    name = name.removeprefix("MOSTLY_").removeprefix("ALL_")
    return f"GGUF {name}" if name in ("F32", "F16", "BF16") else f"{name} dequantised"
