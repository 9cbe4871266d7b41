"""The weights that passes read: all of a dense model, and of experts those that some token chooses."""

from __future__ import annotations

import itertools

import pytest
import torch

from specbatch.models.config import MoeConfig
from specbatch.models.pass_weights import PassWeights, distinct_experts, measured_curve, round_bytes
from specbatch.models.random_weights import geometries
from tests.tiny_models import tiny_config

MOE = MoeConfig(8, 2, 24, norm_topk_prob=True, layers=(True, False, True), shared_size=40)


def test_a_dense_model_is_read_whole() -> None:
    config = tiny_config(2)  # hidden size 32, 4 heads and 2 of keys and values of 8, 48 in the MLP
    layers = PassWeights.of_layers(config)
    assert layers.total == layers.active == layers.read(1) == 2 * (32 * 32 * 2 + 2 * 16 * 32 + 3 * 48 * 32)
    assert PassWeights.of_model(config).total == layers.total + config.vocab_size * 32


def test_experts_are_counted_by_the_tokens_that_choose_them() -> None:
    layers = PassWeights.of_layers(tiny_config(3, moe=MOE))
    expert = 3 * 24 * 32
    assert layers.experts == 2 * 8 * expert
    assert layers.active == layers.dense + 2 * 2 * expert
    assert layers.read(1) == pytest.approx(layers.active)
    assert layers.read(2) == pytest.approx(layers.dense + 2 * (2 + 2 * 6 / 8) * expert)
    assert layers.read(1000) == pytest.approx(layers.total)
    assert layers.read(7, lambda tokens: 3.0) == layers.dense + 2 * 3 * expert
    assert round_bytes(layers, 2, 1, 500.0) == pytest.approx(2 * layers.active + 500)
    packed = round_bytes(layers, 2, 1, 500.0, expert_itemsize=0.5)
    assert packed == pytest.approx(2 * layers.dense + 0.5 * 2 * 2 * expert + 500)


def test_total_and_active_weights_of_a_known_model() -> None:
    """Qwen3-30B-A3B: 30.5 and 3.3 billion are published. A pass reads no table of embeddings."""
    config = geometries()["qwen3-30b-a3b"]
    weights, read = PassWeights.of_all(config), PassWeights.of_model(config)
    assert (round(weights.total / 1e9, 2), round(weights.active / 1e9, 2)) == (30.53, 3.35)
    assert weights.total - read.total == weights.active - read.active == 151936 * 2048


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 16, 64])
def test_uniform_routing_is_what_random_tokens_do(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(400, num_tokens, 128, generator=generator).topk(8, dim=-1).indices
    mean = sum(len(draw.unique()) for draw in draws) / len(draws)
    assert distinct_experts(128, 8, num_tokens) == pytest.approx(mean, rel=0.01)


def test_a_curve_without_measurements_is_uniform() -> None:
    curve = measured_curve(MOE, {})
    for num_tokens in (1, 1.5, 3, 50):
        assert curve(num_tokens) == pytest.approx(distinct_experts(8, 2, num_tokens))


@pytest.mark.parametrize("top_k", [2, 8])
def test_a_measured_curve(top_k: int) -> None:
    """It goes through its points, never falls, and has no more than all experts, also where a point is noise."""
    moe = MoeConfig(8, top_k, 24, norm_topk_prob=True, layers=(True,))
    points = {4.0: max(3.1, top_k), 8.0: 5.0, 16.0: 4.9, 32.0: 7.9, 64.0: 8.0}
    curve = measured_curve(moe, points)
    if top_k == 2:
        assert [curve(n) for n in (1, 4, 8, 32)] == pytest.approx([2, 3.1, 5.0, 7.9])
        assert 3.1 < curve(5) < curve(6) < 5
    found = [curve(n) for n in (0, 0.5, 1, 2, 4, 7, 8, 12, 16, 31, 32, 50, 64, 100, 10**6)]
    assert all(low <= high + 1e-9 for low, high in itertools.pairwise(found))
    assert found[0] == 0
    assert found[-1] == pytest.approx(8, abs=1e-6)
    if top_k == 2:  # as long as its last two points rise, it goes on above them
        assert 5 < measured_curve(moe, {4.0: 4.0, 8.0: 5.0})(12) < measured_curve(moe, {4.0: 4.0, 8.0: 5.0})(40) < 8
