"""Runs with a mixture of experts: those that cannot compute it are refused, with advice that helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbatch.config_load import load_config
from specbatch.errors import ConfigError, ModelError
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.setup.resolve import resolve
from tests.tiny_checkpoint import write_checkpoint

EXPERTS = ["model.target=random:tiny-experts", "engine.device=cpu", "speculation.method=none"]
DRAFT = ["speculation.method=draft_model", "speculation.draft=random:tiny-experts"]
DENSE = ["model.target=random:tiny", "engine.device=cpu", *DRAFT]


@pytest.mark.parametrize(
    ("options", "name", "hint"),
    [
        ([*EXPERTS, "engine.tensor_parallel=2"], "model.target", "leave engine.tensor_parallel out"),
        ([*DENSE, "engine.tensor_parallel=2"], "speculation.draft", "leave engine.tensor_parallel out"),
        ([*EXPERTS, "model.quantization=fp8"], "model.target", "leave model.quantization out"),
    ],
)
def test_a_run_that_cannot_compute_experts(options: list[str], name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has experts") as caught:
        resolve(load_config(None, options))
    assert caught.value.hint == hint


def test_a_draft_with_experts_is_not_quantised_with_the_target() -> None:
    run = resolve(load_config(None, [*DENSE, "model.quantization=fp8"]))
    assert run.quantization is not None
    assert run.draft_quantization is None


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    path = write_checkpoint(
        tmp_path, model_type="qwen3_moe", num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, head_dim=8
    )
    file = path / "model.safetensors"
    state = load_file(file)
    for layer in range(json.loads((path / "config.json").read_text())["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([state.pop(f"{prefix}{expert}.{name}_proj.weight") for expert in range(2)])
            for name in ("gate", "up", "down")
        )
        state |= {f"{prefix}gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}down_proj": down}
    save_file(state, file)
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj") as caught:
        open_checkpoint(path)
    assert "one tensor an expert" in (caught.value.hint or "")
