"""gpt-oss checkpoints in MXFP4, made of unquantised ones, as the published files hold them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from specbatch.kernels.mxfp4 import MXFP4_GROUP
from specbatch.kernels.torch.parts.mxfp4 import quantise


def pack_experts(source: Path, target: Path) -> None:
    """Write a copy of a folder whose experts are stacked, with their weights in MXFP4."""
    shutil.copytree(source, target)
    state = load_file(source / "model.safetensors")
    for name in [name for name in state if name.endswith((".gate_up_proj", ".down_proj")) and ".experts." in name]:
        weight_XOI = state.pop(name).transpose(1, 2)
        values, scales = quantise(weight_XOI)
        state[f"{name}_blocks"] = values.unflatten(-1, (-1, MXFP4_GROUP // 2)).contiguous()
        state[f"{name}_scales"] = scales.contiguous()
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((target / "config.json").read_text())
    raw["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (target / "config.json").write_text(json.dumps(raw))
