"""The tile that one program of `attention.py` computes at a time, as a function of sizes. This module does not import
Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specbatch.kernels.triton.parts.shared_memory import HOPPER_SHARED_BYTES

# Limits for 17 to 32 rows in bfloat16 (docs/bench/2026-11-26-h200-attention-32.json). Above _MIDDLE_PROGRAMS,
# half-empty tiles of 64 rows take 0.85 of the time (measured with 256 programs). Above _MANY_PROGRAMS, 2 warps take
# 0.78 to 0.95.
_MIDDLE_PROGRAMS, _MANY_PROGRAMS = 128, 256
_MAX_SMALL_GRID = 4  # one row with four key/value heads: 7.8 us with 8 warps, 8.9 with 4 (H200, 1,250 tokens)

# Keys and values are converted to the queries' dtype; to float16; or to float16, and values are read as pairs.
Fp8Form = Literal["widen", "half", "pairs"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of block_m rows and block_n keys. `peeled`: keys that all rows see have a separate loop, which is faster
    for prompts (and always with a mask). `fp8`: the way to multiply keys and values in FP8, see `parts/fp8.py`."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    peeled: bool = False
    fp8: Fp8Form = "widen"


def tile_for(
    num_rows: int,
    head_dim: int,
    itemsize: int,
    shared: int = HOPPER_SHARED_BYTES,
    *,
    is_fp8: bool = False,
    num_programs: int = 1,
) -> Tile:
    """Choose the tile for `num_rows` rows of one sequence and key/value head, on a GPU with `shared` bytes of shared
    memory. `is_fp8`: keys and values are in FP8, and `itemsize` is that of the queries. `num_programs`: the pairs of a
    sequence and a key/value head in the batch.

    The tile's rows do not depend on the GPU. Its keys do, but they do not depend on the number of rows: prompts and
    rounds read the same blocks of keys. Their tensor cores add them in different orders, so a last bit of a result can
    differ (by 0.002 in bfloat16 on an H200). Stages change no bit.
    """
    largest = replace(_wanted(1 << 30, head_dim, itemsize), num_stages=1)
    while shared_of(largest, head_dim, itemsize) > shared and largest.block_n > 16:
        largest = replace(largest, block_n=largest.block_n // 2)
    tile = replace(_wanted(num_rows, head_dim, itemsize), block_n=largest.block_n)
    if is_fp8 and itemsize == 2:
        tile = _of_fp8(tile)
    elif tile.block_m == 32 and head_dim == 128 and num_programs > _MIDDLE_PROGRAMS:
        tile = replace(tile, num_warps=2) if num_programs > _MANY_PROGRAMS else replace(tile, block_m=64)
    elif tile.block_m == 16 and head_dim == 128 and itemsize == 2 and num_programs <= _MAX_SMALL_GRID:
        tile = replace(tile, num_warps=8)
    while shared_of(tile, head_dim, itemsize) > shared and tile.num_stages > 1:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile


def prefix_tile_for(num_rows: int, head_dim: int, itemsize: int, shared: int = HOPPER_SHARED_BYTES) -> Tile:
    """Choose the tile for prefixes that several sequences with `num_rows` rows each share. Other tiles were not
    measured (`scripts/bench/bench_cascade.py --tune`). Small tiles waste less if groups are small, and large ones read
    the second-level cache less often."""
    tile = Tile(16, 32, 4, 2) if itemsize == 4 else Tile(128, 64, 8, 3) if num_rows > 8 else Tile(64, 64, 4, 3)
    while shared_of(tile, head_dim, itemsize) > shared and tile.num_stages > 1:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    while shared_of(tile, head_dim, itemsize) > shared and tile.block_m > 16:
        tile = replace(tile, block_m=tile.block_m // 2, block_n=max(16, tile.block_n // 2))
    while shared_of(tile, head_dim, itemsize) > shared and tile.block_n > 16:
        tile = replace(tile, block_n=tile.block_n // 2)
    return tile


def _of_fp8(tile: Tile) -> Tile:
    """Return `tile` for keys and values in FP8.

    On an H200 with heads of 128, 64 to 512 sequences of 1,024 tokens and 8 of 16,384, pairs and six stages take 0.54 of
    bfloat16's time at the heads of Llama-3-8B, and 0.62 to 0.75 at Qwen2.5-1.5B's; three stages take 0.60 and 0.68 to
    0.89 (docs/bench/2026-11-23-h200-fp8-keys.json). Tiles of 64 rows and other heads were not measured.
    """
    if tile.block_m >= 64:
        return tile
    return replace(tile, fp8="pairs", num_stages=2 * tile.num_stages)


def shared_of(tile: Tile, head_dim: int, itemsize: int) -> int:
    """Return the most bytes of shared memory that a program takes on GPUs that have less of it than Hopper.

    Triton takes this or less when it compiles for compute capability 7.5, 8.0, 8.9 and 12.0.
    """
    keys, queries = tile.block_n * padded(head_dim) * itemsize, tile.block_m * padded(head_dim) * itemsize
    at_once = 2 * (keys + queries)
    if tile.num_stages == 1:
        return at_once
    weights = tile.block_m * tile.block_n * itemsize
    return max(at_once, max(3 * keys + queries, 2 * (tile.num_stages - 1) * keys) + weights + 1024)


def padded(head_dim: int) -> int:
    """Return the head dimension of a tile: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _wanted(num_rows: int, head_dim: int, itemsize: int) -> Tile:
    if itemsize == 4:
        return Tile(16, 32, 4, 2)
    stages = 3 if head_dim <= 128 else 2
    if num_rows <= 16:
        return Tile(16, 64, 4, stages)
    if num_rows <= 64:
        return Tile(32 if num_rows <= 32 else 64, 64, 4, stages)
    return Tile(64, 64, 4, 2, peeled=True)
