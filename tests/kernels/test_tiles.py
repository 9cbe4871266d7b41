"""Tiles of the kernels fit the shared memory of the GPU: 64 KiB (Turing), 99 (Ada, consumer Blackwell), 163 (A100); and
with 227 (Hopper) they are those that were measured."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specbatch.kernels.triton import attention
from specbatch.kernels.triton.parts.attention_splits import invariant_tile
from specbatch.kernels.triton.parts.attention_tile import Tile, prefix_tile_for, shared_of, tile_for
from specbatch.kernels.triton.parts.shared_memory import HOPPER_SHARED_BYTES, shared_bytes
from specbatch.kernels.triton.skinny import tile as skinny
from specbatch.kernels.triton.skinny.tile import (
    _MEASURED,
    GemmTile,
    _most_like,
    fitting,
    gemm_tile_for,
    invariant_tile_for,
    is_skinny,
    without_hopper,
)

KIB = 1024
LIMITS = [64 * KIB, 99 * KIB, 163 * KIB, 227 * KIB]
SIZES = [*_MEASURED, (576, 1536)]
ROWS = [1, 4, 16, 17, 32, 33, 64, 65, 4096]
EARLY = GemmTile("dot", 64, 128, 128, 4, 4, tma=True, fuse_norm=False, pdl=True, early=True)


def tiles_of(dtype: torch.dtype) -> list[GemmTile]:
    shapes = [(M, *size) for size in SIZES for M in range(1, 129) if is_skinny(M, *size, dtype)]
    assert len(shapes) > 64 * len(SIZES) * 0.9
    return [gemm_tile_for(*shape, dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("limit", LIMITS)
def test_products_fit(limit: int, dtype: torch.dtype) -> None:
    for tile in tiles_of(dtype):
        fitted = fitting(tile, limit)
        stage = 2 * fitted.block_i * (fitted.block_o + fitted.block_m)
        assert fitted.num_stages * stage <= limit, fitted
        assert fitted.num_stages >= 1
        assert (fitted.block_m, fitted.block_o, fitted.splits) == (tile.block_m, tile.block_o, tile.splits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_on_hopper_are_the_measured_ones(dtype: torch.dtype) -> None:
    # tests/repo/test_tune_linear.py checks the others, which are not gated.
    assert all(fitting(tile, HOPPER_SHARED_BYTES, gated=True) == tile for tile in tiles_of(dtype))
    assert HOPPER_SHARED_BYTES == 227 * KIB


def test_sizes_that_were_not_measured() -> None:
    """A size takes the tiles of one that is much like it, and else a guess."""
    measured, alike, other = (25600, 4096), (11008 * 2, 4096), (2048, 16384)
    for rows in (1, 4, 16, 33, 64):
        tile = gemm_tile_for(rows, *alike, torch.bfloat16)
        assert alike not in _MEASURED
        assert tile == gemm_tile_for(rows, *measured, torch.bfloat16)
        assert not gemm_tile_for(rows, *other, torch.bfloat16).pdl
        assert not gemm_tile_for(rows, *alike, torch.float16).pdl
    assert not is_skinny(100, *alike, torch.bfloat16)
    before = _most_like.cache_info().misses
    assert gemm_tile_for(5, *alike, torch.bfloat16) == gemm_tile_for(5, *measured, torch.bfloat16)
    assert _most_like.cache_info().misses == before, "each launch looks through the table"


@pytest.mark.parametrize(
    ("tile", "gated", "compiled"),
    [
        (EARLY, False, 245_792),
        (EARLY, True, 213_016),
        (replace(EARLY, early=False), False, 196_640),
        (replace(EARLY, early=False), True, 163_864),
        (GemmTile("dot", 16, 64, 256, 4, 4, pdl=True, early=True), False, 204_800),
        (GemmTile("dot", 16, 64, 256, 4, 4, pdl=True, early=True), True, 204_800),
        (GemmTile("dot", 128, 256, 64, 4, 8, tma=True, pdl=True), True, 196_608),
    ],
)
def test_shared_memory_is_what_the_compiler_took(tile: GemmTile, gated: bool, compiled: int) -> None:
    """`compiled`: the bytes of Triton 3.6 for Hopper, with at most 32 for the barriers of TMA."""
    assert 0 <= compiled - skinny.shared_of(tile, gated=gated) <= 32


def test_an_early_tile_has_fewer_stages_where_it_does_not_fit() -> None:
    assert fitting(EARLY, HOPPER_SHARED_BYTES, gated=True) == EARLY
    assert fitting(EARLY, HOPPER_SHARED_BYTES) == replace(EARLY, num_stages=3)


@pytest.mark.parametrize("limit", LIMITS)
def test_only_stages_of_products_change_from_99_kib_on(limit: int) -> None:
    for tile in tiles_of(torch.bfloat16):
        fitted = fitting(tile, limit)
        if limit >= 99 * KIB:
            assert replace(fitted, num_stages=tile.num_stages) == tile
    narrow = fitting(GemmTile("dot", 128, 256, 128, 4, 8), 64 * KIB)
    assert (narrow.block_i, narrow.num_stages) == (64, 1)


def test_ada_keeps_its_products() -> None:
    """What cards before Hopper ran: as many stages as 96,000 bytes hold."""
    for tile in tiles_of(torch.bfloat16):
        stage = 2 * tile.block_i * (tile.block_o + tile.block_m)
        stages = max(1, min(tile.num_stages, 96_000 // stage))
        expected = replace(tile, tma=False, pdl=False, prefetch=0, num_stages=stages)
        assert fitting(without_hopper(tile), 99 * KIB) == expected


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("limit", LIMITS)
def test_prefixes_fit_where_attention_does(limit: int, itemsize: int) -> None:
    for head_dim, rows in itertools.product((64, 128, 256, 512), ROWS):
        if shared_of(tile_for(rows, head_dim, itemsize, limit), head_dim, itemsize) <= limit:
            assert shared_of(prefix_tile_for(rows, head_dim, itemsize, limit), head_dim, itemsize) <= limit


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("limit", LIMITS)
def test_attention_fits(limit: int, head_dim: int, itemsize: int) -> None:
    if (limit, head_dim) == (64 * KIB, 256):
        pytest.skip("heads of 256 do not fit Turing")
    tiles = [tile_for(rows, head_dim, itemsize, limit) for rows in ROWS]
    for rows, tile in zip(ROWS, tiles, strict=True):
        assert shared_of(tile, head_dim, itemsize) <= limit
        assert tile.block_m == tile_for(rows, head_dim, itemsize).block_m  # the workspace is sized by it
        assert tile.block_n >= 16
    assert len({tile.block_n for tile in tiles}) == 1  # else a prompt's and a round's outputs would differ


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_on_hopper_is_as_measured(head_dim: int) -> None:
    stages = 2 if head_dim == 256 else 3
    expected = [(16, stages), (16, stages), (16, stages), (32, stages), (32, stages), (64, stages), (64, stages)]
    tiles = [tile_for(rows, head_dim, 2, 227 * KIB, num_programs=128) for rows in ROWS]
    assert tiles[:7] == [Tile(block_m, 64, 4, count) for block_m, count in expected]
    is_changed = [head_dim == 128 and tile.block_m == 32 for tile in tiles]
    for num_programs, change in ((129, {"block_m": 64}), (256, {"block_m": 64}), (257, {"num_warps": 2})):
        of_more = [tile_for(rows, head_dim, 2, 227 * KIB, num_programs=num_programs) for rows in ROWS]
        assert of_more == [
            replace(tile, **change) if changed else tile for tile, changed in zip(tiles, is_changed, strict=True)
        ]
    assert tiles[7:] == [Tile(64, 64, 4, 2, peeled=True)] * 2
    assert all(tile_for(rows, head_dim, 4, 227 * KIB) == Tile(16, 32, 4, 2) for rows in ROWS)


@pytest.mark.parametrize(
    ("limit", "head_dim", "rows", "expected"),
    [
        (99 * KIB, 128, 64, Tile(64, 64, 4, 3)),
        (99 * KIB, 256, 64, Tile(64, 32, 4, 2)),
        (99 * KIB, 256, 4096, Tile(64, 32, 4, 2, peeled=True)),
        (64 * KIB, 128, 16, Tile(16, 64, 4, 2)),
        (64 * KIB, 128, 64, Tile(64, 64, 4, 1)),
        (64 * KIB, 64, 64, Tile(64, 64, 4, 3)),
    ],
)
def test_attention_on_smaller_cards(limit: int, head_dim: int, rows: int, expected: Tile) -> None:
    assert tile_for(rows, head_dim, 2, limit, num_programs=8) == expected


def test_keys_in_fp8_have_tiles_of_their_own() -> None:
    for rows in ROWS:
        usual, of_fp8 = tile_for(rows, 128, 2, num_programs=8), tile_for(rows, 128, 2, is_fp8=True, num_programs=8)
        few = replace(usual, fp8="pairs", num_stages=6)
        assert of_fp8 == (few if usual.block_m < 64 else usual)
        assert all(tile_for(rows, 128, 2, is_fp8=True, num_programs=n) == of_fp8 for n in (129, 257))
    assert tile_for(4, 128, 4, is_fp8=True) == tile_for(4, 128, 4)
    assert tile_for(4, 128, 2, 99 * KIB, is_fp8=True).num_stages == 4


# (tile, head_dim, bytes) that Triton 3.9 asked for, with elements of 2 bytes, for Ada and consumer Blackwell...
ADA = [
    (Tile(64, 64, 4, 3), 128, 73_732),
    (Tile(64, 64, 4, 2), 128, 73_728),
    (Tile(64, 64, 4, 1), 128, 40_960),
    (Tile(32, 64, 4, 3), 128, 53_252),
    (Tile(16, 64, 4, 3), 128, 43_012),
    (Tile(64, 64, 4, 3), 64, 40_964),
    (Tile(64, 64, 4, 2), 256, 122_880),
    (Tile(64, 64, 4, 1), 256, 73_728),
    (Tile(64, 32, 4, 2), 256, 77_824),
    (Tile(64, 32, 4, 1), 256, 53_248),
    (Tile(16, 64, 4, 2), 256, 79_872),
]
# ... and for Turing.
TURING = [
    (Tile(64, 64, 4, 3), 128, 65_536),
    (Tile(64, 64, 4, 1), 128, 65_536),
    (Tile(16, 64, 4, 1), 128, 40_960),
    (Tile(64, 32, 4, 2), 128, 49_152),
    (Tile(64, 64, 4, 2), 256, 131_072),
]


@pytest.mark.parametrize(("tile", "head_dim", "compiled"), ADA + TURING)
def test_the_bound_covers_what_was_compiled(tile: Tile, head_dim: int, compiled: int) -> None:
    assert compiled <= shared_of(tile, head_dim, 2) <= 2 * compiled


def test_the_interpreter_counts_as_hopper() -> None:
    assert shared_bytes(torch.zeros(1)) == HOPPER_SHARED_BYTES


@pytest.mark.parametrize("limit", LIMITS)
def test_the_keys_of_an_invariant_tile_of_attention_do_not_depend_on_the_launch(limit: int) -> None:
    """They follow the head and the GPU, and begin where splits begin."""
    for head_dim in (64, 80, 128, 256):
        few, many = invariant_tile(32, head_dim, 2, limit), invariant_tile(33, head_dim, 2, limit)
        assert few.block_n == many.block_n
        assert max(shared_of(tile, head_dim, 2) for tile in (few, many)) <= limit
        assert 256 % few.block_n == 0
    many = replace(invariant_tile(33, 128, 2), fp8="widen")
    assert (few.block_m, many) == (16, Tile(64, 64, 4, 2))


def test_invariant_gemms_are_neither_split_nor_reordered() -> None:
    for num_out in (576, 4096, 28672):
        for num_tokens in range(1, 65):
            tile = invariant_tile_for(num_tokens, num_out)
            assert tile is not None
            assert (tile.kind, tile.splits, tile.early, tile.fuse_norm) == ("dot", 1, False, False)
            assert num_tokens <= tile.block_m
    outputs = {17: 64, 32: 64, 16: 32, 33: 32, 64: 32}
    assert {M: tile.block_o for M in outputs if (tile := invariant_tile_for(M, 4096))} == outputs
    assert invariant_tile_for(65, 4096) is None


def test_the_tile_follows_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chains of 4 nodes with the heads of half a Llama-3-70B: 8 query heads for each of 4 key/value heads."""
    found: list[Tile] = []
    monkeypatch.setattr(attention, "attend_by", lambda tile, *_: found.append(tile))
    q_THD, kv_2KSD = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((4, 32, 128), (2, 4, 64, 128)))
    for num_seqs in (32, 33, 64, 65):
        batch: Any = SimpleNamespace(max_queries=4, starts_B=torch.zeros(num_seqs))
        attention.attend(q_THD, kv_2KSD, batch, 1.0)
    assert [(tile.block_m, tile.num_warps) for tile in found] == [(32, 4), (64, 4), (64, 4), (32, 2)]
