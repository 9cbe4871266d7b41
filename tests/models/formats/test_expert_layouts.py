"""Experts as files have them: one tensor an expert or all of a layer in one tensor, one file or shards, and GGUF."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    HYV3Config,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from specbatch.errors import ModelError
from specbatch.models.config import expected_tensors
from specbatch.models.formats.checkpoint import Checkpoint, open_checkpoint
from tests.models.formats.test_gguf import write

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=160),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, mlp_only_layers=[0], norm_topk_prob=True),
    "olmoe": OlmoeConfig(**SIZES, num_experts=3, num_experts_per_tok=2),
    "glm4_moe": Glm4MoeConfig(**SIZES, n_routed_experts=3, num_experts_per_tok=2, moe_intermediate_size=96),
    "hy_v3": HYV3Config(**SIZES, **EXPERTS, head_dim=16),
    "minimax_m2": MiniMaxM2Config(**SIZES, num_local_experts=3, num_experts_per_tok=2, head_dim=16),
}
ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe"}
GGUF_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")},
}


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[family])
    with torch.no_grad():
        for parameter in (*model.parameters(), *model.buffers()):
            parameter.copy_(torch.rand_like(parameter))
    return model


def saved(path: Path, family: str, **options: Any) -> Checkpoint:
    """Save a model with one tensor an expert, as published files have it, and open it."""
    model_of(family).save_pretrained(path, **options)
    return open_checkpoint(path)


def stacked(path: Path, family: str) -> dict[str, Tensor]:
    """Save a model as transformers has it in memory, and return its tensors."""
    model = model_of(family)
    model.config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}))
    model.generation_config.save_pretrained(path)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, path / "model.safetensors")
    return state


def equal(one: Checkpoint, other: Checkpoint) -> None:
    assert one.config == other.config
    assert one.tensors.shapes().keys() == other.tensors.shapes().keys() == expected_tensors(one.config).keys()
    for name in expected_tensors(one.config):
        assert torch.equal(one.tensors.load(name), other.tensors.load(name)), name


@pytest.mark.parametrize("family", CONFIGS)
def test_stacked_experts(family: str, tmp_path: Path) -> None:
    expected = saved(tmp_path / "one", family)
    stacked(tmp_path / "all", family)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / "all" / "model.safetensors")
    found = open_checkpoint(tmp_path / "all")
    equal(found, expected)
    assert found.description == expected.description == "safetensors float32"


def test_stacked_experts_of_a_bin_file(tmp_path: Path) -> None:
    expected = saved(tmp_path / "one", "mixtral")
    state = stacked(tmp_path / "all", "mixtral")
    (tmp_path / "all" / "model.safetensors").unlink()
    torch.save(state, tmp_path / "all" / "pytorch_model.bin")
    equal(open_checkpoint(tmp_path / "all"), expected)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_shards(is_stacked: bool, tmp_path: Path) -> None:
    """The tensors of a layer are in different files."""
    expected = saved(tmp_path / "one", "qwen3_moe")
    stacked(tmp_path / "all", "qwen3_moe")
    folder = tmp_path / ("all" if is_stacked else "one")
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in state.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found = open_checkpoint(folder)
    assert found.config == expected.config
    for name, tensor in model_of("qwen3_moe").state_dict().items():
        if name.endswith("down_proj") and ".experts." in name:
            assert torch.equal(found.tensors.load(f"{name[: -len('down_proj')]}2.down_proj.weight"), tensor[2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mlp.experts.gate_up_proj": torch.ones(3, 64, 192)}, ("gate_up_proj is [3, 64, 192]", "[3, 192, 64]")),
        ({"mlp.experts.gate_up_proj": torch.ones(2, 192, 64)}, ("gate_up_proj is [2, 192, 64]", "[3, 192, 64]")),
        ({"mlp.experts.down_proj": None}, ("3 tensors are missing", "layers.1.mlp.experts.0.down_proj.weight")),
        ({"mlp.experts.3.up_proj.weight": torch.ones(96, 64)}, ("unknown", "layers.1.mlp.experts.3.up_proj.weight")),
        ({"mlp.experts.2.up_proj.weight": torch.ones(96, 64)}, ("twice", "layers.1.mlp.experts.2.up_proj.weight")),
        ({"mlp.experts.gate_up_proj_bias": torch.ones(3, 192)}, ("unknown", "layers.1.mlp.experts.gate_up_proj_bias")),
        ({"mlp.gate.bias": torch.ones(3)}, ("unknown", "layers.1.mlp.gate.bias")),
        ({"mlp.gate.weight": None}, ("missing", "layers.1.mlp.gate.weight")),
    ],
)
def test_tensors_that_do_not_fit(change: dict[str, Tensor | None], words: tuple[str, ...], tmp_path: Path) -> None:
    state = stacked(tmp_path, "qwen3_moe") | {f"model.layers.1.{name}": tensor for name, tensor in change.items()}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        open_checkpoint(tmp_path)
    assert all(word in caught.value.message for word in words), caught.value.message


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral").tensors.close()
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 tensors are missing: model\.layers\.1\.block_sparse_moe\.experts\.2\.w3"):
        open_checkpoint(tmp_path)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    """GLM-4.5's files have one after the last layer."""
    saved(tmp_path, "glm4_moe").tensors.close()
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {"model.layers.2.eh_proj.weight": torch.ones(64, 128)}, tmp_path / "model.safetensors")
    open_checkpoint(tmp_path)
    save_file(state | {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unknown: model\.layers\.3\.eh_proj"):
        open_checkpoint(tmp_path)
    save_file(state | {"mtp.fc.weight": torch.ones(64, 128)}, tmp_path / "model.safetensors")
    open_checkpoint(tmp_path)


def gguf_state(family: str) -> dict[str, Tensor]:
    """Return a model's tensors with the experts' under their names in GGUF, as converters write them."""
    state: dict[str, Tensor] = {}
    for name, tensor in model_of(family).state_dict().items():
        layer, _, module = name.removeprefix("model.layers.").partition(".")
        if module == "mlp.experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            state |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
        elif module == "mlp.experts.down_proj":
            state[f"blk.{layer}.ffn_down_exps.weight"] = tensor
        elif (module := module.removesuffix(".weight")) in GGUF_NAMES:
            state[f"blk.{layer}.{GGUF_NAMES[module]}.weight"] = tensor.squeeze()
        else:
            state[name] = tensor
    return state


def write_gguf(path: Path, family: str, kind: Q = Q.F32, **metadata: Any) -> None:
    architecture = ARCHITECTURES[family]
    sizes = {"expert_count": 3, "expert_used_count": 2}
    if family.startswith("qwen"):
        sizes |= {"expert_feed_forward_length": 96}
    if family == "qwen2_moe":
        sizes |= {"expert_shared_feed_forward_length": 160}
    metadata = {f"{architecture}.{key}": value for key, value in (sizes | metadata).items() if value is not None}
    write(path, CONFIGS[family], gguf_state(family), kind, metadata=metadata, architecture=architecture)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gguf(family: str, tmp_path: Path) -> None:
    expected = saved(tmp_path / "one", family)
    write_gguf(tmp_path / "m.gguf", family)
    equal(open_checkpoint(tmp_path / "m.gguf"), expected)


def test_quantised_gguf(tmp_path: Path) -> None:
    """Blocks of a type lie in rows, so an expert is whole blocks."""
    write_gguf(tmp_path / "m.gguf", "qwen3_moe", Q.Q8_0)
    model = open_checkpoint(tmp_path / "m.gguf")
    found = model.tensors.load("model.layers.1.mlp.experts.2.up_proj.weight")
    assert model.quantization is not None
    assert model.quantization.covers("model.layers.1.self_attn.q_proj")
    assert not model.quantization.covers("model.layers.1.mlp.experts.2.up_proj")
    expected = model_of("qwen3_moe").state_dict()["model.layers.1.mlp.experts.gate_up_proj"][2, 96:]
    assert float((found - expected).abs().max()) < 0.01


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"expert_gating_func": 2}, r"expert_gating_func 2"),
        ({"expert_weights_scale": 2.5}, r"expert_weights_scale 2\.5"),
        ({"expert_weights_norm": False}, r"expert_weights_norm False"),
        ({"expert_group_count": 4}, r"expert_group_count 4"),
        ({"expert_used_count": 4}, r"expert_used_count 4"),
        ({"expert_used_count": None}, r"expert_used_count"),
        ({"expert_count": 4}, r"missing: model\.layers\.1\.mlp\.experts\.3\."),
        ({"expert_feed_forward_length": 32}, r"experts\.0\.gate_proj\.weight is \[96, 64\], expected \[32, 64\]"),
    ],
)
def test_gguf_that_is_refused(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3_moe", **metadata)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(tmp_path / "m.gguf")
    assert re.search(words, caught.value.message), caught.value.message
