"""The scale of attention is a trait of the model, in every backend."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specbatch.attention.cpu import TorchAttention
from specbatch.attention.flashinfer import FlashInferAttention
from specbatch.attention.interface import AttentionBackend
from specbatch.attention.triton import PagedAttention
from specbatch.models.config import ModelConfig, expected_tensors
from specbatch.models.decoder import Decoder
from specbatch.models.weight_loader import WeightLoader
from tests import fake_flashinfer
from tests.oracle.spans import Span, batch_of
from tests.tiny_models import CPU, VOCAB, RandomTensors, tiny_config

F64 = torch.float64
SCALE = 0.9  # head_dim ** -0.5 is 0.35
BACKENDS: dict[str, Callable[[ModelConfig], AttentionBackend]] = {
    "torch": lambda c: TorchAttention(c.num_heads, c.num_kv_heads, c.head_dim, CPU, scale=c.attention_scale),
    "triton": lambda c: PagedAttention(c.num_heads, c.num_kv_heads, c.head_dim, F64, CPU, scale=c.attention_scale),
    "flashinfer": lambda c: FlashInferAttention(
        c.num_heads, c.num_kv_heads, c.head_dim, F64, CPU, scale=c.attention_scale
    ),
}


class LargerQueries(RandomTensors):
    """Queries that are as much larger as `SCALE` is: the same scores."""

    def load(self, name: str) -> Tensor:
        return super().load(name) * (SCALE * 8**0.5 if "q_proj" in name else 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the fake reads device memory from the host")
@pytest.mark.parametrize("name", BACKENDS)
def test_scores_are_scaled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    usual = tiny_config(2)
    tokens_T = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0))

    def logits(config: ModelConfig, tensors: type[RandomTensors] = RandomTensors) -> Tensor:
        weights = WeightLoader(tensors(expected_tensors(config), 0), F64, CPU)
        model = Decoder(config, weights, BACKENDS[name](config), 64)
        batch = batch_of([Span(range(10), 0, 40)], 4, CPU)
        hidden_TE, _ = model.forward(tokens_T, batch, model.new_cache(44, F64))
        return model.logits(hidden_TE)

    scaled = logits(replace(usual, attention_scale=SCALE))
    torch.testing.assert_close(scaled, logits(usual, LargerQueries))
    assert not torch.allclose(scaled, logits(usual), atol=1e-3)
