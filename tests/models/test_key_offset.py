"""Keys of an FP8 cache without the bias that all of them have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.models import decoder_layer
from specbatch.models.decoder import Decoder
from specbatch.models.key_offset import key_offset
from specbatch.models.rope import RopeConfig
from tests.tiny_models import CPU, VOCAB, tiny_config, tiny_decoder

CONFIG = tiny_config(2, qkv_bias=True, rope=RopeConfig(theta=1e8))  # the last pairs of dimensions hardly turn
TOKENS = torch.arange(1, 31) % VOCAB


def biased(tensors: dict[str, Tensor]) -> None:
    """As Qwen2.5's: up to 300 in the dimensions of the last pair (3 and 7 of 8)."""
    for layer in range(2):
        bias_KD = tensors[f"model.layers.{layer}.self_attn.k_proj.bias"].view(2, 8)
        bias_KD[:, 3], bias_KD[:, 7] = 300.0, -250.0


def logits(decoder: Decoder, dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(len(TOKENS))
    batch = PagedBatch(
        numbers, numbers, torch.arange(8, dtype=torch.int32)[None], 4, torch.zeros(1, dtype=torch.int32),
        torch.tensor([0, len(TOKENS)], dtype=torch.int32), len(TOKENS),
        host_query_starts=torch.tensor([0, len(TOKENS)], dtype=torch.int32).numpy(),
    )  # fmt: skip
    hidden, _ = decoder.forward(TOKENS, batch, decoder.new_cache(33, dtype))
    return decoder.logits(hidden)


def test_it_is_the_bias_of_what_hardly_turns() -> None:
    bias_O = torch.arange(1.0, 17.0)
    frequencies, _ = CONFIG.rope.inverse_frequencies(8)
    slow = (frequencies * CONFIG.max_position_embeddings <= 1).tolist()
    assert slow[-1]
    assert not slow[0]
    expected = bias_O.view(2, 8) * torch.tensor([*slow, *slow])
    assert torch.equal(key_offset(bias_O.to(torch.bfloat16), CONFIG), expected)


def test_it_scales_with_the_tables() -> None:
    rope = RopeConfig(theta=1e8, scaling="yarn", factor=4.0, original_max_position=64)
    config = tiny_config(1, qkv_bias=True, rope=rope)
    factor = rope.inverse_frequencies(8)[1]
    assert factor > 1
    assert key_offset(torch.ones(16), config)[0, 7].item() == pytest.approx(factor)


def test_a_rounded_cache_keeps_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = logits(tiny_decoder(CONFIG, torch.float64, device=CPU, spoil=biased), torch.float64)

    def error() -> float:
        decoder = tiny_decoder(CONFIG, torch.float64, device=CPU, spoil=biased)
        return float((logits(decoder, torch.float8_e4m3fn) - exact).abs().mean())

    ours = error()
    monkeypatch.setattr(decoder_layer, "key_offset", lambda bias_O, config: torch.zeros(2, 8))
    plain = error()
    assert ours < plain / 3, (ours, plain)


def test_keys_next_to_a_sink_keep_their_bias() -> None:
    """The score of a sink would not change with those of the keys."""
    config = replace(CONFIG, attention_sinks=True)

    def with_bias(tensors: dict[str, Tensor]) -> None:
        for layer in range(2):
            bias_KD = tensors[f"model.layers.{layer}.self_attn.k_proj.bias"].view(2, 8)
            bias_KD[:, 3], bias_KD[:, 7] = 4.0, -4.0

    decoder = tiny_decoder(config, torch.float64, device=CPU, spoil=with_bias)
    exact = logits(decoder, torch.float64)
    error = (logits(decoder, torch.float8_e4m3fn) - exact).abs().mean()
    assert float(error) < 0.1 * float(exact.std()), (error, exact.std())
