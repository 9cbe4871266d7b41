"""The kernels of FP8 against the reference kernels: in Triton's interpreter without a GPU, for real with one.

The interpreter reads float8 correctly, but rounds some values wrongly to it. Here it rounds as torch does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from specbatch.kernels import torch as reference
from specbatch.kernels import triton as kernels
from specbatch.kernels.quantised import Quantised
from specbatch.kernels.triton.scaled import ops
from specbatch.kernels.triton.scaled.tile import ScaledTile, fitting, scaled_tile_for
from tests.kernels.batches import CUDA, DEVICE, FP8, random
from tests.marks import slow_on_cpu

pytestmark = [pytest.mark.gpu] if CUDA else []
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not CUDA, reason="needs CUDA")
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
SCHEMES = [(None, False), (None, True), (0.01, False)]
SIZES = [200, 4096, 14336] if CUDA else [200]


@pytest.fixture(autouse=True)
def rounding_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    if CUDA:
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (str(source), str(target)) != ("fp32", "fp8e4nv"):
            return convert(values, source, target, rounding)
        return torch.tensor(values).to(FP8).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def quantised(name: str, x: Tensor, scheme: tuple[float | None, bool]) -> tuple[Quantised, Quantised]:
    """By the kernel and by the reference."""
    norm = (random(x.shape[1], dtype=x.dtype, seed=9), 1e-5) if name == "rms_norm_quantised" else ()
    return getattr(kernels, name)(x, *norm, *scheme), getattr(reference, name)(x, *norm, *scheme)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["quantise", "rms_norm_quantised", "act_mul_quantised"])
def test_inputs_are_quantised(name: str, scheme: tuple[float | None, bool], size: int, dtype: torch.dtype) -> None:
    x = random(5, size * (2 if name == "act_mul_quantised" else 1), dtype=dtype)
    x[1], x[2] = 0.0, x[2] * 100
    found, expected = quantised(name, x, scheme)
    torch.testing.assert_close(found.scale_TG, expected.scale_TG, rtol=1e-5, atol=0.0)
    wrong = (found.values_TI.float() - expected.values_TI.float()).ne(0).float().mean()
    # Of norms and activations a last bit may differ, and with it a rounding.
    assert float(wrong) <= (0.0 if name == "quantise" else 0.002)


def test_what_is_not_a_number() -> None:
    x = random(4, 256, dtype=torch.bfloat16)
    x[0, 3], x[1, 5], x[2] = torch.nan, torch.inf, 0.0
    weight, scale = random(32, 256, dtype=torch.float32).to(FP8), torch.ones(32, 1, device=DEVICE)
    for scheme in SCHEMES:
        found, expected = quantised("quantise", x, scheme)
        assert torch.equal(found.values_TI.float().isnan(), expected.values_TI.float().isnan())
    y = kernels.scaled_linear(kernels.quantise(x), weight, scale, torch.bfloat16)
    assert y[:2].isnan().all()
    assert y[2].eq(0).all()
    assert y[3].isfinite().all()


def layer(num_tokens: int, num_out: int, num_in: int, grouped: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `scaled_linear`."""
    groups = -(-num_in // 128) if grouped else 1
    return {
        "x": reference.quantise(random(num_tokens, num_in, dtype=torch.float32, seed=1), None, grouped),
        # Clamped: torch before 2.13 rounds to NaN what E4M3 cannot hold.
        "weight_OI": (random(num_out, num_in, dtype=torch.float32, seed=2) * 100).clamp(-448, 448).to(FP8),
        "scale_OG": random(num_out, groups, dtype=torch.float32, seed=3).abs() * 0.01,
        "dtype": dtype,
        "bias_O": random(num_out, dtype=dtype, seed=4),
        "residual_TO": random(num_tokens, num_out, dtype=dtype, seed=5),
    }


def close(found: Tensor, expected: Tensor, limit: float) -> None:
    assert found.dtype == expected.dtype
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    assert error < limit, error


SMALL = ScaledTile(8, 16, 32, 2, 1, imprecise=32)
TILES = {
    "8x16": SMALL,
    "16x32-split": replace(SMALL, block_m=16, block_o=32, block_i=64, splits=3),
    "imprecise": replace(SMALL, imprecise=0),
    "tma": replace(SMALL, tma=True),
    "prefetch": replace(SMALL, prefetch=64),
    "many-tiles": replace(SMALL, block_o=16, block_m=8, splits=2),
}


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("tokens", "out", "width"), [(3, 24, 48), slow_on_cpu(9, 40, 208), slow_on_cpu(140, 40, 64)])
def test_gemms_match_the_reference(name: str, tokens: int, out: int, width: int) -> None:
    dtype = torch.bfloat16 if CUDA else torch.float32
    for left_out in ({}, {"bias_O": None}, {"residual_TO": None})[: 3 if tokens == 3 else 1]:
        arguments = layer(tokens, out, width, False, dtype) | left_out
        expected = reference.scaled_linear(**arguments)
        close(ops.linear(*arguments.values(), TILES[name]), expected, 1e-2 if CUDA else 1e-6)


