"""The division of a mixture's GEMMs into programs.

Tensor cores add the input features in order, whatever the tile, so a tile changes no bit of a token's result.

Shape letters: M tokens, X experts, K experts of a token, O output features, I input features.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertTile:
    """One way to cut the GEMM of each expert with its tokens into programs. Sizes are in elements.

    block_m: tokens of one program. block_o, block_i: rows and columns of the tile of weights that is read in one step;
        in the gated GEMM half the rows are gate, half are up.
    num_stages: tiles in flight of one program. num_warps: 32 threads each.
    tma: weights are read by the tensor memory accelerator.
    """

    block_o: int
    block_i: int
    num_stages: int
    num_warps: int
    tma: bool = False


def tokens_of_a_program(M: int, X: int, K: int) -> int:
    """Return the number of tokens of one program (block_m), from the mean number of tokens of an expert."""
    mean = M * K / X
    if M <= 16:
        return max(8, 1 << (M - 1).bit_length())
    return 16 if mean <= 8 else 32 if mean <= 24 else 64 if mean <= 96 else 128


def tile_for(block_m: int, O: int, I: int) -> ExpertTile:  # noqa: E741
    """Choose the tile of a GEMM."""
    if block_m <= 32:
        return ExpertTile(block_o=64, block_i=128, num_stages=4, num_warps=4)
    if block_m == 64:
        return ExpertTile(block_o=128, block_i=64, num_stages=4, num_warps=4)
    return ExpertTile(block_o=128, block_i=64, num_stages=4, num_warps=8)
