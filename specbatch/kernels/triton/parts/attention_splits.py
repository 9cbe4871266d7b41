"""The splits of a sequence's keys in attention whose results must not depend on the batch. This module does not import
Triton.

The splits are the same for every row: 256 keys each up to 2,048 tokens, then a sixteenth to an eighth of the keys
before them. So a short context has several splits to compute at once, and 128k tokens have 56, whose results fit in a
small workspace.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from specbatch.kernels.triton.parts.attention_tile import Tile, padded, shared_of
from specbatch.kernels.triton.parts.shared_memory import HOPPER_SHARED_BYTES

MAX_SPLITS = 127  # enough for 61 million tokens; with the end there are 128 bounds, a power of two
_SMALLEST = 256  # the keys of the smallest split, a multiple of every tile's keys
_NUM_SMALLEST = 8

# Sequences of at most this number of rows have tiles of 16 rows. Two of these read keys twice: on an H200, 256
# sequences of 1,024 keys and 28 rows take 207 us (201 with a tile of 64 rows), and 8 sequences 18 (24).
_SMALL_ROWS = 32
WORKSPACE_ROWS = 65_536  # the rows of the results of splits
LONG_TOKENS = 8192  # the length above which a sequence of a large batch has several programs, too
_MAX_PROGRAMS = 512  # the most programs of all sequences that have several
_MAX_PARTS, _PARTS_OF_LONG = 32, 8


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The division of a launch into programs. It changes no bit.

    parts: the programs of a sequence (and head, and tile of rows), which share its splits.
    num_seqs: the sequences that have `parts` programs: all, or those that are listed as long. The others have one.
    max_splits: the splits of the longest possible sequence.
    """

    parts: int
    num_seqs: int
    max_splits: int


def split_begin(number: int) -> int:
    """Return the first key of a split. It is a multiple of 256, and a function of the split's number alone."""
    if number <= _NUM_SMALLEST:
        return number * _SMALLEST
    doublings, eighth = divmod(number - _NUM_SMALLEST, 8)
    return (_NUM_SMALLEST * _SMALLEST << doublings) // 8 * (8 + eighth)


def bounds() -> list[int]:
    """List the first key of each split, and an end that no sequence reaches."""
    return [*map(split_begin, range(MAX_SPLITS)), 2**31 - 1]


def splits_of(num_keys: int) -> int:
    """Return the number of splits of a sequence with `num_keys` keys."""
    return next(number for number in range(1, MAX_SPLITS + 1) if split_begin(number) >= num_keys)


def invariant_tile(num_rows: int, head_dim: int, itemsize: int, shared: int = HOPPER_SHARED_BYTES) -> Tile:
    """Choose the tile for `num_rows` rows of one sequence and key/value head, on a GPU with `shared` bytes of shared
    memory.

    The tile's rows and stages change no bit. Its keys do, but they do not depend on the number of rows. GPUs with other
    sizes of shared memory can have other bits.
    """
    rows, keys = (16, 32) if itemsize == 4 else (64, 64)
    warps = 8 if head_dim > 128 else 4
    smaller = itertools.product((rows, rows // 2, 16), (keys, keys // 2, 16), (2, 1))
    tiles = [Tile(block_m, block_n, warps, stages) for block_m, block_n, stages in smaller]
    largest = next((t for t in tiles if shared_of(t, head_dim, itemsize) + _ones_of(t, itemsize) <= shared), tiles[-1])
    return replace(largest, block_m=16) if num_rows <= _SMALL_ROWS else largest


def stored_rows(num_rows: int, tile: Tile) -> int:
    """Return the rows of a tile whose parts are stored, if a sequence has `num_rows` rows."""
    return min(tile.block_m, padded(num_rows))


def plan_splits(num_seqs: int, num_kv_heads: int, num_rows: int, max_keys: int, tile: Tile) -> SplitPlan:
    """Divide a launch into programs. `num_rows`: the most rows of a sequence and key/value head. `max_keys`: the most
    keys of a sequence.

    In a small batch each sequence has several programs. In a large one only the long sequences have, if the workspace
    is large enough.
    """
    max_splits, tiles = splits_of(max_keys), num_kv_heads * -(-num_rows // tile.block_m)

    def num_fitting(parts: int) -> int:
        """Return the number of sequences that can have `parts` programs."""
        in_workspace = WORKSPACE_ROWS // (tiles * max_splits * stored_rows(num_rows, tile))
        return min(in_workspace, _MAX_PROGRAMS // (tiles * parts))

    parts = _MAX_PARTS
    while parts > 1 and (parts // 2 >= max_splits or num_fitting(parts) < num_seqs):
        parts //= 2
    if parts == 1 and max_keys > LONG_TOKENS and num_fitting(_PARTS_OF_LONG):
        return SplitPlan(_PARTS_OF_LONG, num_fitting(_PARTS_OF_LONG), max_splits)
    return SplitPlan(parts, num_seqs, max_splits)


def num_ones(tile: Tile) -> int:
    """Return the number of columns of ones by which the weights are multiplied to add them: the least that a tensor
    core multiplies.

    A small tile has more columns than rows: with fewer, Triton 3.6 gives each warp the whole result of this GEMM and of
    the others in the kernel (255 registers and spills instead of 154 registers on sm_90).
    """
    return 16 if tile.block_m >= 64 else 2 * tile.block_m


def _ones_of(tile: Tile, itemsize: int) -> int:
    """Return the bytes of the ones."""
    return tile.block_n * num_ones(tile) * itemsize
