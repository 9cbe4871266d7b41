"""GGUF files whose header is damaged: each gives a ModelError, without waiting and without gigabytes of memory."""

from __future__ import annotations

import itertools
import os
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from specbatch.errors import ModelError
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.formats.gguf import GgufFile
from specbatch.models.formats.tokenizer import load_tokenizer
from tests.models.formats.test_damaged_models import flipped, survives
from tests.models.formats.test_gguf import SIZES, state_of, write

pytestmark = pytest.mark.timeout(60)
HUGE = 1 << 60
STRING, ARRAY, UINT8, FLOAT32 = 8, 9, 0, 6


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, start: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, start)


def header(parts: list[bytes], tensors: list[bytes], *, num_entries: int | None = None) -> bytes:
    counts = len(tensors), len(parts) if num_entries is None else num_entries
    return struct.pack("<4sIQQ", b"GGUF", 3, *counts) + b"".join(parts) + b"".join(tensors)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("<4sIQQ", b"GGUF", 3, HUGE, 0), "ends early"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, HUGE), "ends early"),
        (header([struct.pack("<Q", HUGE)], []), "a string of"),
        (header([entry("a", STRING, struct.pack("<Q", 1 << 40))], []), "a string of"),
        (header([entry("a", STRING, text("\0") + b"\xff")], [], num_entries=2), "ends early"),
        (header([entry("a", STRING, struct.pack("<Q", 1) + b"\xff")], []), "malformed"),
        (header([entry("a", ARRAY, struct.pack("<IQ", UINT8, HUGE))], []), "an array of"),
        (header([entry("a", ARRAY, struct.pack("<IQ", FLOAT32, 1 << 20))], []), "ends early"),
        (header([entry("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 100)], []), "nested too deep"),
        (header([entry("a", 77, b"")], []), "unknown metadata type 77"),
        (header([], [text("t") + struct.pack("<I", 2**32 - 1)]), "dimensions"),
        (header([], [tensor("t", (1 << 32, 1 << 32))]), "ends at byte"),
        (header([], [tensor("t", (1 << 63, 2))]), "ends at byte"),
        (header([], [tensor("t", (4,), 999)]), "type 999"),
        (header([], [tensor("t", (4,), 0, HUGE)]), "ends at byte"),
        (header([], [tensor("t", (4,), 0, 3)]), "not a multiple of 32"),
        (header([], [tensor("t", (4,)), tensor("t", (4,), 0, 32)]), "twice"),
        (header([], [tensor("t", (16,)), tensor("u", (4,), 0, 32)]), "overlap"),
        (header([], [tensor("t", (33,), 8)]), "blocks"),
        (header([entry("general.alignment", 4, bytes(4))], []), "general.alignment is 0"),
        (header([entry("general.alignment", STRING, text("32"))], []), "general.alignment is '32'"),
    ],
    ids=itertools.count(),
)
def test_damaged_headers(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content + bytes(128))
    with pytest.raises(ModelError) as caught:
        GgufFile(tmp_path / "m.gguf")
    assert words in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    "part",
    [
        entry("a", ARRAY, struct.pack("<IQ", UINT8, 1 << 24)),
        entry("a", ARRAY, struct.pack("<IQ", STRING, 1 << 40)),
        entry("a", STRING, struct.pack("<Q", 1 << 30)),
    ],
    ids=["array", "texts", "text"],
)
def test_a_large_file_lends_no_room_to_a_damaged_count(part: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header([part], []))
    os.truncate(path, 8 << 30)  # sparse: it takes no space
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metadata": {"llama.block_count": 10**9}}, ("block_count", "1000")),
        ({"metadata": {"llama.block_count": "2"}}, ("block_count", "'2'")),
        ({"metadata": {"llama.attention.head_count": 0}}, ("head_count", "not 0")),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, ("num_key_value_heads 3",)),
        ({"metadata": {"llama.attention.key_length": 63}}, ("63",)),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": -1.0}}, ("epsilon", "above 0")),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": "1"}}, ("epsilon", "'1'")),
        ({"metadata": {"llama.rope.freq_base": -5.0}}, ("rope_theta", "-5")),
        ({"metadata": {"llama.rope.freq_base": float("nan")}}, ("freq_base", "finite")),
        ({"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}}, ("factor is 0",)),
        ({"metadata": {"llama.rope.scaling.type": 5}}, ("rope scaling 5",)),
        ({"metadata": {"llama.attention.sliding_window": "x"}}, ("sliding_window", "'x'")),
        ({"metadata": {"llama.context_length": 0}}, ("context_length",)),
        ({"metadata": {"general.architecture": 5}}, ("architecture 5",)),
        ({"metadata": {"split.count": "x"}}, ("split",)),
        ({"metadata": {"tokenizer.ggml.eos_token_id": "x"}}, ("eos_token_id", "'x'")),
        ({"metadata": {"tokenizer.chat_template": 5}}, ("chat_template", "not 5")),
        ({"extra": {"rope_freqs.weight": np.full(32, np.nan, np.float32)}}, ("divisor", "nan")),
        ({"extra": {"rope_freqs.weight": np.zeros(32, np.float32)}}, ("divisor", "above 0")),
        ({"extra": {"rope_freqs.weight": np.zeros((2, 32), np.float32)}}, ("rope_freqs.weight", "[2, 32]")),
    ],
)
def test_metadata_that_makes_no_model(options: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    write(tmp_path / "m.gguf", config, state_of(config), **options)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(tmp_path / "m.gguf")
    assert all(word in caught.value.message for word in words), caught.value.message


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tokenizer.ggml.model": 5}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": 5}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": "a b"}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.add_bos_token": 1}, "add_bos_token"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": 5}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.token_type": "x"}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": 1.0}, "tokenizer.ggml.scores"),
    ],
)
def test_metadata_that_makes_no_tokenizer(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 1})
    write(tmp_path / "m.gguf", config, state_of(config), metadata=metadata)
    with pytest.raises(ModelError, match=words):
        load_tokenizer(tmp_path / "m.gguf")


def test_flipped_bits_are_harmless_or_told(tmp_path: Path) -> None:
    config, path, rng = LlamaConfig(**SIZES | {"num_hidden_layers": 1}), tmp_path / "m.gguf", random.Random(0)
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "tokenizer.ggml.model": "gpt2"}
    yarn |= {"llama.rope.scaling.original_context_length": 64, "tokenizer.ggml.pre": "gpt-2"}
    write(path, config, state_of(config), metadata=yarn)
    file = GgufFile(path)
    first = min(each.start for each in file.tensors.values())
    file.close()
    content = path.read_bytes()
    assert survives(path, path, lambda: flipped(content, rng, first), 60) > 10
