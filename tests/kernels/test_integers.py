"""Weights in whole numbers: their packed form, and the kernels against the reference, on a CPU in Triton's
interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

pytest.importorskip("triton")

from specbatch.kernels.integers import IntegerWeight
from specbatch.kernels.torch.integers import (
    dequantise_integers,
    integer_gated_linear,
    integer_linear,
    pack_integers,
    unpack_integers,
)
from specbatch.kernels.triton.integers import ops
from specbatch.kernels.triton.integers.tile import (
    DirectTile,
    IntegerTile,
    Tile,
    fitting,
    guess,
    integer_tile_for,
    staged_guess,
)
from tests.kernels.batches import CUDA, DEVICE

pytestmark = [pytest.mark.gpu] if CUDA else []
TILE = IntegerTile(8, 16, 64, 2, 1)
DIRECT = DirectTile(8, 16, 2)
DTYPE = torch.bfloat16 if CUDA else torch.float16  # the interpreter neither rounds to bfloat16 nor multiplies it


def weight_of(
    num_out: int,
    num_in: int,
    bits: int,
    group: int | None,
    *,
    zeros: bool | Literal["float"],
    dtype: torch.dtype = torch.float16,
) -> IntegerWeight:
    """Return a random weight. `group` None: one scale for each output. `zeros` "float": they are no whole numbers."""
    generator = torch.Generator().manual_seed(num_out + num_in)
    numbers = torch.randint(0, 1 << bits, (num_out, num_in), generator=generator, dtype=torch.uint8)
    groups = 1 if group is None else -(-num_in // group)
    scales = (0.1 + torch.rand(groups, num_out, generator=generator)).to(dtype)
    zero = torch.randint(0, 1 << bits, (groups, num_out), generator=generator, dtype=torch.uint8)
    if zeros == "float":
        zero = zero + 0.25 * torch.rand(groups, num_out, generator=generator)
    return IntegerWeight(
        pack_integers(numbers, bits).to(DEVICE),
        scales.to(DEVICE),
        zero.to(DEVICE) if zeros else None,
        bits,
        num_in,
        group or num_in,
    )


def inputs(num_tokens: int, num_in: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    x = torch.randn(num_tokens, num_in, generator=torch.Generator().manual_seed(num_tokens))
    return x.to(DEVICE, dtype)


def check(x: torch.Tensor, weight: IntegerWeight, tile: Tile, *, extra: bool = False) -> None:
    """Compare with float64. `extra`: with a bias and a residual."""
    num_out = len(weight.words_OW)
    bias, residual = (
        (inputs(1, num_out, x.dtype)[0], inputs(len(x) + 1, num_out, x.dtype)[1:]) if extra else (None,) * 2
    )
    expected = x.double() @ dequantise_integers(weight, torch.float64).T
    if bias is not None and residual is not None:
        expected = expected + bias.double() + residual.double()
    found = ops.multiply(x, weight, bias, residual, tile)
    assert found.dtype == x.dtype
    error = (found.double() - expected).norm() / expected.norm()
    assert float(error) < (4e-3 if x.dtype == torch.bfloat16 else 1e-3), float(error)


@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_are_packed_and_unpacked(bits: int) -> None:
    numbers = torch.randint(0, 1 << bits, (5, 600), dtype=torch.uint8)
    weight = IntegerWeight(pack_integers(numbers, bits), torch.ones(1, 5), None, bits, 600, 600)
    assert weight.words_OW.shape == (5, 768 * bits // 16)
    assert torch.equal(unpack_integers(weight), numbers)
    assert torch.equal(dequantise_integers(weight, torch.float32), numbers.float() - (1 << (bits - 1)))


def test_our_kernel_with_all_groups() -> None:
    """Sizes that are no multiples of tiles; one scale an output; zero points; splits."""
    more, weights = replace(TILE, splits=2), replace(TILE, scale_sums=False)
    for bits, group, zeros, tiles in (
        (4, 128, False, (more, weights)), (4, 32, True, (TILE, weights)), (4, 64, True, (more,)),
        (4, None, False, (TILE, more)), (4, 256, True, (TILE,)), (8, 128, False, (TILE,)), (8, 32, True, (weights,)),
        (8, None, True, (more,)),
    ):  # fmt: skip
        weight = weight_of(24, 288, bits, group, zeros=zeros)
        for tile in tiles:
            check(inputs(3, 288), weight, tile, extra=zeros)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 64, 96, 128, 256, 384, None])
def test_the_direct_kernel_with_all_groups(group: int | None, bits: int) -> None:
    """Sizes that are no multiples of tiles, fewer units than warps, as many, and more; a bias and a residual."""
    for num_tokens, num_in, tile in (
        (7, 768, DIRECT),
        (1, 512, replace(DIRECT, ahead=False)),
        (3, 800, replace(DIRECT, block_o=32, num_warps=4)),
        (15, 1056, DirectTile(16, 16, 2, splits=2)),
    ):
        for zeros in (False, True):
            check(inputs(num_tokens, num_in), weight_of(40, num_in, bits, group, zeros=zeros), tile, extra=zeros)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, 32, 256])
def test_zero_points_that_are_no_whole_numbers(group: int, bits: int) -> None:
    """The direct kernel takes them. More tokens are multiplied with a dequantised weight."""
    weight = weight_of(40, 800, bits, group, zeros="float", dtype=torch.float32)
    for tile in (DIRECT, replace(DIRECT, splits=2), DirectTile(16, 32, 2)):
        check(inputs(7, 800), weight, tile, extra=True)
    for dtype in (torch.float32, DTYPE):
        found, expected = ops.dequantised(weight, dtype), dequantise_integers(weight, dtype)
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5)
    for tokens, name in ((3, "DirectTile"), (17, "NoneType")):
        tile = integer_tile_for(tokens, 40, 800, bits, group, has_whole_zeros=False)
        assert type(tile).__name__ == name
        y = inputs(tokens, 800).double() @ dequantise_integers(weight, torch.float64).T
        found = ops.integer_linear(inputs(tokens, 800), weight).double()
        assert float((found - y).norm() / y.norm()) < 5e-3


def test_the_direct_kernel_with_numbers_in_another_type() -> None:
    """Scales in bfloat16 or float32; inputs whose rows are further apart than their sizes."""
    x = inputs(5, 1024)[:, 256:768]
    for dtype in (torch.bfloat16, torch.float32):
        check(x, weight_of(32, 512, 4, 128, zeros=True, dtype=dtype), DIRECT)


@pytest.mark.skipif(not CUDA, reason="the interpreter multiplies all types alike")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zeros", [False, True])
def test_the_direct_kernel_with_sizes_of_models(dtype: torch.dtype, zeros: bool) -> None:
    for num_out, num_in in ((6144, 4096), (4096, 14336), (1000, 2880)):
        for group in (32, 64, 128, None):
            weight = weight_of(num_out, num_in, 4, group, zeros=zeros, dtype=dtype)
            for tokens in (1, 2, 8, 9, 16):
                tile = guess(tokens, num_out, 4)
                assert isinstance(tile, DirectTile)
                check(inputs(tokens, num_in, dtype), weight, tile, extra=True)


@pytest.mark.skipif(not CUDA, reason="the interpreter multiplies all types alike")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("bits", "group", "zeros"), [(4, 32, "float"), (8, 32, "float"), (8, 16, False), (8, 16, True)]
)
def test_the_direct_kernel_with_small_groups_of_models(
    bits: int, group: int, zeros: bool | Literal["float"], dtype: torch.dtype
) -> None:
    """Scales and zero points are in float32, as those of K types of GGUF."""
    for num_out, num_in in ((4096, 14336), (9216, 4096), (1000, 2880)):
        weight = weight_of(num_out, num_in, bits, group, zeros=zeros, dtype=torch.float32)
        for tokens in (1, 8, 9, 16):
            tile = integer_tile_for(tokens, num_out, num_in, bits, group, has_whole_zeros=weight.has_whole_zeros)
            assert isinstance(tile, DirectTile)
            check(inputs(tokens, num_in, dtype), weight, tile, extra=True)


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (4, 128), (4, 256), (4, None), (8, 128)])
def test_a_norm_before_the_gemm(bits: int, group: int | None) -> None:
    """One token, whose norm can be computed in our kernel; several; a norm in float32; a dequantised weight."""
    weight = weight_of(24, 416, bits, group, zeros=group == 128)
    weight = weight._replace(scales_GO=weight.scales_GO / 64)
    exact = dequantise_integers(weight, torch.float64).T
    factors = 0.5 + torch.rand(416, generator=torch.Generator().manual_seed(0)).to(DEVICE, DTYPE)
    for num_tokens, norm in ((1, factors), (1, factors.float()), (3, factors)):
        x = inputs(num_tokens, 416)
        wide = x.double()
        y = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-3) * norm.double() @ exact
        gate, up = y.chunk(2, dim=1)
        for tile in (DIRECT, replace(DIRECT, fuse_norm=False), TILE):
            found = ops.multiply(x, weight, None, None, tile, norm=(norm, 1e-3))
            assert float((found.double() - y).norm() / y.norm()) < 5e-3, tile
            found = ops.multiply(x, weight, None, None, tile, "silu", (norm, 1e-3))
            expected = torch.nn.functional.silu(gate) * up
            assert float((found.double() - expected).norm() / expected.norm()) < 1e-2, tile
        if norm.dtype == torch.float32:
            tiles = DIRECT, replace(DIRECT, fuse_norm=False)
            same = [ops.multiply(x, weight, None, None, tile, norm=(norm, 1e-3)) for tile in tiles]
            assert torch.equal(*same), "a factor in float32 multiplies before numbers are rounded"
        for implementation in (ops.integer_linear, integer_linear):
            found = implementation(x, weight, norm=(norm, 1e-3))
            assert float((found.double() - y).norm() / y.norm()) < 5e-3
        for gated in (ops.integer_gated_linear, integer_gated_linear):
            found = gated(x, weight, norm=(norm, 1e-3))
            assert float((found.double() - expected).norm() / expected.norm()) < 1e-2


def test_a_gated_pair() -> None:
    """Sizes that are no multiples of tiles; with splits; and with a dequantised weight."""
    x, weight = inputs(5, 288), weight_of(44, 288, 4, 128, zeros=True)
    gate, up = (x.double() @ dequantise_integers(weight, torch.float64).T / 64).chunk(2, dim=1)
    weight = weight._replace(scales_GO=weight.scales_GO / 64)
    expected = torch.nn.functional.silu(gate) * up
    tiles = (TILE, replace(TILE, splits=2), DIRECT, replace(DIRECT, block_o=32), replace(DIRECT, splits=2))
    found = [ops.multiply(x, weight, None, None, tile, "silu") for tile in tiles]
    for one in (*found, ops.integer_gated_linear(x, weight), integer_gated_linear(x, weight)):
        assert float((one.double() - expected).norm() / expected.norm()) < 1e-2


def test_our_kernel_with_more_tokens_than_a_tile() -> None:
    weight = weight_of(72, 256, 4, 128, zeros=True)
    check(inputs(21, 256), weight, replace(TILE, block_o=64, num_warps=4))
    assert ops.multiply(inputs(0, 256), weight, None, None, TILE).shape == (0, 72)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_weight_is_dequantised(bits: int) -> None:
    for group in (32, 128, None):
        weight = weight_of(21, 288, bits, group, zeros=group == 32)
        for dtype in (torch.float32, DTYPE):
            assert torch.equal(ops.dequantised(weight, dtype), dequantise_integers(weight, dtype))


def test_many_tokens_are_multiplied_with_a_dequantised_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of(16, 128, 4, 64, zeros=True), inputs(6, 128)
    monkeypatch.setattr(ops, "integer_tile_for", lambda *sizes, **kinds: None)
    bias, residual = inputs(1, 16)[0], inputs(7, 16)[1:]
    expected = integer_linear(x, weight, bias, residual)
    torch.testing.assert_close(ops.integer_linear(x, weight, bias, residual.clone()), expected, rtol=2e-2, atol=2e-2)


def test_tiles() -> None:
    assert integer_tile_for(129, 4096, 4096, 4, 128) is None, "the library multiplies many tokens"
    for tokens in (1, 8, 9, 33, 64, 65, 128):
        tile = staged_guess(tokens, 4096)
        assert tile is not None
        for bits, shared in ((4, 65536), (8, 101376), (4, 232448)):  # Turing, Ada, Hopper
            found = fitting(tile, bits, shared)
            assert found.step >= 16
            assert found.num_stages * 2 * found.step * (found.block_o + 16 // bits * found.block_m) <= shared
    tile, grouped = integer_tile_for(32, 4096, 4096, 4, 128), integer_tile_for(32, 4096, 4096, 4, 32)
    assert isinstance(tile, IntegerTile)
    assert grouped == replace(tile, step=32, num_stages=2 * tile.num_stages), "a step lies in one group"
    assert isinstance(guess(1, 4096, 4), DirectTile)
    assert isinstance(integer_tile_for(1, 4096, 4096, 4, 128), DirectTile)
    assert isinstance(integer_tile_for(1, 4096, 4096, 8, 128), IntegerTile), "as measured"
    assert isinstance(integer_tile_for(1, 4096, 4096, 8, 16), DirectTile)
    assert isinstance(integer_tile_for(1, 4096, 4096, 8, 32, has_whole_zeros=False), DirectTile)
    assert integer_tile_for(17, 4096, 4096, 8, 16) is None, "steps would be too short"
    assert isinstance(integer_tile_for(17, 32, 16, 8, 16), IntegerTile), "one group of all inputs"
