"""Model directories that are damaged or hostile: each gives a ModelError, at once, and reads nothing outside."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specbatch.errors import ModelError, SpecbatchError
from specbatch.models.download import resolve_model
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.formats.files import read_json
from specbatch.models.formats.tokenizer import load_tokenizer
from tests.tiny_checkpoint import random_state, write_checkpoint

pytestmark = pytest.mark.timeout(60)  # what waits for a pipe waits for ever


def load(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    checkpoint.config.rope.inverse_frequencies(checkpoint.config.head_dim)
    for name in checkpoint.tensors.shapes():
        checkpoint.tensors.load(name)
    load_tokenizer(model)


def refusal(model: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(model)
    return f"{caught.value.message} {caught.value.hint}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def test_the_undamaged_one_loads(model: Path) -> None:
    assert open_checkpoint(model).config.num_layers == 2
    assert load_tokenizer(model).decode(load_tokenizer(model).encode("hé")) == "hé"


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    ],
)
def test_a_pipe_is_not_waited_for(name: str, model: Path) -> None:
    (model / name).unlink(missing_ok=True)
    if name.endswith("index.json"):
        (model / "model.safetensors").unlink()
    os.mkfifo(model / name)
    assert f"{name} is no regular file" in refusal(model)


def test_other_pipes_and_devices(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "weights.safetensors")
    assert "weights.safetensors is no regular file" in refusal(model)
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("/dev/zero")
    assert "config.json is no regular file" in refusal(model)
    os.mkfifo(tmp_path / "m.gguf")
    assert "m.gguf is no regular file" in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"a": "\xff"}', "not valid JSON"),
        ("", "not valid JSON"),
        ("null", "must hold a JSON object"),
    ],
)
def test_json_that_is_none(text: str, words: str, model: Path) -> None:
    (model / "config.json").write_text(text, encoding="latin-1")
    assert words in refusal(model)


def test_json_without_end_is_not_read(model: Path) -> None:
    os.truncate(model / "config.json", 1 << 40)  # sparse: it takes no space
    assert "longer than 64 MiB" in refusal(model)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", '{"model": 1}', '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_broken_tokenizers(text: str, model: Path) -> None:
    (model / "tokenizer.json").write_text(text)
    assert "cannot load a tokenizer" in refusal(model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_max_length": "long"}, "cannot load a tokenizer"),
        ({"eos_token": 5}, "cannot load a tokenizer"),
        ({"chat_template": 5}, "chat template"),
    ],
)
def test_values_of_wrong_types_in_tokenizer_config(change: dict[str, Any], words: str, model: Path) -> None:
    (model / "chat_template.jinja").unlink(missing_ok=True)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert words in refusal(model)


@pytest.mark.parametrize("names", [5, "LlamaForCausalLM", [5], {"a": 1}])
def test_architectures_of_wrong_types(names: object, model: Path) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": names}))
    assert "architectures must be a list" in refusal(model)


def shard(model: Path, name: object) -> None:
    index = {"weight_map": dict.fromkeys(random_state(), name)}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["../outside.safetensors", "a/../../outside.safetensors", "ABSOLUTE", 5, None, ["x"]])
def test_shards_stay_in_their_folder(name: object, model: Path) -> None:
    outside = model.parent / "outside.safetensors"
    (model / "model.safetensors").rename(outside)
    (model / "a").mkdir()
    shard(model, str(outside) if name == "ABSOLUTE" else name)
    assert "shard outside its folder" in refusal(model)


@pytest.mark.parametrize("name", ["x" * 5000, "x\0y", "gone.safetensors"])
def test_shards_that_cannot_exist(name: str, model: Path) -> None:
    (model / "model.safetensors").unlink()
    shard(model, name)
    refusal(model)


def test_shards_may_lie_in_a_subfolder_and_be_links(model: Path) -> None:
    (model / "model.safetensors").rename(model.parent / "blob")
    (model / "part").mkdir()
    (model / "part" / "1.safetensors").symlink_to(model.parent / "blob")
    shard(model, "part/1.safetensors")
    assert open_checkpoint(model).description == "safetensors float32"


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_weights_are_floating_point_numbers(kind: str, dtype: torch.dtype, model: Path) -> None:
    state = {name: tensor.to(dtype) for name, tensor in random_state().items()}
    if kind == "safetensors":
        save_file(state, model / "model.safetensors")
    else:
        (model / "model.safetensors").unlink()
        torch.save(state, model / "pytorch_model.bin")
    assert "floating-point" in refusal(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_floating_point_numbers_of_any_size_are_weights(dtype: torch.dtype, model: Path) -> None:
    save_file({name: tensor.to(dtype) for name, tensor in random_state().items()}, model / "model.safetensors")
    assert open_checkpoint(model).description == f"safetensors {str(dtype).removeprefix('torch.')}"


@pytest.mark.parametrize(
    "state",
    [{5: torch.zeros(1)}, {"a": torch.zeros(2, 2).to_sparse()}, {"a": 5}, [torch.zeros(1)]],
    ids=["key", "sparse", "value", "list"],
)
def test_bin_files_hold_tensors_by_name(state: object, model: Path) -> None:
    (model / "model.safetensors").unlink()
    torch.save(state, model / "pytorch_model.bin")
    assert "plain state dict" in refusal(model)


@pytest.mark.parametrize("ref", ["x" * 5000, "a/" * 3000, "~nobody-of-this-name/m", "", "a\0b"])
def test_references_that_no_file_can_have(ref: str) -> None:
    with pytest.raises(ModelError):
        resolve_model(ref)


def test_read_json_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_json(tmp_path / "none.json")


def flipped(content: bytes, rng: random.Random, first: int) -> bytes:
    """`content` with one to three of its first bytes changed."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(first)] ^= 1 << rng.randrange(8)
    return bytes(data)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_flipped_bits_are_harmless_or_told(name: str, model: Path) -> None:
    rng, content = random.Random(name), (model / name).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little") if name == "model.safetensors" else len(content)
    refused = survives(model, model / name, lambda: flipped(content, rng, header), 60)
    assert refused > 10


def survives(model: Path, file: Path, damaged: Callable[[], bytes], times: int) -> int:
    """How many of the damaged files are refused; any error but a SpecbatchError goes through."""
    refused = 0
    for _ in range(times):
        file.write_bytes(damaged())
        try:
            load(model)
        except SpecbatchError:
            refused += 1
    return refused
