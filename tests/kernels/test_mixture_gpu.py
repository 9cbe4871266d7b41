"""Mixtures of experts of real sizes on a GPU, with the default tiles: results, and a token's bits among any others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specbatch.kernels import ops_for
from specbatch.kernels import torch as reference
from specbatch.kernels.experts import ExpertWeights, Routing
from specbatch.kernels.torch.parts.mxfp4 import quantise
from specbatch.kernels.triton.mixture import ops as triton_ops
from specbatch.kernels.triton.mixture.sorting import MAX_SORTED_AT_ONCE, empty_blocks, sort_at_once, sort_in_slices
from specbatch.kernels.triton.mixture.tile import ExpertTile, tokens_of_a_program
from specbatch.kernels.triton.parts.launch import dependent_launch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
TOKENS = (1, 2, 17, 64, 300, 1024, 4096)
# Each number of tokens of a program, with one token less and one more than where it changes.
INVARIANT_TOKENS = (*range(1, 34), 63, 64, 65, 127, 129, 256, 383, 385, 512, 767, 769, 1025, 2048)
QWEN3 = (128, 8, 2048, 768)  # experts, experts of a token, hidden size, inner features
GPT_OSS = (32, 4, 2880, 2880)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 3e-2}


def random_weights(sizes: tuple[int, int, int, int], dtype: torch.dtype, *, packed: bool = False) -> ExpertWeights:
    """Return Qwen3's experts, or those of gpt-oss with biases. `packed`: in MXFP4."""
    num_experts, _, hidden, inner = sizes
    torch.manual_seed(0)

    def weight(outputs: int, inputs: int) -> Tensor:
        return (torch.randn(num_experts, outputs, inputs, device=CUDA) * inputs**-0.5).to(dtype)

    gate_up, down = weight(2 * inner, hidden), weight(hidden, inner)
    if sizes == QWEN3:
        return ExpertWeights(gate_up, down)
    biases = [torch.randn(num_experts, size, device=CUDA).to(dtype) for size in (2 * inner, hidden)]
    weights = ExpertWeights(gate_up, down, "clamped_swiglu", *biases)
    if packed:  # one expert at a time: the numbers are wide while they are made
        (values, scales), (down_values, down_scales) = (
            (torch.stack(parts) for parts in zip(*map(quantise, whole), strict=True)) for whole in (gate_up, down)
        )
        return weights._replace(
            gate_up_XFE=values, gate_up_scales_XFG=scales, down_XEI=down_values, down_scales_XEG=down_scales
        )
    return weights


def choices(sizes: tuple[int, int, int, int], num_tokens: int, skew: float) -> tuple[Tensor, Tensor]:
    """Return weights and experts of tokens. An expert's probability falls with its number to the power of `skew`."""
    num_experts, top_k = sizes[:2]
    torch.manual_seed(num_tokens)
    popularity = -skew * torch.arange(1, num_experts + 1, device=CUDA).log()
    gumbel = -torch.empty(num_tokens, num_experts, device=CUDA).exponential_().log()
    found = (popularity + gumbel).topk(top_k)
    return torch.softmax(found.values, dim=-1), found.indices.int()


def expected_sum(x_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, weights: ExpertWeights, rest: Tensor) -> Tensor:
    """Return the reference's result without the rounding of float16 and bfloat16 between its steps."""
    wide = [t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for t in weights]
    return reference.fused_experts(x_TE.float(), weights_TK, experts_TK, ExpertWeights(*wide), rest.float())  # type: ignore[arg-type]


