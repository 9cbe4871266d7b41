"""The division of a mixture's GEMMs into programs.

Tensor cores add the input features in order, whatever the tile, so a tile changes no bit of a token's result.

Shape letters: M tokens, X experts, K experts of a token, O output features, I input features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

MAX_UNSORTED = 16  # tokens whose choices each program finds itself
_SHARED_SPARE = 8_192  # bytes of shared memory for all but the tiles


@dataclass(frozen=True)
class ExpertTile:
    """One way to cut the GEMM of each expert with its tokens into programs. Sizes are in elements.

    block_o, block_i: rows and columns of the tile of weights that is read in one step;
        in the gated GEMM half the rows are gate, half are up.
    num_stages: tiles in flight of one program. num_warps: 32 threads each.
    tma: weights are read by the tensor memory accelerator.
    """

    block_o: int
    block_i: int
    num_stages: int
    num_warps: int
    tma: bool = False


# By block_m: the tiles of gate and up, and of down. `scripts/bench/tune_experts.py` measured them for Qwen3-30B-A3B on
# one H200. There the GEMMs take the time of reading their weights up to 256 tokens.
_MEASURED = {
    8: (ExpertTile(64, 256, 4, 4, tma=True), ExpertTile(128, 128, 4, 4, tma=True)),
    16: (ExpertTile(64, 256, 3, 4, tma=True), ExpertTile(128, 128, 3, 4, tma=True)),
    32: (ExpertTile(128, 128, 3, 4, tma=True), ExpertTile(64, 128, 3, 4, tma=True)),
    64: (ExpertTile(128, 64, 3, 4, tma=True), ExpertTile(128, 64, 4, 4, tma=True)),
    128: (ExpertTile(256, 64, 4, 8), ExpertTile(128, 64, 3, 8, tma=True)),
}

# The same of weights in MXFP4, measured for gpt-oss-20b. Their GEMMs take three times as long as reading the weights
# does: the instructions that unpack them take most of the time.
_MXFP4 = {
    8: (ExpertTile(128, 128, 3, 8), ExpertTile(64, 128, 3, 4)),
    16: (ExpertTile(128, 64, 3, 4), ExpertTile(128, 64, 3, 4)),
    32: (ExpertTile(128, 64, 3, 4), ExpertTile(64, 64, 3, 4)),
    64: (ExpertTile(128, 64, 3, 4), ExpertTile(128, 64, 4, 4)),
    128: (ExpertTile(128, 64, 3, 4), ExpertTile(128, 64, 3, 4)),
}


# The same of weights in FP8, measured for Qwen3-30B-A3B with scales of outputs and of blocks. To make bfloat16 of them
# takes time: 64 tokens take 1.4 times as long as reading the weights, and 1,024 tokens as long as in bfloat16.
_FP8 = {
    8: (ExpertTile(128, 128, 6, 4), ExpertTile(128, 128, 6, 4)),
    16: (ExpertTile(64, 128, 3, 4), ExpertTile(64, 128, 3, 4)),
    32: (ExpertTile(128, 128, 3, 4, tma=True), ExpertTile(64, 128, 3, 4, tma=True)),
    64: (ExpertTile(128, 128, 3, 8), ExpertTile(128, 128, 3, 8)),
    128: (ExpertTile(128, 128, 3, 8), ExpertTile(128, 128, 3, 8)),
}


def tokens_of_a_program(M: int, X: int, K: int, dtype: torch.dtype) -> int:
    """Return the number of tokens of one program (block_m), from the mean number of tokens of an expert. `dtype`: that
    of the weights."""
    mean = M * K / X
    if M <= MAX_UNSORTED:
        return max(8, 1 << (M - 1).bit_length())
    largest_of_64 = 96 if dtype == torch.float8_e4m3fn else 48
    return 16 if mean <= 8 else 32 if mean <= 24 else 64 if mean <= largest_of_64 else 128


def tiles_for(block_m: int, dtype: torch.dtype) -> tuple[ExpertTile, ExpertTile]:
    """Choose the tiles of the GEMMs of gate and up, and of down. `dtype`: that of the weights."""
    return {torch.uint8: _MXFP4, torch.float8_e4m3fn: _FP8}.get(dtype, _MEASURED)[block_m]


@cache
def fitting(
    tile: ExpertTile, block_m: int, itemsize: int, shared: int, *, has_tma: bool, block_i: int | None = None
) -> ExpertTile:
    """Return the tile for weights of `itemsize` bytes and a GPU with `shared` bytes of shared memory. `block_i`: the
    columns that it must have; None: any number."""
    room = shared - _SHARED_SPARE
    tile = replace(tile, block_i=block_i or tile.block_i)
    while block_i is None and _stage_bytes(tile, block_m, itemsize) * 2 > room and tile.block_i > 32:
        tile = replace(tile, block_i=tile.block_i // 2)
    while _stage_bytes(tile, block_m, itemsize) > room and tile.block_o > 32:
        tile = replace(tile, block_o=tile.block_o // 2)
    stages = max(1, min(tile.num_stages, room // _stage_bytes(tile, block_m, itemsize)))
    return replace(tile, num_stages=stages, tma=tile.tma and has_tma)


def _stage_bytes(tile: ExpertTile, block_m: int, itemsize: int) -> int:
    return itemsize * tile.block_i * (tile.block_o + block_m)
