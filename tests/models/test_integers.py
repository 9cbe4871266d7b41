"""Checkpoints with weights in whole numbers: their configurations, their tensors, and their layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.models.linears.integer import IntegerLinear
from specbatch.models.weight_loader import WeightLoader
from tests.integer_checkpoints import FORMATS, integer_checkpoint
from tests.models.test_quantization import rows

CPU = torch.device("cpu")
SIZES = {"hidden_size": 160, "intermediate_size": 192, "num_attention_heads": 5, "num_key_value_heads": 5}
LAYER = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("section", FORMATS.values(), ids=FORMATS)
def test_weights_are_those_of_the_format(section: dict[str, Any], tmp_path: Path) -> None:
    meant = integer_checkpoint(tmp_path, section, **SIZES)
    found = open_checkpoint(tmp_path)
    assert found.quantization is not None
    loader = WeightLoader(found.tensors, torch.float32, CPU, quantization=found.quantization.dequantised())
    for name, weight in meant.items():
        assert torch.equal(loader.tensor(name), weight), name
    # The layers of a GPU, with the reference kernels.
    kept = WeightLoader(found.tensors, torch.float32, CPU, quantization=found.quantization)
    x = rows(5, 192)
    for layer in (LAYER, "model.layers.0.mlp.down_proj"):
        linear = kept.linear(layer)
        assert isinstance(linear, IntegerLinear)
        torch.testing.assert_close(linear(x), x @ meant[f"{layer}.weight"].T, rtol=1e-4, atol=1e-4)