# In float32, the experts of gpt-oss are 3.2 GB.
@pytest.mark.gpu_memory(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [QWEN3, GPT_OSS], ids=["qwen3", "gpt-oss"])
def test_results_of_few_and_many_tokens(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Uniform choices, and those with which most tokens are one expert's."""
    weights, ops = random_weights(sizes, dtype), ops_for(CUDA, dtype)
    for num_tokens in TOKENS:
        x_TE, residual = torch.randn(2, num_tokens, sizes[2], device=CUDA).to(dtype).unbind()
        for skew in (0.0, 2.0):
            given = x_TE, *choices(sizes, num_tokens, skew)
            expected = expected_sum(*given, weights, residual)
            found = ops.fused_experts(*given, weights, residual).float()
            limit = TOLERANCE[dtype] * float(expected.abs().max())
            assert float((found - expected).abs().max()) < limit, (num_tokens, skew)


@pytest.mark.gpu_memory(8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_in_mxfp4(dtype: torch.dtype) -> None:
    weights, ops = random_weights(GPT_OSS, dtype, packed=True), ops_for(CUDA, dtype)
    for num_tokens in TOKENS:
        x_TE, residual = torch.randn(2, num_tokens, GPT_OSS[2], device=CUDA).to(dtype).unbind()
        given = x_TE, *choices(GPT_OSS, num_tokens, 1.0)
        expected = expected_sum(*given, weights, residual)
        found = ops.fused_experts(*given, weights, residual).float()
        limit = TOLERANCE[dtype] * float(expected.abs().max())
        assert float((found - expected).abs().max()) < limit, num_tokens


def mixture(sizes: tuple[int, int, int, int]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return a function of the indices of tokens, which routes them and sums their experts in bfloat16, and its result
    for all tokens. It has a residual."""
    weights, ops = random_weights(sizes, torch.bfloat16), ops_for(CUDA, torch.bfloat16)
    count = INVARIANT_TOKENS[-1]
    x_TE, residual = torch.randn(2, count, sizes[2], device=CUDA).bfloat16().unbind()
    popularity = -torch.arange(1, sizes[0] + 1, device=CUDA).log()
    logits_TX = (torch.randn(count, sizes[0], device=CUDA) + popularity).bfloat16()
    routing = Routing(sizes[1], norm_topk_prob=True)

    def of(index: Tensor) -> Tensor:
        found: Tensor = ops.fused_experts(x_TE[index], *ops.route(logits_TX[index], routing), weights, residual[index])
        return found

    return of, of(torch.arange(count, device=CUDA))


KINDS = {"qwen3": QWEN3, "gpt-oss": GPT_OSS}  # not MXFP4, whose tiles add in other orders


@pytest.mark.gpu_memory(8)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_among_any_number(kind: str) -> None:
    """All tiles, at each place among other tokens."""
    of, everything = mixture(KINDS[kind])
    for count in INVARIANT_TOKENS:
        index = torch.randperm(len(everything), device=CUDA)[:count]
        assert torch.equal(of(index), everything[index]), count


@pytest.mark.gpu_memory(8)
def test_a_thousand_repeats_of_a_token_give_one_output() -> None:
    """At another place among other tokens each time."""
    of, everything = mixture(QWEN3)
    generator = torch.Generator().manual_seed(0)
    same = torch.zeros((), dtype=torch.bool, device=CUDA).logical_not()
    for _ in range(1000):
        count = int(torch.randint(1, 200, (), generator=generator))
        index = torch.randint(len(everything), (count,), generator=generator)
        place = int(torch.randint(count, (), generator=generator))
        index[place] = 7
        same &= (of(index.to(CUDA))[place] == everything[7]).all()
    assert bool(same)


@pytest.mark.gpu_memory(8)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tiles_read_by_tma_give_the_same_bits_in_each_run(dtype: torch.dtype) -> None:
    """Two groups of warps read the tile of gate and up from shared memory, while the next one is copied."""
    weights, count = random_weights(QWEN3, dtype), 4096
    x_TE, residual = torch.randn(2, count, QWEN3[2], device=CUDA).to(dtype).unbind()
    given = x_TE, *choices(QWEN3, count, 0.0), weights, residual
    tile = ExpertTile(128, 64, 3, 8)
    expected = triton_ops.fused_experts(*given, 128, (tile, tile))
    for block_o in (128, 256):
        tile = ExpertTile(block_o, 64, 3, 8, tma=True)
        for _ in range(5):
            assert torch.equal(triton_ops.fused_experts(*given, 128, (tile, tile)), expected)


# The first expert that is held, the number of those, and the number of all.
HELD = {"all": (0, 128, 128), "first half": (0, 64, 128), "last half": (64, 64, 128), "512": (0, 512, 512)}


@pytest.mark.gpu_memory(2)
@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("num_tokens", [16_384, 16_384 - 5, 2_049, 100_001])
@pytest.mark.parametrize("skew", [0.0, 2.0])
def test_many_choices_sorted_in_slices(held: str, num_tokens: int, skew: float) -> None:
    """The blocks are those of one launch, in each run, while the next launch starts early."""
    (first, num_experts, total), top_k = HELD[held], 8
    assert num_tokens * top_k > MAX_SORTED_AT_ONCE
    _, experts_TK = choices((total, top_k, 0, 0), num_tokens, skew)
    pdl, block_m = dependent_launch(experts_TK), tokens_of_a_program(num_tokens, total, top_k, torch.bfloat16)
    expected = empty_blocks(experts_TK, num_experts, block_m)
    for tensor in expected:
        tensor.fill_(-7)
    sort_at_once(experts_TK, *expected, first, num_experts, pdl)
    for _ in range(10):
        found = empty_blocks(experts_TK, num_experts, block_m)
        for tensor in found:
            tensor.fill_(-7)
        sort_in_slices(experts_TK, *found, first, num_experts, pdl)
        assert all(map(torch.equal, found, expected))
