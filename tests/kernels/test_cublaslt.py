"""GEMMs of cuBLASLt by chosen algorithms."""

from __future__ import annotations

import ctypes

import pytest
import torch

from specbatch.kernels.cublaslt import Algorithm, CublasLt


def test_an_algorithm_is_laid_out_as_the_library_writes_it() -> None:
    """cublasLtMatmulHeuristicResult_t: the algorithm (64 bytes), size_t, status, float and four reserved integers."""
    offsets = {name: getattr(Algorithm, name).offset for name in ("algo", "workspace_bytes", "state", "waves")}
    assert offsets == {"algo": 0, "workspace_bytes": 64, "state": 72, "waves": 76}
    assert ctypes.sizeof(Algorithm) == 96


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch brings the library along")
def test_a_missing_library_is_an_error() -> None:
    with pytest.raises(OSError, match="libcublasLt"):
        CublasLt(torch.device("cpu"), torch.bfloat16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [128, 200])
def test_every_algorithm_multiplies(num_tokens: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    library = CublasLt(device, dtype)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 256, generator=generator).to(device, dtype)
    weight = torch.randn(512, 256, generator=generator).to(device, dtype) / 16
    residual = torch.randn(num_tokens, 512, generator=generator).to(device, dtype)
    algorithms = library.algorithms(num_tokens, 512, 256)
    assert algorithms
    exact = x.double() @ weight.double().T
    for algorithm in algorithms:
        torch.testing.assert_close(library.multiply(algorithm, x, weight).double(), exact, rtol=2e-2, atol=2e-2)
        total = residual.clone()
        assert library.multiply(algorithm, x, weight, total) is total
        torch.testing.assert_close(total.double(), exact + residual.double(), rtol=2e-2, atol=2e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = library.multiply(algorithm, x, weight)
        y.zero_()
        graph.replay()
        assert torch.equal(y, library.multiply(algorithm, x, weight))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.gpu
def test_a_view_at_another_address_is_refused() -> None:
    library = CublasLt(torch.device("cuda"), torch.bfloat16)
    x, weight = (torch.zeros(17, 8, device="cuda", dtype=torch.bfloat16)[n:] for n in (1, 0))
    [algorithm, *_] = library.algorithms(16, 17, 8)
    with pytest.raises(AssertionError, match="not aligned"):
        library.multiply(algorithm, x, weight)
