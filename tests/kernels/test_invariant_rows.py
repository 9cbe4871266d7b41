"""Every kernel that a deterministic run uses, besides GEMMs and attention: a row has the same bits whatever rows are
computed with it. For a GPU: most of these kernels have other numbers of warps or tiles for few rows and for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from specbatch.kernels import ops_for

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
COUNTS = range(1, 1025)
FEWER = (*range(1, 130), *range(130, 1024, 37), 1024)  # of operations that take long


def rows_agree(function: Callable[[Tensor], Tensor | tuple[Tensor, ...]], counts: Sequence[int] = COUNTS) -> None:
    """`function` of rows' indices gives each row the same bits, alone and at each place among others."""

    def bits(index: Tensor) -> list[Tensor]:
        found = function(index)
        parts = found if isinstance(found, tuple) else (found,)
        return [part.reshape(len(part), part[0].numel()).view(torch.uint8) for part in parts]

    everything = bits(torch.arange(counts[-1], device=CUDA))
    for number in counts:
        index = torch.randperm(counts[-1], device=CUDA)[:number]
        for found, expected in zip(bits(index), everything, strict=True):
            assert torch.equal(found, expected[index]), number


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [576, 896, 1536, 2048, 4096])
def test_norm_and_activation(size: int, dtype: torch.dtype) -> None:
    ops = ops_for(CUDA, dtype)
    x = torch.randn(1024, 2 * size, device=CUDA).to(dtype)
    weight = torch.randn(size, device=CUDA).to(dtype)
    rows_agree(lambda index: ops.rms_norm(x[index, :size], weight, 1e-6))
    rows_agree(lambda index: ops.act_mul(x[index]))


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (14, 2, 64), (12, 2, 128), (32, 8, 128), (4, 2, 80)]
)
def test_rotary_and_the_cache(heads: int, kv_heads: int, dim: int, has_norm: bool) -> None:
    """Eight heads in a program for up to 64 tokens, and sixteen for more."""
    dtype = torch.bfloat16
    ops = ops_for(CUDA, dtype)
    qkv = torch.randn(1024, (heads + 2 * kv_heads) * dim, device=CUDA).to(dtype)
    norms = [torch.randn(dim, device=CUDA).to(dtype) if has_norm else None for _ in range(2)]
    angles = torch.rand(1024, dim // 2, device=CUDA).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def run(index: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.zeros(2, kv_heads, 1024, dim, dtype=dtype, device=CUDA)
        q = ops.rotary_write(qkv[index], heads, kv_heads, cos, sin, index, index, cache, *norms, 1e-6)
        return q, cache[:, :, index].permute(2, 0, 1, 3)

    rows_agree(run)


# The allocator keeps a block for each number of rows: 25 GiB of 3 in use.
@pytest.mark.parametrize(
    "vocab", [pytest.param(v, marks=pytest.mark.gpu_memory(v / 5000)) for v in (32001, 49152, 151936)]
)
def test_what_is_read_off_logits(vocab: int) -> None:
    """Of an odd vocabulary rows begin at odd addresses."""
    ops = ops_for(CUDA, torch.bfloat16)
    logits = (3 * torch.randn(1024, vocab, device=CUDA)).bfloat16()
    temperature, top_p = torch.full((1024,), 0.8, device=CUDA), torch.full((1024,), 0.95, device=CUDA)
    min_p, top_k = torch.zeros(1024, device=CUDA), torch.full((1024,), 50, device=CUDA)
    u = torch.rand(1024, dtype=torch.float64, device=CUDA)
    tokens = torch.randint(vocab, (1024,), device=CUDA)
    rows_agree(lambda index: ops.argmax_and_margin(logits[index], -1), FEWER)
    rows_agree(lambda i: ops.sample(logits[i], temperature[i], top_k[i], top_p[i], min_p[i], u[i]), FEWER)
    rows_agree(lambda i: ops.draft_topk(logits[i], 4), FEWER)
    for num_top in (0, 1, 5, 20):
        rows_agree(lambda i, num_top=num_top: ops.logprobs(logits, i, tokens[i], num_top), FEWER)  # type: ignore[misc]

    def draw(index: Tensor) -> tuple[Tensor, Tensor]:
        settings = (x[index] for x in (temperature, top_k, top_p, min_p))
        p = ops.distribution(logits[index], *settings)
        return p, ops.draw(p, u[index])

    rows_agree(draw, FEWER)


@pytest.mark.parametrize(("inputs", "size", "inner", "width"), [(576, 256, 144, 8192), (2048, 512, 256, 32000)])
def test_steps_of_the_head_of_a_block_drafter(inputs: int, size: int, inner: int, width: int) -> None:
    """A program has 16 to 64 branches, by their number."""
    dtype = torch.bfloat16
    ops = ops_for(CUDA, dtype)
    shapes = (3 * size, inputs), (3 * size, size), (inner, size), (width, inner)
    matrices = [(torch.randn(shape, device=CUDA) / shape[1] ** 0.5).to(dtype) for shape in shapes]
    x, state, of_hidden, logits = (torch.randn(1024, n, device=CUDA).to(dtype) for n in (inputs, size, inner, width))
    rows_agree(lambda i: ops.gru_step(x[i], state[i], None, *matrices[:2]), FEWER)
    rows_agree(lambda i: ops.add_bottleneck(logits[i], of_hidden[i], state[i], *matrices[2:]), FEWER)