@pytest.mark.parametrize(("tokens", "out", "width"), [(3, 24, 200), slow_on_cpu(100, 72, 256)])
def test_scales_of_groups(tokens: int, out: int, width: int) -> None:
    dtype = torch.bfloat16 if CUDA else torch.float32
    arguments = layer(tokens, out, width, True, dtype)
    close(kernels.scaled_linear(**arguments), reference.scaled_linear(**arguments), 1e-2 if CUDA else 1e-6)


def test_no_tokens() -> None:
    arguments = layer(0, 24, 48, False, torch.float32)
    assert kernels.scaled_linear(**arguments).shape == (0, 24)
    assert kernels.quantise(torch.zeros(0, 8, device=DEVICE)).values_TI.shape == (0, 8)


def test_tiles() -> None:
    for tokens in (1, 16, 17, 64, 65, 5000):
        tile = scaled_tile_for(tokens, 4096, 4096, library_fits=True)
        assert tile is None or tile.block_m >= min(tokens, 64)
        assert scaled_tile_for(tokens, 4096, 4096, library_fits=False) is not None
        kept = scaled_tile_for(tokens, 4096, 4096, library_fits=True, invariant=True)
        assert kept is not None
        # Hopper's own instruction, and one order of sums, whatever the number of tokens.
        assert (kept.splits, kept.block_i, kept.imprecise) == (1, 128, 128)
        assert kept.num_warps >= 4
        assert (min(kept.block_o, 64), min(kept.block_m, 16)) == (64, 16)
    assert scaled_tile_for(5000, 4096, 4096, library_fits=True) is None
    measured = [scaled_tile_for(tokens, 28672, 4096, library_fits=True) for tokens in (1, 2, 16, 64, 65)]
    assert [tile and tile.block_m for tile in measured] == [8, 16, 16, 64, None]
    large = ScaledTile(128, 128, 128, num_stages=6, num_warps=8)
    assert fitting(large, 232_448).num_stages == 6
    assert fitting(large, 101_376).num_stages == 2


@gpu
@needs_cuda
@pytest.mark.parametrize(("out", "width"), [(6144, 4096), (2048, 1536)])
@pytest.mark.parametrize("tokens", [1, 16, 64, 65, 300, 2048])
def test_measured_and_guessed_tiles_and_the_library(tokens: int, out: int, width: int) -> None:
    arguments = layer(tokens, out, width, False, torch.bfloat16)
    residual = arguments["residual_TO"]
    expected = reference.scaled_linear(**arguments)
    close(kernels.scaled_linear(**arguments | {"residual_TO": residual.clone()}), expected, 1e-2)
    for fast in (True, False):
        found = ops.library_linear(*(arguments | {"residual_TO": residual.clone()}).values(), fast)
        close(found, expected, 1e-2)
    if tokens in (16, 300) and width == 1536:
        arguments |= {"bias_O": None, "residual_TO": None, "dtype": torch.float16}
        close(kernels.scaled_linear(**arguments), reference.scaled_linear(**arguments), 1e-2)


@gpu
@needs_cuda
@pytest.mark.parametrize(
    ("out", "width", "grouped"), [(6144, 4096, False), (4096, 14336, False), (264, 208, False), (1536, 8960, True)]
)
def test_rows_have_the_same_bits_whatever_their_number(out: int, width: int, grouped: bool) -> None:
    arguments = layer(600, out, width, grouped, torch.bfloat16) | {"invariant": True, "residual_TO": None}
    x = random(600, width, dtype=torch.bfloat16, seed=1)
    whole = kernels.scaled_linear(**arguments | {"x": kernels.quantise(x, None, grouped)})
    for count in (1, 2, 8, 9, 16, 17, 33, 64, 65, 128, 129, 500):
        for part in (slice(count), slice(600 - count, 600)):
            found = kernels.scaled_linear(**arguments | {"x": kernels.quantise(x[part], None, grouped)})
            assert torch.equal(found, whole[part]), count


@gpu
@needs_cuda
@pytest.mark.parametrize("tokens", [4, 512])
def test_a_graph_replays_with_new_inputs(tokens: int) -> None:
    arguments = layer(tokens, 4096, 4096, False, torch.bfloat16) | {"residual_TO": None}
    static = random(tokens, 4096, dtype=torch.bfloat16)
    weight = random(4096, dtype=torch.bfloat16, seed=6)

    def work() -> Tensor:
        x = kernels.rms_norm_quantised(static, weight, 1e-5)
        gate_up = kernels.scaled_linear(**arguments | {"x": x})
        return torch.cat([part.float() for part in kernels.act_mul_quantised(gate_up)], dim=1)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    static.copy_(random(tokens, 4096, dtype=torch.bfloat16, seed=7))
    graph.replay()
    assert torch.equal(out, work())
