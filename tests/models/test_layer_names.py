"""Names of layers are brief, and leave none out."""

from __future__ import annotations

import pytest

from specbatch.models.config import expected_tensors
from specbatch.models.layer_names import chosen_layers
from specbatch.models.random_weights import random_config

SHAPES = expected_tensors(random_config("random:llama-3-8b"))
NAMES = [name.removesuffix(".weight") for name in SHAPES if name.endswith("_proj.weight") or name == "lm_head.weight"]


@pytest.mark.parametrize(
    ("left_out", "text"),
    [
        ([], "all"),
        (NAMES, "none"),
        (["lm_head"], "all but lm_head"),
        (["lm_head", "model.layers.0.mlp.down_proj"], "all but lm_head, model.layers.0.mlp.down_proj"),
        ([name for name in NAMES if "v_proj" in name], "all but model.layers.*.self_attn.v_proj"),
        (
            [name for name in NAMES if ".0." in name or ".31." in name or name.endswith("1.mlp.up_proj")],
            "all but model.layers.0+31, model.layers.1+11+21.mlp.up_proj",
        ),
        ([name for name in NAMES if ".1" in name], "all but model.layers.1+10-19"),
        ([name for name in NAMES if "o_proj" not in name], "only model.layers.*.self_attn.o_proj"),
        ([name for name in NAMES if name != "lm_head"], "only lm_head"),
        (
            [f"model.layers.{i}.mlp.up_proj" for i in range(0, 32, 2)],
            "all but model.layers." + "+".join(map(str, range(0, 32, 2))) + ".mlp.up_proj",
        ),
    ],
)
def test_names(left_out: list[str], text: str) -> None:
    assert chosen_layers([name for name in NAMES if name not in left_out], NAMES) == text
