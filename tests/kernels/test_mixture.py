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
