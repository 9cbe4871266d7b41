"""The division of GEMMs in FP8 (`ops.py`) into programs, and the choice of those that the library computes.

It depends on the shape alone, so that a model's shapes decide its bits. This module does not import Triton.

Shape letters: M tokens, O output features, I input features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbatch.kernels.quantised import GROUP

# Above this number of tokens a GEMM has enough arithmetic for the library's kernels.
MAX_TOKENS = 64
# True: the library adds in the tensor cores alone, as other engines do. On an H200 that takes 0.83 to 0.99 of the time
# from 256 tokens on. The error becomes 0.0021 (4,096 input features) or 0.0033 (14,336). Otherwise it is 0.0017, from
# the result's rounding to bfloat16. Rounding inputs and weights to FP8 makes an error of 0.037.
FAST_LIBRARY = True
_SHARED_SPARE = 5_376  # bytes of shared memory for all but the tiles


@dataclass(frozen=True)
class ScaledTile:
    """One way to cut y = x W^T into programs. Sizes are in elements unless they say otherwise.

    block_m, block_o: tokens and output features of one program. block_i: input features of one step.
    num_stages: tiles in flight of one program. num_warps: 32 threads each; with 4, block_o of at least 64 and block_m
        of at least 16, Hopper multiplies FP8 as it is. Otherwise it turns it into float16, and sums are more exact.
    splits: parts of the input features, summed afterwards in fixed order.
    imprecise: input features that the tensor cores add before float32 takes over; 0: all.
    tma: weights are read by the tensor memory accelerator.
    prefetch: features of every weight row that a program loads into L2 before it waits for x.
    """

    block_m: int
    block_o: int
    block_i: int
    num_stages: int
    num_warps: int
    splits: int = 1
    imprecise: int = 128
    tma: bool = False
    prefetch: int = 0

    def __post_init__(self) -> None:
        for size in (self.block_m, self.block_o, self.block_i, self.num_warps):
            assert size.bit_count() == 1, self  # a power of two
        assert self.imprecise <= self.block_i, self
        assert min(self.num_stages, self.splits) >= 1, self


# (O, I) of the weight: for up to M tokens, the best measured tile, or None if the library was faster. It was printed by
# `scripts/bench/bench_fp8.py`, on an H200 (docs/bench/2026-11-23-h200-fp8-gemms.json).
_MEASURED: dict[tuple[int, int], dict[int, ScaledTile | None]] = {
    (6144, 4096): {  # llama-3-8b, qkv
        4: ScaledTile(16, 64, 256, 4, 4, splits=2, tma=True),
        16: ScaledTile(16, 64, 256, 4, 4, splits=2),
        64: ScaledTile(64, 64, 128, 6, 4, splits=2),
        256: None,
    },
    (4096, 4096): {  # llama-3-8b, o
        4: ScaledTile(16, 64, 256, 4, 4, splits=4, tma=True),
        16: ScaledTile(16, 64, 256, 4, 4, splits=4),
        64: ScaledTile(64, 64, 128, 6, 4, splits=2),
        256: None,
    },
    (28672, 4096): {  # llama-3-8b, gate_up
        1: ScaledTile(8, 16, 256, 5, 1),
        4: ScaledTile(16, 64, 256, 4, 4, tma=True),
        16: ScaledTile(16, 64, 256, 4, 4),
        64: ScaledTile(64, 64, 128, 6, 4),
        256: None,
    },
    (4096, 14336): {  # llama-3-8b, down
        4: ScaledTile(16, 64, 256, 4, 4, splits=4, tma=True),
        16: ScaledTile(16, 64, 256, 4, 4, splits=4),
        64: ScaledTile(64, 64, 128, 6, 4, splits=2),
        256: None,
    },
}


def scaled_tile_for(
    M: int,
    O: int,  # noqa: E741
    I: int,  # noqa: E741
    library_fits: bool,
    grouped: bool = False,
    invariant: bool = False,
) -> ScaledTile | None:
    """Choose the tile for x (M, I) and weights (O, I). None: the library computes it. `grouped`: each GROUP of input
    features has a scale. `invariant`: a token's bits do not depend on M, nor on the tile."""
    if grouped or invariant:
        # Every M has the same instruction and order of sums: at least 16 tokens and 64 outputs, and steps of GROUP.
        return _tall(M)
    bounds = [bound for bound in _MEASURED.get((O, I), {}) if bound >= M]
    tile = _MEASURED[O, I][min(bounds)] if bounds else _guess(M, O)
    return tile if tile is not None or library_fits else _tall(M)


def fitting(tile: ScaledTile, shared: int) -> ScaledTile:
    """Return the tile for a GPU with `shared` bytes of shared memory. It can have fewer stages, which changes no
    bit."""
    stage = tile.block_i * (tile.block_o + tile.block_m)
    return replace(tile, num_stages=max(1, min(tile.num_stages, (shared - _SHARED_SPARE) // stage)))


def _tall(M: int) -> ScaledTile:
    if M > MAX_TOKENS:
        return ScaledTile(128, 128, GROUP, num_stages=4, num_warps=8)
    return ScaledTile(max(16, 1 << (M - 1).bit_length()), 64, GROUP, num_stages=6, num_warps=4)


def _guess(M: int, O: int) -> ScaledTile | None:  # noqa: E741
    """Choose a tile for sizes that were not measured, like those of measured sizes."""
    if M > MAX_TOKENS:
        return None
    block_m = max(16, 1 << (M - 1).bit_length())
    # There are enough splits that programs fill the card.
    splits = 1 if O > 8192 else 2 if O > 4096 or M > 16 else 4
    if M > 16:
        return ScaledTile(block_m, 64, 128, num_stages=6, num_warps=4, splits=splits)
    return ScaledTile(block_m, 64, 256, num_stages=4, num_warps=4, splits=splits)
