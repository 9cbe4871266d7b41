"""What one program of `attention.py` computes at a time. Pure functions of sizes, free of Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from specbatch.kernels.triton.parts.shared_memory import HOPPER_SHARED_BYTES

# Of 17 to 32 rows in bfloat16 (docs/bench/2026-11-26-h200-attention-32.json). Above _MIDDLE_PROGRAMS, half-empty tiles
# of 64 rows take 0.85 of the time (measured with 256 programs). Above _MANY_PROGRAMS, 2 warps take 0.78 to 0.95 of it.
_MIDDLE_PROGRAMS, _MANY_PROGRAMS = 128, 256

# Converted to the queries' dtype; to float16; to float16, and the values read as pairs.
Fp8Form = Literal["widen", "half", "pairs"]


@dataclass(frozen=True, slots=True)
class Tile:
    """block_m rows by block_n keys. `peeled`: keys that all rows see have a loop of their own, which pays in prompts
    (and always under a mask). `fp8`: how keys and values in FP8 are multiplied, see `parts/fp8.py`."""

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
    """For that many rows of one sequence and key/value head, on a GPU with `shared` bytes of shared memory. `is_fp8`:
    keys and values are in FP8, whatever the queries' `itemsize` is. `num_programs`: pairs of a sequence and a
    key/value head in the batch.

    Its rows do not depend on the GPU. Its keys do, but not on the number of rows: prompts and rounds read the same
    blocks of keys. Their tensor cores add them in different orders, so a last bit of a result may differ (of bfloat16,
    by 0.002 on an H200). Stages change no bit.
    """
    largest = replace(_wanted(1 << 30, head_dim, itemsize), num_stages=1)
    while shared_of(largest, head_dim, itemsize) > shared and largest.block_n > 16:
        largest = replace(largest, block_n=largest.block_n // 2)
    tile = replace(_wanted(num_rows, head_dim, itemsize), block_n=largest.block_n)
    if is_fp8 and itemsize == 2:
        tile = _of_fp8(tile)
    elif tile.block_m == 32 and head_dim == 128 and num_programs > _MIDDLE_PROGRAMS:
        tile = replace(tile, num_warps=2) if num_programs > _MANY_PROGRAMS else replace(tile, block_m=64)
    while shared_of(tile, head_dim, itemsize) > shared and tile.num_stages > 1:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    return tile


def prefix_tile_for(num_rows: int, head_dim: int, itemsize: int, shared: int = HOPPER_SHARED_BYTES) -> Tile:
    """For prefixes that several sequences share, of that many rows each. Other tiles were not measured
    (`scripts/bench/bench_cascade.py --tune`). Small tiles waste less where groups are small, large ones read the
    second-level cache less often."""
    tile = Tile(16, 32, 4, 2) if itemsize == 4 else Tile(128, 64, 8, 3) if num_rows > 8 else Tile(64, 64, 4, 3)
    while shared_of(tile, head_dim, itemsize) > shared and tile.num_stages > 1:
        tile = replace(tile, num_stages=tile.num_stages - 1)
    while shared_of(tile, head_dim, itemsize) > shared and tile.block_m > 16:
        tile = replace(tile, block_m=tile.block_m // 2, block_n=max(16, tile.block_n // 2))
    while shared_of(tile, head_dim, itemsize) > shared and tile.block_n > 16:
        tile = replace(tile, block_n=tile.block_n // 2)
    return tile


def _of_fp8(tile: Tile) -> Tile:
    """`tile` for keys and values in FP8.

    On an H200 with heads of 128, 64 to 512 sequences of 1,024 tokens and 8 of 16,384, pairs and six stages take 0.54 of
    bfloat16's time at the heads of Llama-3-8B, and 0.62 to 0.75 at Qwen2.5-1.5B's; three stages take 0.60 and 0.68 to
    0.89 (docs/bench/2026-11-23-h200-fp8-keys.json). Tiles of 64 rows and other heads were not measured.
    """
    if tile.block_m >= 64:
        return tile
    return replace(tile, fp8="pairs", num_stages=2 * tile.num_stages)


def shared_of(tile: Tile, head_dim: int, itemsize: int) -> int:
    """Bytes of shared memory that a program takes at most, on GPUs that have less of it than Hopper.

    What Triton asks for when it compiles for compute capability 7.5, 8.0, 8.9 and 12.0 is this or less.
    """
    keys, queries = tile.block_n * padded(head_dim) * itemsize, tile.block_m * padded(head_dim) * itemsize
    at_once = 2 * (keys + queries)
    if tile.num_stages == 1:
        return at_once
    weights = tile.block_m * tile.block_n * itemsize
    return max(at_once, max(3 * keys + queries, 2 * (tile.num_stages - 1) * keys) + weights + 1024)


def padded(head_dim: int) -> int:
    """The head dimension of a tile: a power of two, 16 at least."""
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
