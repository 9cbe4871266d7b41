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
from specbatch.kernels.torch.parts.mxfp4 import dequantise, quantise
from specbatch.kernels.triton.mixture import ops
from specbatch.kernels.triton.mixture.sorting import (
    MAX_SORTED_AT_ONCE,
    empty_blocks,
    sort_at_once,
    sort_in_slices,
    sorted_blocks,
)
from specbatch.kernels.triton.mixture.tile import ExpertTile, fitting, tiles_for
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
@pytest.mark.parametrize("kind", ["random", "two"])
@pytest.mark.parametrize(("num_tokens", "block_m"), [(1, 8), (7, 8), (21, 16), (40, 8)])
def test_parts_of_ranks_that_have_whole_experts(device: str, kind: str, num_tokens: int, block_m: int) -> None:
    """Each rank adds what its own experts return. One of them has no experts that tokens choose."""
    experts_TK = choices(kind, num_tokens, device)
    for dtype in DTYPES[device]:
        x_TE = normal(num_tokens, SIZE, seed=3, dtype=dtype, device=device)
        weights_TK = normal(num_tokens, K, seed=5, dtype=dtype, device=device).abs()
        gate_up, down = make_weights(dtype, device)[:2]
        for held in (range(2), range(2, 4), range(4, X)):
            own = slice(held.start, held.stop)
            part = ExpertWeights(gate_up[own].contiguous(), down[own].contiguous(), first=held.start, total=X)
            is_here_TK = (experts_TK >= held.start) & (experts_TK < held.stop)
            expected = reference.fused_experts(x_TE, weights_TK * is_here_TK, experts_TK, make_weights(dtype, device))
            assert_close(reference.fused_experts(x_TE, weights_TK, experts_TK, part), expected)
            assert_close(ops.fused_experts(x_TE, weights_TK, experts_TK, part, None, block_m, (TILE, TILE)), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_tokens", "block_m"), [(1, 8), (21, 16)])
def test_biases_and_another_activation(device: str, num_tokens: int, block_m: int) -> None:
    """gpt-oss has biases and a clamped SwiGLU. Features before the activation are large enough for its limits."""
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


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens(device: str) -> None:
    x_TE, weights_TK = torch.empty(0, SIZE, device=device), torch.empty(0, K, device=device)
    experts_TK = torch.empty(0, K, dtype=torch.int32, device=device)
    for of in (reference, ops):
        for residual in (None, x_TE):
            found = of.fused_experts(x_TE, weights_TK, experts_TK, make_weights(torch.float32, device), residual)
            assert found.shape == (0, SIZE)
        assert [t.shape for t in of.route(torch.empty(0, X, device=device), Routing(K, True))] == [(0, K), (0, K)]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_do_not_follow_each_other(device: str) -> None:
    """Rows of the tokens and of the residual have gaps between them."""
    wide = normal(7, 2 * SIZE, seed=3, dtype=torch.float32, device=device)
    given = normal(7, K, seed=5, dtype=torch.float32, device=device).abs(), choices("random", 7, device)
    weights = make_weights(torch.float32, device)
    expected = reference.fused_experts(wide[:, :SIZE], *given, weights, wide[:, SIZE:])
    assert_close(ops.fused_experts(wide[:, :SIZE], *given, weights, wide[:, SIZE:], 8, (TILE, TILE)), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_experts_with_eight_inner_features(device: str) -> None:
    """Fewer than tensor cores add at a time."""
    experts_TK = choices("random", 3, device)
    for dtype in DTYPES[device]:
        gate_up = normal(X, 16, SIZE, seed=1, dtype=dtype, device=device) / SIZE**0.5
        weights = ExpertWeights(gate_up, normal(X, SIZE, 8, seed=2, dtype=dtype, device=device) / 8**0.5)
        x_TE = normal(3, SIZE, seed=3, dtype=dtype, device=device)
        given = x_TE, normal(3, K, seed=5, dtype=dtype, device=device).abs(), experts_TK, weights
        assert_close(ops.fused_experts(*given), reference.fused_experts(*given))


def spread(kind: str, num_experts: int, num_choices: int, device: str) -> Tensor:
    """Return the experts of choices: random ones; the last for all; each third; or, for some choices, none."""
    chosen = torch.randint(num_experts, (num_choices, 1), generator=torch.Generator().manual_seed(num_choices))
    if kind == "one":
        chosen = torch.full_like(chosen, num_experts - 1)
    elif kind == "gaps":
        chosen = chosen // 3 * 3
    elif kind == "none":
        chosen = torch.where(chosen % 2 == 0, chosen, -1)
    return chosen.int().to(device)


# The first expert that is held, the number of those, and the number of all.
HELD = {"all": (0, 5, 5), "first": (0, 20, 40), "last": (20, 20, 40), "middle": (3, 33, 40), "one": (2, 1, 5)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("kind", ["random", "one", "gaps", "none"])
@pytest.mark.parametrize(("num_choices", "block_m", "max_slices"), [(3000, 16, 256), (4096, 128, 256), (9001, 64, 3)])
def test_choices_sorted_in_slices(
    device: str, kind: str, held: str, num_choices: int, block_m: int, max_slices: int
) -> None:
    """The blocks are those of one launch. Nothing is written to blocks that are not needed."""
    first, num_experts, total = HELD[held]
    experts_TK = spread(kind, total, num_choices, device)
    expected, found = (empty_blocks(experts_TK, num_experts, block_m) for _ in range(2))
    for tensor in (*expected, *found):
        tensor.fill_(-7)
    sort_at_once(experts_TK, *expected, first, num_experts, False)
    sort_in_slices(experts_TK, *found, first, num_experts, False, max_slices)
    assert_equal(found[0], expected[0])
    assert_equal(found[1], expected[1])
    is_here = (experts_TK >= first) & (experts_TK < first + num_experts)
    assert int(((found[1] >= 0) & (found[1] < num_choices)).sum()) == int(is_here.sum())


@pytest.mark.parametrize("device", DEVICES)
def test_many_choices_are_sorted_in_slices(device: str) -> None:
    """Beyond the limit of one launch."""
    experts_TK = spread("random", 3, MAX_SORTED_AT_ONCE + 1, device)
    expected, found = empty_blocks(experts_TK, 3, 128), sorted_blocks(experts_TK, 0, 3, 128, False)
    sort_at_once(experts_TK, *expected, 0, 3, False)
    needed = expected[0] >= 0
    assert_equal(found[0], expected[0])
    assert_equal(found[1][needed], expected[1][needed])


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_tokens", "block_m"), [(1, 8), (21, 16), slow_on_cpu(300, 64)])
@pytest.mark.parametrize(("block_o", "block_i"), [(32, 64), (64, 128)])
def test_weights_in_mxfp4(device: str, block_o: int, block_i: int, num_tokens: int, block_m: int) -> None:
    """They are dequantised in the tile: the bits are those of dequantised weights. The last step is cut off."""
    experts_TK, (size, inner) = choices("random", num_tokens, device), (160, 96)
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
        if device == "cpu":  # tensor cores add numbers that were unpacked in registers in another order
            assert torch.equal(found, ops.fused_experts(*given, whole, None, block_m, (tile, tile)))
        assert_close(found, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("num_tokens", "block_m"), [(1, 8), (21, 16), slow_on_cpu(300, 64)])
@pytest.mark.parametrize(("block_o", "block_i"), [(32, 64), (64, 128)])
def test_weights_in_fp8(device: str, block_o: int, block_i: int, num_tokens: int, block_m: int, grouped: bool) -> None:
    """Each number of the weights, too, but NaN. The last group of inputs is cut off. With a scale for each group, the
    tile changes no bit."""
    experts_TK, (size, inner) = choices("random", num_tokens, device), (224, 160)
    tile = ExpertTile(block_o, block_i, num_stages=2, num_warps=4)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num(0.0).to(device)

    def in_fp8(rows: int, cols: int, seed: int) -> tuple[Tensor, Tensor]:
        values = numbers[torch.randint(256, (X, rows, cols), generator=torch.Generator().manual_seed(seed)).to(device)]
        scales = normal(X, rows, 2 if grouped else 1, seed=seed, dtype=torch.float32, device=device).abs()
        return values.to(torch.float8_e4m3fn), scales / 150 / cols**0.5

    gate_up, down = in_fp8(2 * inner, size, 1), in_fp8(size, inner, 2)
    for dtype in DTYPES[device]:
        x_TE = normal(num_tokens, size, seed=3, dtype=dtype, device=device)
        weights_TK = normal(num_tokens, K, seed=5, dtype=dtype, device=device).abs()
        bias = normal(X, 2 * inner, seed=6, dtype=dtype, device=device)
        weights = ExpertWeights(gate_up[0], down[0], "silu", bias, None, gate_up[1], down[1])
        given = x_TE, weights_TK, experts_TK, weights
        expected = reference.fused_experts(*given)
        found = ops.fused_experts(*given, None, block_m, (tile, tile))
        assert_close(found, expected)
        if grouped and dtype != torch.float32:
            other = ExpertTile(block_o=128, block_i=32, num_stages=3, num_warps=4)
            assert torch.equal(ops.fused_experts(*given, None, block_m, (other, other)), found)


@pytest.mark.parametrize("shared", [64 << 10, 99 << 10, 227 << 10])
@pytest.mark.parametrize("block_m", [8, 16, 32, 64, 128])
def test_a_group_of_inputs_is_one_step_on_each_gpu(block_m: int, shared: int) -> None:
    """Otherwise a token's bits would depend on the number of tokens."""
    for tile in tiles_for(block_m, torch.float8_e4m3fn):
        found = fitting(tile, block_m, 2, shared, has_tma=False, block_i=128)
        assert found.block_i == 128
        assert 2 * 128 * (found.block_o + block_m) * found.num_stages <= shared


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grouped", [False, True])
def test_fp8_in_the_reference(device: str, grouped: bool) -> None:
    """By the definition, in float64: a number of a weight is that of E4M3 times the scale of its row or group."""
    weight = normal(2, 3, 300, seed=1, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    scales = normal(2, 3, 3 if grouped else 1, seed=2, dtype=torch.float32, device=device)
    x_TI = normal(4, 300, seed=3, dtype=torch.float64, device=device)
    experts_TK = torch.tensor([[1], [0], [1], [1]], dtype=torch.int32, device=device)
    spread = torch.cat([scales[..., i // 128 if grouped else 0, None] for i in range(300)], dim=-1)
    exact = (weight.double() * spread)[:, :2].contiguous()
    down = torch.eye(3, 1, dtype=torch.float64, device=device).expand(2, 3, 1).contiguous()
    ones = torch.ones(4, 1, dtype=torch.float64, device=device)
    given = ExpertWeights(weight[:, :2].contiguous(), down, "silu", None, None, scales[:, :2].contiguous())
    found = reference.fused_experts(x_TI, ones, experts_TK, given)
    expected = reference.fused_experts(x_TI, ones, experts_TK, ExpertWeights(exact, down))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shared", [65_536, 101_376, 166_912, 232_448])
def test_tiles_fit_into_shared_memory(shared: int, itemsize: int) -> None:
    """Two stages of them, unless a stage has the fewest columns."""
    for block_m in (8, 16, 32, 64, 128):
        dtypes = torch.bfloat16, torch.uint8, torch.float8_e4m3fn
        for tile in (tile for dtype in dtypes for tile in tiles_for(block_m, dtype)):
            found = fitting(tile, block_m, itemsize, shared, has_tma=False)
            stage = itemsize * found.block_i * (found.block_o + block_m)
            assert found.num_stages * stage <= shared - 8_192
            assert found.num_stages >= 2 or found.block_i == 32
            assert not found.tma


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
