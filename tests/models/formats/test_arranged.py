"""Files whose tensors have other names or another arrangement than Llama's. `test_parity.py` compares the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, NemotronConfig, Phi3Config, PreTrainedConfig

from specbatch.config import Config, EngineSection, ModelSection, SpeculationSection
from specbatch.errors import ModelError
from specbatch.models.config import expected_tensors
from specbatch.models.formats.arranged import half_by_half
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.formats.tokenizer import byte_tokenizer
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.engine.test_parity import NO_EOS, SIZES
from tests.fp8_checkpoints import compressed
from tests.tiny_models import run_requests

BYTES = {**SIZES, "vocab_size": 288, "hidden_size": 96}
QKV = "model.layers.1.self_attn.qkv_proj.weight"


def written(config: PreTrainedConfig, path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    byte_tokenizer(config.vocab_size, (1,)).save_pretrained(path)
    return path


def edited(path: Path, state: dict[str, Any] | None = None, **keys: Any) -> Path:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | keys))
    save_file(load_file(path / "model.safetensors") | (state or {}), path / "model.safetensors")
    return path


def test_joined_projections_are_divided(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(Phi3Config(**BYTES, **NO_EOS), tmp_path))
    tensors, whole = checkpoint.tensors, load_file(tmp_path / "model.safetensors")[QKV]
    assert set(tensors.shapes()) >= set(expected_tensors(checkpoint.config))
    parts = [tensors.load(f"model.layers.1.self_attn.{name}_proj.weight") for name in "qkv"]
    assert [len(part) for part in parts] == [96, 32, 32]
    assert torch.equal(torch.cat(parts), whole)


def test_a_joined_projection_of_another_size(tmp_path: Path) -> None:
    path = edited(written(Phi3Config(**BYTES, **NO_EOS), tmp_path), {QKV: torch.zeros(96, 96)})
    with pytest.raises(ModelError, match=r"qkv_proj.weight is \[96, 96\], expected 160 rows"):
        open_checkpoint(path)


def test_scales_of_divided_weights_are_refused(tmp_path: Path) -> None:
    path = written(Phi3Config(**BYTES, **NO_EOS), tmp_path)
    scale = {QKV.replace(".weight", ".weight_scale"): torch.ones(160, 1)}
    with pytest.raises(ModelError, match=r"qkv_proj\.weight_scale belongs to a weight whose rows are divided"):
        open_checkpoint(edited(path, scale, quantization_config=compressed()))


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox"])
def test_older_files_have_masks_and_shorter_names(model_type: str, tmp_path: Path) -> None:
    """GPT-2 was published without the beginning of the names."""
    sizes = {"vocab_size": 288, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(model_type, **sizes, intermediate_size=64, **NO_EOS)
    expected = open_checkpoint(written(config, tmp_path / "new"))
    old = written(config, tmp_path / "old")
    state = {name.removeprefix("transformer."): tensor for name, tensor in load_file(old / "model.safetensors").items()}
    layer = "h.0.attn" if model_type == "gpt2" else "gpt_neox.layers.0.attention"
    masks = {f"{layer}.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool), f"{layer}.masked_bias": torch.tensor(-1e9)}
    save_file(state | masks, old / "model.safetensors")
    found = open_checkpoint(old)
    assert found.config == expected.config
    for name in expected_tensors(found.config):
        assert torch.equal(found.tensors.load(name), expected.tensors.load(name)), name


def test_two_tensors_for_one_weight(tmp_path: Path) -> None:
    """A tensor with Llama's name does not replace the one with the family's own."""
    config = AutoConfig.for_model("starcoder2", **BYTES)
    path = edited(written(config, tmp_path), {"model.layers.0.mlp.up_proj.bias": torch.zeros(config.intermediate_size)})
    with pytest.raises(ModelError, match=r"up_proj\.bias and .*c_fc\.bias are two tensors for the same weight"):
        open_checkpoint(path)


def test_an_unknown_tensor_keeps_its_name(tmp_path: Path) -> None:
    path = edited(written(Phi3Config(**BYTES, **NO_EOS), tmp_path), {"model.layers.0.mystery.weight": torch.zeros(3)})
    with pytest.raises(ModelError, match=r"1 tensors are unknown: model.layers.0.mystery.weight"):
        open_checkpoint(path)


@pytest.mark.parametrize("config", [Phi3Config(**BYTES, **NO_EOS), NemotronConfig(**BYTES)], ids=["phi3", "nemotron"])
def test_fp8_while_loading(config: PreTrainedConfig, tmp_path: Path) -> None:
    """Texts with speculation are those of plain decoding."""
    path, texts = written(config, tmp_path), []
    for method in ("none", "ngram"):
        run = resolve(
            Config(
                model=ModelSection(target=str(path), dtype="float32", quantization="fp8"),
                speculation=SpeculationSection(method=method),  # type: ignore[arg-type]
                engine=EngineSection(device="cpu", kv_cache_tokens=1024, max_batch_size=4),
            )
        )
        assert any("fp8" in note for note in run.notes)
        prompts = [[5, 6, 7] * 6, [3] * 9, [8, 9]]
        requests = [
            Request(i, prompt, SamplingParams(max_tokens=20), RngKey(0, i, 0)) for i, prompt in enumerate(prompts)
        ]
        texts.append([c.token_ids for c in run_requests(build_engine(run), requests)])
    assert texts[0] == texts[1]


def test_rows_of_heads_that_rotate_in_pairs() -> None:
    rows = torch.arange(12)  # two heads of six dimensions, of which four rotate
    assert half_by_half(rows, 2, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
