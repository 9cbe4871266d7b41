"""Products for engine.deterministic: a row has the same bits whatever the number of rows, on CUDA."""

from __future__ import annotations

import pytest
import torch

from specbatch.errors import ModelError
from specbatch.kernels import ops_for
from specbatch.models.linears.invariant import InvariantGatedLinear, InvariantGemm, InvariantLinear

CUDA = torch.device("cuda")
# (output, input) features: SmolLM2, Qwen2.5 0.5B and 1.5B, Llama-3.2-1B, Llama-3-8B, Qwen3-8B; their LM heads last;
# routers of 128, 60 and 32 experts, and the gate of a shared expert
SHAPES = [
    *((960, 576), (3072, 576), (576, 1536), (49152, 576)),
    *((1152, 896), (896, 896), (9728, 896), (896, 4864)),
    *((2048, 1536), (17920, 1536), (1536, 8960)),
    *((3072, 2048), (16384, 2048), (2048, 8192)),
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (24576, 4096), (4096, 12288)),
    *((151936, 896), (151936, 1536), (128256, 2048), (128256, 4096), (151936, 4096)),
    *((128, 2048), (32, 2880)),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=pytest.mark.gpu_memory(6) if s[0] > 100_000 else ()) for s in SHAPES], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_have_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """For each number of rows, and at each place among them."""
    torch.manual_seed(0)
    gemm = InvariantGemm(CUDA, dtype)
    weight = (torch.randn(shape, device=CUDA) * shape[1] ** -0.5).to(dtype)
    x = torch.randn(1024, shape[1], device=CUDA).to(dtype)
    expected = gemm(x, weight)
    torch.testing.assert_close(expected.float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-2)
    for count in range(1, 1025):
        assert torch.equal(gemm(x[:count], weight), expected[:count]), count
        place = torch.randperm(1024, device=CUDA)[:count]
        assert torch.equal(gemm(x[place], weight), expected[place]), count
    gemm.check_later(weight, lambda x: gemm(x, weight))
    gemm.checks.run()


@pytest.mark.gpu
def test_the_library_splits_some_of_these() -> None:
    """Otherwise the test above proves nothing about the choice of algorithms."""
    torch.manual_seed(0)
    weight = (torch.randn(4096, 14336, device=CUDA) * 14336**-0.5).bfloat16()
    x = torch.randn(1024, 14336, device=CUDA).bfloat16()
    expected = InvariantGemm(CUDA, torch.bfloat16)(x, weight)
    split = [n for n in (96, 128, 192, 256) if not torch.equal(torch.nn.functional.linear(x[:n], weight), expected[:n])]
    assert split


@pytest.mark.gpu
def test_layers_round_each_step() -> None:
    torch.manual_seed(0)
    gemm, ops = InvariantGemm(CUDA, torch.bfloat16), ops_for(CUDA, torch.bfloat16)
    weight, other = (torch.randn(256, 128, device=CUDA).bfloat16() for _ in range(2))
    bias = torch.randn(256, device=CUDA).bfloat16()
    x, residual = torch.randn(90, 128, device=CUDA).bfloat16(), torch.randn(90, 256, device=CUDA).bfloat16()
    y = gemm(x, weight)
    layer = InvariantLinear(weight, bias, gemm)
    assert torch.equal(layer(x), y + bias)
    assert torch.equal(layer.with_residual(x, residual.clone()), residual + (y + bias))
    gated = InvariantGatedLinear(weight, other, None, gemm)
    assert torch.equal(gated(x), ops.act_mul(torch.cat((y, gemm(x, other)), dim=1)))
    assert gemm(x[:0], weight).shape == (0, 256)
    assert InvariantLinear(weight, None, gemm).with_residual(x[:0], residual[:0]).shape == (0, 256)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "inner"), [(576, 1536), (1536, 8960), (4096, 14336)])
def test_residuals_and_activations_of_few_rows_have_the_bits_of_many(width: int, inner: int) -> None:
    torch.manual_seed(0)
    gemm = InvariantGemm(CUDA, torch.bfloat16)
    gate, up = ((torch.randn(inner, width, device=CUDA) * width**-0.5).bfloat16() for _ in range(2))
    down = InvariantLinear((torch.randn(width, inner, device=CUDA) * inner**-0.5).bfloat16(), None, gemm)
    gated = InvariantGatedLinear(gate, up, None, gemm)
    x, residual = (torch.randn(90, width, device=CUDA).bfloat16() for _ in range(2))
    inside = gated(x * 3)
    expected = down.with_residual(inside, residual.clone())
    for count in (1, 7, 8, 9, 16, 17, 32, 33, 64, 65):
        assert torch.equal(gated(x[:count] * 3), inside[:count]), count
        assert torch.equal(down.with_residual(inside[:count], residual[:count].clone()), expected[:count]), count


@pytest.mark.gpu
def test_a_card_that_is_not_invariant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = InvariantGemm(CUDA, torch.bfloat16)
    monkeypatch.setattr(InvariantGemm, "__call__", lambda self, x, w: x @ w.T + len(x))
    with pytest.raises(ModelError, match=r"products of 1 and of 512 tokens differ for a weight of \(64, 32\)"):
        InvariantLinear(torch.randn(64, 32, device=CUDA).bfloat16(), None, gemm)
