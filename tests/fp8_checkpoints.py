"""Tiny checkpoints in FP8, in each format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specbatch.models.linears.fp8 import quantise_weight
from specbatch.models.linears.quantization import parse_quantization
from tests.tiny_checkpoint import RAW, random_state, write_checkpoint

WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}


def compressed(**changes: Any) -> dict[str, Any]:
    group = {**GROUP, **{key: value for key, value in changes.items() if key in GROUP or key == "output_activations"}}
    section = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    rest = {key: value for key, value in changes.items() if key not in group}
    return {**section, "config_groups": {"group_0": group}, **rest}


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}


FORMATS = {
    "channel, token": compressed(),
    "tensor, static": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    "blocks": BLOCKS,
    "weights alone": compressed(input_activations=None),
    "one layer is not": compressed(ignore=["lm_head", "model.layers.1.self_attn.k_proj"]),
}


def fp8_checkpoint(folder: Path, section: dict[str, Any], **changes: Any) -> Path:
    """Write a tiny model in FP8, in the format of `section`."""
    write_checkpoint(folder, **changes)
    raw = {**RAW, **changes, "quantization_config": section}
    found = parse_quantization(raw)
    assert found is not None
    state = {}
    for name, tensor in random_state({**RAW, **changes}).items():
        layer = name.removesuffix(".weight")
        if not (tensor.ndim == 2 and name.endswith(".weight") and found.covers(layer)):
            state[name] = tensor.to(torch.bfloat16)
            continue
        scale = tensor.abs().amax() / 448 if found.weights == "tensor" else quantise_weight(tensor).scale
        if found.weights == "block":
            scale = torch.rand(-(-tensor.shape[0] // 128), -(-tensor.shape[1] // 128)) * 0.01
            whole = scale.repeat_interleave(128, 0)[: tensor.shape[0]].repeat_interleave(128, 1)[:, : tensor.shape[1]]
            state[name] = (tensor / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        else:
            state[name] = (tensor / scale).to(torch.float8_e4m3fn)
        state[f"{layer}.{found.scale}"] = scale
        if found.inputs == "static":
            state[f"{layer}.input_scale"] = torch.tensor(0.02)
    state["model.layers.0.self_attn.k_scale"] = torch.tensor(0.5)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
