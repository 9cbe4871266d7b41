"""Mixtures of experts: routing, blocks of choices and sums in Triton against the reference kernels."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
pytest.importorskip("triton")

from specbatch.kernels import torch as reference
from specbatch.kernels.experts import ExpertWeights, Routing
from specbatch.kernels.torch.mxfp4 import dequantise, quantise
from specbatch.kernels.triton.mixture import ops
from specbatch.kernels.triton.mixture.tile import ExpertTile
from tests.kernels.test_gemm import DEVICES, assert_close, normal
from tests.marks import slow_on_cpu

SIZE, INNER, X, K = 40, 24, 5, 2
TILE = ExpertTile(block_o=16, block_i=16, num_stages=2, num_warps=1)
DTYPES = {"cpu": (torch.float32, torch.float16), "cuda": (torch.float32, torch.float16, torch.bfloat16)}


def make_weights(dtype: torch.dtype, device: str) -> ExpertWeights:
    gate_up = normal(X, 2 * INNER, SIZE, seed=1, dtype=dtype, device=device) / SIZE**0.5
    return ExpertWeights(gate_up, normal(X, SIZE, INNER, seed=2, dtype=dtype, device=device) / INNER**0.5)


def choices(kind: str, num_tokens: int, device: str) -> Tensor:
    """Return the experts (T, K) of tokens: random ones; the same two for all; all but the last two experts."""
    if kind == "two":
        return torch.tensor([[3, 1]], dtype=torch.int32, device=device).repeat(num_tokens, 1)
    size = X - 2 if kind == "few" else X
    scores = torch.rand(num_tokens, size, generator=torch.Generator().manual_seed(num_tokens))
    return scores.topk(K).indices.int().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["random", "two", "few"])
@pytest.mark.parametrize(("num_tokens", "block_m"), [(1, 8), (7, 8), (16, 16), (21, 16), (40, 8), slow_on_cpu(97, 16)])
def test_sums_of_experts(device: str, kind: str, num_tokens: int, block_m: int) -> None:
    experts_TK = choices(kind, num_tokens, device)
    for dtype in DTYPES[device]:
        x_TE = normal(num_tokens, SIZE, seed=3, dtype=dtype, device=device)
        residual = normal(num_tokens, SIZE, seed=4, dtype=dtype, device=device)
        weights_TK = normal(num_tokens, K, seed=5, dtype=dtype, device=device).abs()
        weights = make_weights(dtype, device)
        for rest in (None, residual):
            own_TK = weights_TK.float() if rest is None else weights_TK  # weights of sigmoids stay wide
            expected = reference.fused_experts(x_TE, own_TK, experts_TK, weights, rest)
            actual = ops.fused_experts(x_TE, own_TK, experts_TK, weights, rest, block_m, (TILE, TILE))
            assert_close(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_tokens", "block_m"), [(1, 8), (21, 16)])
def test_biases_and_another_activation(device: str, num_tokens: int, block_m: int) -> None:
    """As gpt-oss has them. Features before the activation are large enough for its limits."""
    experts_TK = choices("random", num_tokens, device)
    for dtype in DTYPES[device]:
        x_TE = normal(num_tokens, SIZE, seed=3, dtype=dtype, device=device) * 4
        weights_TK = normal(num_tokens, K, seed=5, dtype=dtype, device=device).abs()
        biases = [normal(X, size, seed=6, dtype=dtype, device=device) for size in (2 * INNER, SIZE)]
        gate_up, down = make_weights(dtype, device)[:2]
        weights = ExpertWeights(gate_up, down, "clamped_swiglu", *biases)
        expected = reference.fused_experts(x_TE, weights_TK, experts_TK, weights)
        assert_close(ops.fused_experts(x_TE, weights_TK, experts_TK, weights, None, block_m, (TILE, TILE)), expected)
        without = reference.fused_experts(x_TE, weights_TK, experts_TK, weights._replace(down_bias_XE=None))
        assert float((without - expected).abs().max()) > 0.1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [40, 64])
def test_routing_beside_a_norm(device: str, size: int) -> None:
    for dtype in DTYPES[device]:
        logits, x_TE = (normal(2, n, seed=n, dtype=dtype, device=device) for n in (12, size))
        for weight_dtype in (dtype, torch.float32):
            weight = 1 + 0.1 * normal(size, seed=3, dtype=weight_dtype, device=device)
            given = logits, Routing(4, norm_topk_prob=True), None, x_TE, weight, 1e-5
            for actual, expected in zip(ops.route_and_norm(*given), reference.route_and_norm(*given), strict=True):
                assert_close(actual, expected) if actual.is_floating_point() else assert_equal(actual, expected)


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_tokens", "block_m"), [(1, 8), (21, 16), slow_on_cpu(300, 64)])
@pytest.mark.parametrize(("block_o", "block_i"), [(32, 64), (64, 128)])
def test_weights_in_mxfp4(device: str, block_o: int, block_i: int, num_tokens: int, block_m: int) -> None:
    """They are dequantised in the tile: the bits are those of dequantised weights. The last step is cut off."""
    experts_TK, (size, inner) = choices("random", num_tokens, device), (224, 160)
    tile = ExpertTile(block_o, block_i, num_stages=2, num_warps=4)
    for dtype in DTYPES[device]:
        x_TE = normal(num_tokens, size, seed=3, dtype=dtype, device=device)
        weights_TK = normal(num_tokens, K, seed=5, dtype=dtype, device=device).abs()
        gate_up = quantise(normal(X, 2 * inner, size, seed=1, dtype=torch.float32, device=device) / size**0.5)
        down = quantise(normal(X, size, inner, seed=2, dtype=torch.float32, device=device) / inner**0.5)
        bias = normal(X, 2 * inner, seed=6, dtype=dtype, device=device)
        packed = ExpertWeights(gate_up[0], down[0], "silu", bias, None, gate_up[1], down[1])
        whole = ExpertWeights(dequantise(*gate_up, dtype), dequantise(*down, dtype), "silu", bias)
        given = x_TE, weights_TK, experts_TK
        expected = reference.fused_experts(*given, whole)
        assert torch.equal(reference.fused_experts(*given, packed), expected)
        found = ops.fused_experts(*given, packed, None, block_m, (tile, tile))
        assert torch.equal(found, ops.fused_experts(*given, whole, None, block_m, (tile, tile)))
        assert_close(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", [True, False])
def test_routing(device: str, norm: bool) -> None:
    """Equal logits, too: the expert with the lower number comes first."""
    for dtype in DTYPES[device]:
        logits = normal(33, 12, seed=1, dtype=dtype, device=device)
        logits[5] = 0.5
        logits[6, 3:9] = logits[6].max() + 1
        expected = reference.route(logits, Routing(4, norm))
        actual = ops.route(logits, Routing(4, norm))
        assert torch.equal(actual[1], expected[1])
        assert_close(actual[0], expected[0])


ROUTINGS = {
    "sigmoid": Routing(4, True, "sigmoid", num_groups=4, topk_groups=2, scale=2.5),
    "sigmoid, no norm": Routing(3, False, "sigmoid"),
    "softmax of the chosen": Routing(4, False, "softmax_of_chosen"),
    "scaled softmax in groups": Routing(4, True, num_groups=3, topk_groups=2, scale=0.5),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_correction", [True, False])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_routing_with_other_traits(kind: str, has_correction: bool, device: str) -> None:
    """Equal logits, too, and groups with equal sums."""
    correction = normal(12, seed=2, dtype=torch.float32, device=device) if has_correction else None
    for dtype in DTYPES[device]:
        logits = normal(33, 12, seed=1, dtype=dtype, device=device)
        logits[5] = 0.5
        logits[6, 3:9] = logits[6].max() + 1
        expected = reference.route(logits, ROUTINGS[kind], correction)
        actual = ops.route(logits, ROUTINGS[kind], correction)
        assert torch.equal(actual[1], expected[1])
        assert_close(actual[0], expected[0])


@pytest.mark.parametrize("device", DEVICES)
def test_routing_of_what_is_not_finite(device: str) -> None:
    """Each token has different experts, whatever its logits are."""
    logits = torch.full((4, 12), torch.nan)
    logits[1, 3], logits[2, 5], logits[3] = 1.0, torch.inf, -torch.inf
    for routing in ROUTINGS.values():
        _, experts_TK = ops.route(logits.to(device), routing)
        assert all(len(set(row)) == routing.top_k and max(row) < 12 for row in experts_TK.tolist())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("routing", [Routing(2, True, "sigmoid", 3, 2, 1.5), Routing(2, False, "softmax_of_chosen")])
@pytest.mark.parametrize("has_correction", [False, True])
def test_an_expert_whose_logit_is_nan_is_not_left_out(device: str, routing: Routing, has_correction: bool) -> None:
    """Damaged weights of one expert show in the output."""
    logits = normal(4, 12, seed=1, dtype=torch.float32, device=device)
    logits[:, 7] = torch.nan
    correction = torch.zeros(12, device=device) if has_correction else None
    for kernels in (reference, ops):
        weights_TK, experts_TK = kernels.route(logits, routing, correction)
        assert experts_TK[:, 0].tolist() == [7] * 4
        assert not weights_TK.isfinite().all(dim=1).any()
