"""The code of a supported model reads nothing back from the device, so its rounds can be CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from specbatch.models.fallback.source import prepared
from tests.models.fallback.variants import EQUAL, small_config

_ALWAYS = ("gemma2", "gpt_oss", "gpt2", "deepseek_v3")
NAMES = [pytest.param(name, marks=[] if name in _ALWAYS else [pytest.mark.wide]) for name in EQUAL]


class _Place:
    def called(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return q.new_empty((1, q.shape[2], q.shape[1], v.shape[-1]))


@pytest.mark.parametrize("name", NAMES)
def test_no_number_is_read_from_the_device(name: str) -> None:
    """Tensors on the device `meta` have no numbers: reading one raises."""
    model_type, changes = EQUAL[name]
    with torch.device("meta"):
        model = prepared(AutoModelForCausalLM.from_config(small_config(model_type, **changes), dtype=torch.bfloat16))
    for module in model.modules():
        module.place = _Place()
    tokens = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    logits = model(input_ids=tokens, position_ids=tokens, use_cache=False).logits
    assert logits.shape[:2] == (1, 2)
