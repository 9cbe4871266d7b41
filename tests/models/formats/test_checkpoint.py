"""Checkpoints that transformers writes open and load; each kind of fault is a ModelError that names its cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from specbatch.errors import ModelError
from specbatch.models.config import expected_tensors
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.formats.tensor_files import open_tensors

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def save(config: PreTrainedConfig, path: Path, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path, **options)
    return model.state_dict()


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    save(LlamaConfig(**SIZES), tmp_path)
    return tmp_path


@pytest.mark.parametrize("shard", ["10GB", "20KB"])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        MistralConfig(**SIZES),
        Qwen2Config(**SIZES, tie_word_embeddings=True),
        Qwen3Config(**SIZES, head_dim=16),
    ],
    ids=["llama", "llama-tied", "mistral", "qwen2", "qwen3"],
)
def test_directories_that_transformers_writes(config: PreTrainedConfig, shard: str, tmp_path: Path) -> None:
    state = save(config, tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (shard == "20KB")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.description == "safetensors float32"
    assert checkpoint.config.model_type == config.model_type
    names = expected_tensors(checkpoint.config)
    assert set(names) == set(state) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    for name in names:
        assert torch.equal(checkpoint.tensors.load(name), state[name]), name
    checkpoint.tensors.close()


@pytest.mark.parametrize("sharded", [False, True])
def test_pytorch_bin(sharded: bool, llama: Path) -> None:
    state = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    if sharded:
        names = sorted(state)
        parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
        for file, part in parts.items():
            torch.save({name: state[name] for name in part}, llama / file)
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (llama / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(state, llama / "pytorch_model.bin")
    checkpoint = open_checkpoint(llama)
    assert checkpoint.description == "pytorch float32"
    assert all(torch.equal(checkpoint.tensors.load(name), tensor) for name, tensor in state.items())


def test_a_single_safetensors_file_of_any_name(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "weights.safetensors")
    assert open_tensors(llama).shapes()["model.norm.weight"] == (32,)
    save_file({"x": torch.zeros(1)}, llama / "more.safetensors")
    with pytest.raises(ModelError, match="index"):
        open_tensors(llama)


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors")


def test_heads_of_tied_models(tmp_path: Path) -> None:
    save(LlamaConfig(**SIZES, tie_word_embeddings=True), tmp_path)
    # The same values: a harmless copy.
    rewrite(tmp_path, lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].clone()}))
    assert open_checkpoint(tmp_path).config.tie_word_embeddings
    # Other values: transformers uses them, and so do we.
    rewrite(tmp_path, lambda s: s["lm_head.weight"].add_(1.0))
    config = open_checkpoint(tmp_path).config
    assert not config.tie_word_embeddings
    assert "lm_head.weight" in expected_tensors(config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_stored_rotary_frequencies_are_harmless(llama: Path) -> None:
    rewrite(llama, lambda s: s.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    open_checkpoint(llama)


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def truncate(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def drop(path: Path, name: str) -> None:
    rewrite(path, lambda state: state.pop(name))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda p: (p / "config.json").unlink(), ("config.json",)),
        (lambda p: (p / "config.json").write_text("{"), ("config.json", "JSON")),
        (lambda p: (p / "config.json").write_text("[]"), ("config.json", "object")),
        (lambda p: (p / "generation_config.json").write_text("{,"), ("generation_config.json", "JSON")),
        (lambda p: (p / "model.safetensors").unlink(), ("no weights", "model.safetensors")),
        (lambda p: truncate(p / "model.safetensors", 3000), ("model.safetensors", "truncated")),
        (lambda p: truncate(p / "model.safetensors", 5), ("model.safetensors", "truncated")),
        (lambda p: truncate(p / "model.safetensors", 20000), ("model.safetensors", "truncated")),
        (lambda p: edit_config(p, model_type="bloom"), ("bloom", "llama")),
        (lambda p: edit_config(p, architectures=["LlamaForSequenceClassification"]), ("SequenceClass",)),
        (lambda p: edit_config(p, architectures=["LlamaForCausalLMEagle3"]), ("Eagle3", "speculation.draft")),
        (lambda p: edit_config(p, intermediate_size=40), ("mlp.up_proj.weight is [48, 32], expected [40, 32]",)),
        (lambda p: edit_config(p, num_hidden_layers=1), ("model.layers.1.mlp.up_proj.weight", "unknown")),
        (lambda p: edit_config(p, num_hidden_layers=3), ("model.layers.2.", "missing")),
        (lambda p: drop(p, "model.norm.weight"), ("model.norm.weight", "missing")),
        (
            lambda p: rewrite(p, lambda s: s.update({"model.extra.weight": torch.ones(1), "odd": torch.ones(1)})),
            ("model.extra.weight, odd", "unknown"),
        ),
        # What other kinds of models have in addition: a missing bias or norm would change each text.
        *(
            (lambda p, name=name: rewrite(p, lambda s: s.update({name: torch.ones(32)})), (name, "unknown"))
            for name in (
                *("model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.up_proj.bias", "lm_head.bias"),
                *("model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.sinks", "model.norm.bias"),
                *("model.layers.0.post_feedforward_layernorm.weight", "vision_tower.patch_embed.weight"),
                *("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", "model.layers.0.mlp.up_proj.scale"),
                *("model.layers.0.mlp.up_proj.weight_scale", "v_head.weight"),
            )
        ),
        # Numbers in FP8 without a scale are other weights.
        *(
            (
                lambda p, name=name, dtype=dtype: rewrite(p, lambda s: s.update({name: s[name].to(dtype)})),
                (name, str(dtype).removeprefix("torch."), "no scale"),
            )
            for name in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight")
            for dtype in (torch.float8_e5m2, torch.float8_e4m3fn)
        ),
        (lambda p: (p / "adapter_config.json").write_text("{}"), ("adapter_config.json", "model.adapter", "merged")),
        (
            lambda p: (p / "model.safetensors").rename(p / "adapter_model.safetensors"),
            ("adapter_model.safetensors", "model.adapter", "merged"),
        ),
        (lambda p: edit_config(p, is_causal=False), ("is_causal",)),
        (lambda p: edit_config(p, mlp_bias=True), ("mlp.gate_proj.bias", "missing")),
    ],
)
def test_faults(fault: Callable[[Path], Any], words: tuple[str, ...], llama: Path) -> None:
    fault(llama)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(llama)
    text = f"{caught.value.message} {caught.value.hint}"
    assert all(word in text for word in words), text


def test_a_folder_that_holds_an_adapter_alone_is_refused_by_name(tmp_path: Path) -> None:
    """Before its missing config.json is reported."""
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/model"}')
    save_file({"base_model.lora_A.weight": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"adapter \(adapter_config.json, adapter_model.safetensors\)"):
        open_checkpoint(tmp_path)


def test_keys_that_are_ignored_are_known(llama: Path) -> None:
    assert open_checkpoint(llama).ignored == ()
    edit_config(llama, auto_map={"AutoModel": "own.Model"}, my_scale=3.0, my_note=None)
    assert open_checkpoint(llama).ignored == ("auto_map", "my_scale")


def test_missing_shard(tmp_path: Path) -> None:
    save(LlamaConfig(**SIZES), tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=lost.name):
        open_checkpoint(tmp_path)


def test_damaged_bin(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    torch.save({"a": torch.ones(100)}, llama / "pytorch_model.bin")
    truncate(llama / "pytorch_model.bin", 300)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        open_checkpoint(llama)


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ModelError, match=r"\.gguf"):
        open_checkpoint(tmp_path / "x.txt")
