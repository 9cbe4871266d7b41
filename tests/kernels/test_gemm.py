"""The GEMMs of few tokens in Triton against the reference kernels: in the interpreter on CPU, for real on CUDA."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
pytest.importorskip("triton")

from specbatch.kernels import torch as reference
from specbatch.kernels.torch.model import rms_norm
from specbatch.kernels.triton.skinny import ops
from specbatch.kernels.triton.skinny import tile as gemm_tile
from specbatch.kernels.triton.skinny.tile import GemmTile, gemm_tile_for, is_skinny, without_hopper
from tests.marks import slow_on_cpu

EPS = 1e-5
FMA = GemmTile("fma", block_m=1, block_o=8, block_i=64, num_stages=2, num_warps=1)
DOT = GemmTile("dot", block_m=8, block_o=16, block_i=32, num_stages=2, num_warps=1)
TILES = {
    "fma1": FMA,
    "fma2": GemmTile("fma", 2, 4, 128, 1, 1),
    "fma2-early": GemmTile("fma", 2, 8, 32, 3, 1, early=True),
    "fma2-norm-apart": GemmTile("fma", 2, 8, 32, 3, 1, fuse_norm=False),
    "dot8": DOT,
    "dot8-early": GemmTile("dot", 8, 16, 64, 3, 1, early=True),
    "dot16-split": GemmTile("dot", 16, 16, 16, 2, 1, splits=3),
    "dot16-split-early": GemmTile("dot", 16, 16, 16, 2, 1, splits=4, early=True),
    "dot64-split-norm-apart": GemmTile("dot", 64, 32, 32, 2, 1, splits=2, fuse_norm=False),
    "dot8-tma": GemmTile("dot", 8, 16, 32, 2, 1, tma=True),
    "dot8-tma-early": GemmTile("dot", 8, 16, 32, 2, 1, tma=True, early=True),
}
SHAPES = [(24, 40), (64, 64), (40, 136)]  # output, input features: multiples of 8, odd to most tiles

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted")),
    pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu]),
]
DTYPES = {"cpu": (torch.float32, torch.float16), "cuda": (torch.float32, torch.float16, torch.bfloat16)}
# The interpreter cuts bfloat16 off instead of rounding it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2 if torch.cuda.is_available() else 6e-2}


def normal(*shape: int, seed: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[actual.dtype], atol=TOLERANCE[actual.dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("shape", [SHAPES[0], *map(slow_on_cpu, SHAPES[1:])])
def test_gemms_match_the_reference(device: str, name: str, shape: tuple[int, int]) -> None:
    tile = TILES[name]
    O, I = shape  # noqa: E741
    # The interpreter multiplies tiles of bfloat16 as garbage; the "fma" kernel has no such tiles.
    with_bfloat16 = device == "cpu" and tile.kind == "fma" and shape == SHAPES[0]
    for dtype in DTYPES[device] + ((torch.bfloat16,) if with_bfloat16 else ()):
        partly = max(tile.block_m - 1, 1)
        # In a quick run on a CPU one of them, of half precision and of tall tiles.
        both = device == "cuda" or (dtype == torch.float32 and tile.block_m < 64) or shape != SHAPES[0]
        for M in {partly, tile.block_m if both else partly}:
            x = normal(M, I, seed=1, dtype=dtype, device=device)
            w = normal(O, I, seed=2, dtype=dtype, device=device) / I**0.5
            bias, residual = (
                normal(O, seed=3, dtype=dtype, device=device),
                normal(M, O, seed=4, dtype=dtype, device=device),
            )
            norm = 1 + 0.1 * normal(I, seed=5, dtype=dtype, device=device)
            gate_up = normal(2 * O, I, seed=6, dtype=dtype, device=device) / I**0.5
            assert_close(ops.linear(x, w, bias, residual, tile=tile), reference.linear(x, w, bias, residual))
            assert_close(
                ops.norm_gated_linear(x, norm, EPS, gate_up, tile=tile),
                reference.norm_gated_linear(x, norm, EPS, gate_up),
            )
            if not both:
                continue  # the calls above have each operand once
            assert_close(ops.linear(x, w, tile=tile), reference.linear(x, w))
            assert_close(
                ops.norm_linear(x, norm, EPS, w, bias, tile=tile), reference.norm_linear(x, norm, EPS, w, bias)
            )
            assert_close(ops.gated_linear(x, gate_up, tile=tile), reference.gated_linear(x, gate_up))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TILES)
def test_a_rows_bits_do_not_depend_on_the_others(device: str, name: str) -> None:
    tile = TILES[name]
    I = 136 if device == "cuda" else 72  # noqa: E741
    x = normal(tile.block_m, I, seed=1, dtype=torch.float16, device=device)
    w = normal(48, I, seed=2, dtype=torch.float16, device=device)
    norm = normal(I, seed=3, dtype=torch.float16, device=device)
    every = ops.norm_gated_linear(x, norm, EPS, w, tile=tile)
    for m in {tile.block_m // 2, tile.block_m - 1}:
        alone = ops.norm_gated_linear(x[m : m + 1], norm, EPS, w, tile=tile)
        assert torch.equal(alone[0], every[m])


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["fma2", "fma2-early", "dot8", "dot8-tma-early", "dot16-split", "dot16-split-early", "dot64-split-norm-apart"],
)
def test_programmatic_launch_in_a_graph_changes_nothing(name: str) -> None:
    tile = replace(TILES[name], block_o=16, num_warps=4)
    size, M = 1024, tile.block_m
    norm = normal(size, seed=1, dtype=torch.bfloat16, device="cuda")
    gate_up = normal(2 * size, size, seed=2, dtype=torch.bfloat16, device="cuda") / size**0.5
    down = normal(size, size, seed=3, dtype=torch.bfloat16, device="cuda") / size**0.5
    x0 = normal(M, size, seed=4, dtype=torch.bfloat16, device="cuda")

    def chain(tile: GemmTile) -> torch.Tensor:
        x = x0
        for _ in range(20):
            x = ops.linear(ops.norm_gated_linear(x, norm, EPS, gate_up, tile=tile), down, None, x, tile=tile)
        return x

    expected = chain(tile)
    for prefetch in (0, 256):
        early = replace(tile, pdl=True, prefetch=prefetch)
        assert torch.equal(chain(early), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = chain(early)
        for _ in range(10):
            actual.zero_()
            graph.replay()
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_wider_buffer(device: str) -> None:
    x = normal(3, 128, seed=1, dtype=torch.float32, device=device)[:, :64]
    w = normal(24, 64, seed=2, dtype=torch.float32, device=device)
    for tile in (TILES["dot16-split"], DOT):
        assert_close(ops.linear(x, w, tile=tile), reference.linear(x, w))
    assert_close(ops.rms_norm(x, w[0], EPS), rms_norm(x, w[0], EPS))


@pytest.mark.parametrize("M", range(1, 65))
def test_every_skinny_product_has_a_configuration(M: int) -> None:
    for O, I in [(6144, 4096), (4096, 14336), (28672, 4096), (128256, 4096), (576, 1536), (960, 576)]:  # noqa: E741
        assert is_skinny(M, O, I, torch.bfloat16)
        tile = gemm_tile_for(M, O, I, torch.bfloat16)
        assert tile.block_m >= M
        elsewhere = without_hopper(tile)
        assert (elsewhere.tma, elsewhere.pdl, elsewhere.prefetch) == (False, False, 0)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("M", [65, 100, 128])
def test_many_rows(M: int) -> None:
    """The GEMMs that stay ours up to 128 tokens, as the table has them."""
    assert is_skinny(M, 28672, 4096, torch.bfloat16)
    assert is_skinny(M, 4096, 12288, torch.bfloat16)
    x = normal(M, 4096, seed=1, dtype=torch.bfloat16, device="cuda")
    w = normal(28672, 4096, seed=2, dtype=torch.bfloat16, device="cuda") / 64
    norm = normal(4096, seed=3, dtype=torch.bfloat16, device="cuda")
    assert_close(ops.norm_gated_linear(x, norm, EPS, w), reference.norm_gated_linear(x, norm, EPS, w))
    x = normal(M, 12288, seed=4, dtype=torch.bfloat16, device="cuda")
    w = normal(4096, 12288, seed=5, dtype=torch.bfloat16, device="cuda") / 110
    assert_close(ops.linear(x, w), reference.linear(x, w))


def test_measured_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {(64, 128): {1: FMA, 2: FMA, 16: DOT, 64: None}}
    monkeypatch.setattr(gemm_tile, "_MEASURED", table)
    monkeypatch.setattr(gemm_tile, "_most_like", gemm_tile._most_like.__wrapped__)
    chosen = [gemm_tile_for(M, 64, 128, torch.bfloat16) for M in (1, 2, 3, 16)]
    assert chosen == [FMA, replace(FMA, block_m=2), DOT, DOT]
    assert is_skinny(16, 64, 128, torch.bfloat16)
    assert not is_skinny(17, 64, 128, torch.bfloat16)
    assert is_skinny(17, 64, 256, torch.bfloat16)


def test_what_is_not_skinny() -> None:
    assert not is_skinny(65, 4096, 4096, torch.bfloat16)
    assert is_skinny(128, 28672, 4096, torch.bfloat16)  # by measurement, and nowhere else
    assert not is_skinny(129, 28672, 4096, torch.bfloat16)
    assert not is_skinny(128, 28672, 4096, torch.float16)
    assert not is_skinny(128, 28672, 4096, torch.bfloat16, is_hopper=False)
    assert not is_skinny(4, 4096, 4096, torch.float32)
    assert not is_skinny(4, 4100, 4096, torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_default_configurations(device: str) -> None:
    for M in (1, 3, 8, 11, 33):
        x = normal(M, 128, seed=1, dtype=torch.float16, device=device)
        w = normal(64, 128, seed=2, dtype=torch.float16, device=device) / 10
        norm = normal(128, seed=3, dtype=torch.float16, device=device)
        assert_close(ops.norm_linear(x, norm, EPS, w), reference.norm_linear(x, norm, EPS, w))
        assert_close(ops.norm_gated_linear(x, norm, EPS, w), reference.norm_gated_linear(x, norm, EPS, w))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_o", [128, 256])
def test_tiles_read_by_tma_give_the_same_bits_in_each_run(block_o: int, dtype: torch.dtype) -> None:
    """Two groups of warps read a gated tile from shared memory, while the next one is copied."""
    x = normal(128, 4096, seed=1, dtype=dtype, device="cuda")
    w = normal(28672, 4096, seed=2, dtype=dtype, device="cuda") / 64
    tile = GemmTile("dot", 128, block_o, 64, 3, 8, fuse_norm=False)
    expected = ops.gated_linear(x, w, tile=tile)
    for _ in range(10):
        assert torch.equal(ops.gated_linear(x, w, tile=replace(tile, tma=True)), expected)
