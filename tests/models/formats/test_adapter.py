"""LoRA adapters that are merged into their base model while it is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from specbatch import LLM
from specbatch.config_load import load_config
from specbatch.errors import ModelError
from specbatch.models.formats.checkpoint import Checkpoint, open_checkpoint, with_adapter
from specbatch.results.fingerprint import ModelFiles
from specbatch.startup import model_paths
from tests.models.formats.test_expert_layouts import CONFIGS, SIZES
from tests.tiny_checkpoint import random_state, write_checkpoint

Q_PROJ, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
LAYERS = {Q_PROJ: (64, 64), DOWN: (64, 32), "lm_head": (40, 64)}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "lora_dropout": 0.1, "target_modules": ["q_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("base")
    AutoModelForCausalLM.from_config(Qwen2Config(**SIZES)).save_pretrained(path)
    return path


def parts_of(layers: Mapping[str, tuple[int, int]], rank: int = 4) -> dict[str, Tensor]:
    """Return A and B of layers of these shapes."""
    generator, parts = torch.Generator().manual_seed(1), {}
    for name, (outputs, inputs) in layers.items():
        parts[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
        parts[f"base_model.model.{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    return parts


def write_adapter(path: Path, parts: Mapping[str, Tensor], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(dict(parts), path / "adapter_model.safetensors")
    return path


def merged(base: Path, adapter: Path) -> Checkpoint:
    return with_adapter(open_checkpoint(base), adapter)


@pytest.mark.parametrize(("config", "scale"), [({}, 1.5), ({"use_rslora": True}, 3.0), ({"lora_alpha": 2}, 0.5)])
def test_weights_are_those_of_the_sum(base: Path, tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    parts = parts_of(LAYERS)
    found = merged(base, write_adapter(tmp_path / "a", parts, **config)).tensors
    for name, weight in load_file(base / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if layer in LAYERS:
            down, up = (parts[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
            weight = weight + scale * (up @ down)
            torch.testing.assert_close(found.load(name), weight, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found.load(name), weight)


def test_ranks_and_scales_by_pattern(base: Path, tmp_path: Path) -> None:
    parts = parts_of({Q_PROJ: (64, 64)}) | parts_of({DOWN: (64, 32)}, rank=2)
    config = {"rank_pattern": {"mlp.down_proj": 2}, "alpha_pattern": {r"layers\.0\.mlp\.\w+": 10}}
    found = merged(base, write_adapter(tmp_path / "a", parts, **config)).tensors
    down, up = (parts[f"base_model.model.{DOWN}.lora_{part}.weight"] for part in "AB")
    expected = load_file(base / "model.safetensors")[f"{DOWN}.weight"] + 5 * (up @ down)
    torch.testing.assert_close(found.load(f"{DOWN}.weight"), expected, rtol=1e-5, atol=1e-5)


def test_one_expert_can_be_adapted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"]).save_pretrained(tmp_path / "base")
    name = "model.layers.1.mlp.experts.2.gate_proj"
    parts = parts_of({name: (96, 64)})
    found = merged(tmp_path / "base", write_adapter(tmp_path / "a", parts)).tensors
    weight = load_file(tmp_path / "base" / "model.safetensors")[f"{name}.weight"]
    down, up = parts.values()
    torch.testing.assert_close(found.load(f"{name}.weight"), weight + 1.5 * (up @ down), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "config", "message"),
    [
        ({"model.layers.9.mlp.up_proj": (32, 64)}, {}, "1 linear layers that the model does not have: model.layers.9"),
        ({Q_PROJ: (64, 32)}, {}, r"q_proj is for a weight of \(64, 32\), and the model's is \(64, 64\)"),
        ({Q_PROJ: (64, 64)}, {"r": 8}, "a rank of 4 and 4 in adapter_model.safetensors, and of 8"),
        ({Q_PROJ: (64, 64)}, {"use_dora": True}, "use_dora is True, which is not supported"),
        ({Q_PROJ: (64, 64)}, {"bias": "all"}, "bias is 'all'"),
        ({Q_PROJ: (64, 64)}, {"modules_to_save": ["lm_head"]}, "modules_to_save is"),
        ({Q_PROJ: (64, 64)}, {"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({Q_PROJ: (64, 64)}, {"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        ({Q_PROJ: (64, 64)}, {"a_key_of_tomorrow": 1}, "a_key_of_tomorrow is 1"),
        ({Q_PROJ: (64, 64)}, {"peft_type": "IA3"}, "an adapter of the kind 'IA3'"),
        ({Q_PROJ: (64, 64)}, {"lora_alpha": "6"}, "lora_alpha of model.layers.1"),
        ({Q_PROJ: (64, 64)}, {"use_rslora": "no"}, "use_rslora must be true or false"),
        ({Q_PROJ: (64, 64)}, {"alpha_pattern": {"[": 1}}, r"alpha_pattern: '\[' is no regular expression"),
        ({"model.embed_tokens": (40, 64)}, {}, "1 linear layers that the model does not have: model.embed_tokens"),
        ({}, {}, "no adapted layer"),
    ],
)
def test_what_is_not_merged_is_an_error(
    base: Path, tmp_path: Path, layers: dict[str, tuple[int, int]], config: dict[str, Any], message: str
) -> None:
    adapter = write_adapter(tmp_path / "a", parts_of(layers), **config)
    with pytest.raises(ModelError, match=message):
        merged(base, adapter)


def test_other_tensors_of_the_file_are_an_error(base: Path, tmp_path: Path) -> None:
    parts = parts_of({Q_PROJ: (64, 64)})
    for extra in ("base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.lora_embedding_A"):
        adapter = write_adapter(tmp_path / "a", parts | {extra: torch.zeros(4, 4)})
        with pytest.raises(ModelError, match=f"tensors that cannot be merged: {extra}"):
            merged(base, adapter)
    half = dict(list(parts.items())[:1])
    with pytest.raises(ModelError, match=r"cannot be merged: .*lora_A"):
        merged(base, write_adapter(tmp_path / "a", half))
    with pytest.raises(ModelError, match=r"no adapter: it has no adapter_config\.json"):
        merged(base, base)


def test_one_adapter_for_each_layer(base: Path, tmp_path: Path) -> None:
    parts = parts_of({Q_PROJ: (64, 64)})
    for old, new in ((".weight", ".default.weight"), ("base_model.model.", "")):
        both = parts | {name.replace(old, new): 2 * tensor for name, tensor in parts.items()}
        with pytest.raises(ModelError, match="tensors that cannot be merged"):
            merged(base, write_adapter(tmp_path / "a", both))
    whole = {name: tensor.to(torch.int8) for name, tensor in parts.items()}
    with pytest.raises(ModelError, match=r"tensors of other types than float32.*lora_A"):
        merged(base, write_adapter(tmp_path / "a", whole))


def test_the_head_of_a_tied_model_is_not_adapted(tmp_path: Path) -> None:
    """Its file can have a copy of the embedding under the name of the head, which is not read."""
    path = write_checkpoint(tmp_path / "base", tie_word_embeddings=True)
    state = load_file(path / "model.safetensors")
    embedding = state["model.embed_tokens.weight"]
    save_file(state | {"lm_head.weight": embedding.clone()}, path / "model.safetensors")
    adapter = write_adapter(tmp_path / "a", parts_of({"lm_head": (len(embedding), embedding.shape[1])}))
    with pytest.raises(ModelError, match="1 linear layers that the model does not have: lm_head"):
        merged(path, adapter)


def test_an_adapter_as_the_model_is_named(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", parts_of(LAYERS))
    with pytest.raises(ModelError, match="has an adapter") as caught:
        open_checkpoint(adapter)
    assert "model.adapter" in str(caught.value.hint)


def test_another_adapter_is_another_job(base: Path, tmp_path: Path) -> None:
    digests = []
    for alpha in (6, 7):
        adapter = write_adapter(tmp_path / "a", parts_of(LAYERS), lora_alpha=alpha)
        config = load_config(None, [f"model.target={base}", f"model.adapter={adapter}", "speculation.method=none"])
        digests.append(ModelFiles(model_paths(config)).digests)
    assert digests[0]["model.target"] == digests[1]["model.target"]
    assert digests[0]["model.adapter"] != digests[1]["model.adapter"]


def test_texts_are_those_of_the_merged_model(tmp_path: Path) -> None:
    path, whole = (write_checkpoint(tmp_path / name) for name in ("base", "whole"))
    state = random_state()
    layers = {name[: -len(".weight")]: (len(w), w.shape[1]) for name, w in state.items() if "_proj." in name}
    parts = parts_of(layers)
    for layer in layers:
        down, up = (parts[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
        state[f"{layer}.weight"] += 0.05 * (up @ down)
    save_file(state, whole / "model.safetensors")
    adapter = write_adapter(tmp_path / "a", parts, lora_alpha=0.2)
    texts = []
    for model, options in ((path, {}), (whole, {}), (path, {"adapter": str(adapter)})):
        with LLM(str(model), max_tokens=12, device="cpu", **options) as llm:
            texts.append([row["text"] for row in llm.generate([{"prompt": "ab"}, {"prompt": "a b c"}])])
    assert texts[0] != texts[1] == texts[2]
