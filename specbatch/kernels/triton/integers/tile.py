"""The division of GEMMs with weights of whole numbers (`ops.py`) into programs.

It depends on the shape alone, so that a model's shapes decide its bits. This module does not import Triton.

Shape letters: M tokens, O output features, I input features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specbatch.kernels.integers import UNIT

# Above this number of tokens a weight is dequantised to memory, and the library multiplies. That was faster for 256
# tokens, with each of the four GEMMs of a Llama-3-8B layer (H200).
MAX_TOKENS = 128
_MAX_DIRECT_TOKENS = 16  # the most tokens of a `DirectTile` for sizes that were not measured
_WIDE = 8192  # a GEMM with more outputs has enough programs
_MIN_STEP = 16  # tensor cores multiply 16 inputs at once
_MIN_STAGED_GROUP = 32
_SHARED_SPARE = 5_376  # bytes of shared memory for all but the tiles
_MULTIPROCESSORS = 132  # the number of an H100 and an H200


@dataclass(frozen=True)
class IntegerTile:
    """One way to cut y = x W^T into programs whose tiles go through shared memory (`kernel.py`). Sizes are in elements
    unless they say otherwise.

    block_m, block_o: tokens and output features of one program. step: words of a row of the weight that are read at
        once, with 4 bits at most 64. num_stages: tiles in flight of one program. num_warps: 32 threads each.
    splits: parts of the input features, summed afterwards in fixed order.
    scale_sums: scales multiply the float32 sums of a group, which is exact. Otherwise they multiply the weights, which
        are rounded: that takes fewer registers with many tokens.
    prefetch: words of every row that a program loads into L2 before it waits for x.
    """

    block_m: int
    block_o: int
    step: int
    num_stages: int
    num_warps: int
    splits: int = 1
    scale_sums: bool = True
    prefetch: int = 0

    def __post_init__(self) -> None:
        for size in (self.block_m, self.block_o, self.step, self.num_warps):
            assert size.bit_count() == 1, self  # a power of two
        assert self.step <= UNIT // 2, self
        assert min(self.num_stages, self.splits) >= 1, self


@dataclass(frozen=True)
class DirectTile:
    """One way to cut y = x W^T of few tokens into programs (`direct.py`).

    block_m: tokens of a program, a multiple of 8; M <= block_m. block_o: its output features, a multiple of 16; in a
        gated GEMM half of them are gate, half are up. num_warps: 32 threads each, which divide the input features.
    ahead: weights of the next step are loaded before these are multiplied, the first ones before the wait for x.
    registers: of a thread, at most. Without a limit, the compiler moves loads after computations to save registers.
    splits: parts of the input features, summed afterwards in fixed order.
    fuse_norm: every program computes the norm of a single token itself; otherwise one small kernel does beforehand.
    prefetch: words of every row that a program loads into L2 before it waits for x, after those of its first step.
    """

    block_m: int
    block_o: int
    num_warps: int
    ahead: bool = True
    registers: int = 128
    splits: int = 1
    fuse_norm: bool = True
    prefetch: int = 0

    def __post_init__(self) -> None:
        for size in (self.block_m // 8, self.block_o // 16, self.num_warps):
            assert size.bit_count() == 1, self  # a power of two


Tile = IntegerTile | DirectTile

# (O, I) of the weight with 4 bits: for up to M tokens, the best measured tile, or None if it was faster to dequantise
# the weight. `scripts/bench/tune_integers.py --table` prints it.
_MEASURED: dict[tuple[int, int], dict[int, Tile | None]] = {
    (6144, 4096): {  # llama-3-8b, qkv
        1: DirectTile(8, 16, 4),
        16: DirectTile(16, 32, 4, registers=168),
    },
    (4096, 4096): {  # llama-3-8b, o
        1: DirectTile(8, 16, 8, prefetch=1024),
        16: DirectTile(16, 32, 8, registers=168),
    },
    (28672, 4096): {  # llama-3-8b, gate_up
        1: DirectTile(8, 32, 4, ahead=False),
        16: DirectTile(16, 64, 4, ahead=False, registers=255),
    },
    (4096, 14336): {  # llama-3-8b, down
        1: DirectTile(8, 16, 8, prefetch=1024),
        16: DirectTile(16, 32, 8, registers=168),
    },
}


def integer_tile_for(
    M: int,
    O: int,  # noqa: E741
    I: int,  # noqa: E741
    bits: int,
    group: int,
    *,
    has_whole_zeros: bool = True,
) -> Tile | None:
    """Choose the tile for x (M, I) and weights (O, I). None: the weight is dequantised to memory. An `IntegerTile`
    takes neither zero points that are no whole numbers nor groups of 16 inputs, which make its steps too short."""
    if not has_whole_zeros or group < min(I, _MIN_STAGED_GROUP):
        return guess_for_small_groups(M, O, bits) if is_direct(I, group) else None
    bounds = [bound for bound in _MEASURED.get((O, I), {}) if bound >= M]
    tile = _MEASURED[O, I][min(bounds)] if bounds and bits == 4 else guess(M, O, bits)
    if isinstance(tile, DirectTile) and not is_direct(I, group):
        tile = staged_guess(M, O)
    return for_group(tile, I, bits, group) if isinstance(tile, IntegerTile) else tile


def is_direct(I: int, group: int) -> bool:  # noqa: E741
    """Return whether a `DirectTile` can multiply such weights: 16 neighbouring inputs must have one scale."""
    return group >= I or group % 16 == 0


def can_fuse_norm(I: int, bits: int, group: int) -> bool:  # noqa: E741
    """Return whether a `DirectTile` can norm the input: 128 neighbouring inputs of a step must have one scale."""
    return bits == 4 and (group >= I or group % 128 == 0)


def for_group(tile: IntegerTile, I: int, bits: int, group: int) -> IntegerTile:  # noqa: E741
    """Return the tile with steps that lie in groups. More stages make up for shorter steps."""
    step = step_for(tile.step, I, bits, group)
    return replace(tile, step=step, num_stages=tile.num_stages * max(1, tile.step // step))


def step_for(step: int, I: int, bits: int, group: int) -> int:  # noqa: E741
    """Return the words of a step such that each part of a word has inputs of one group."""
    step = min(step, UNIT * bits // 16)
    return step if group >= I else min(step, group & -group)


def fitting(tile: IntegerTile, bits: int, shared: int) -> IntegerTile:
    """Return the tile for a GPU with `shared` bytes of shared memory. It can have fewer stages, which changes no bit.
    If two stages do not fit, it has shorter steps, which can change bits."""
    room = shared - _SHARED_SPARE
    while 2 * _stage_bytes(tile, bits) > room and tile.step > _MIN_STEP:
        tile = replace(tile, step=tile.step // 2)
    return replace(tile, num_stages=max(1, min(tile.num_stages, room // _stage_bytes(tile, bits))))


def _stage_bytes(tile: IntegerTile, bits: int) -> int:
    return 2 * tile.step * tile.block_o + 2 * tile.step * 16 // bits * tile.block_m


def guess(M: int, O: int, bits: int) -> Tile | None:  # noqa: E741
    """Choose a tile for sizes that were not measured."""
    if bits != 4 or M > _MAX_DIRECT_TOKENS:
        return staged_guess(M, O)
    if M <= 8:
        return DirectTile(8, 16, 8) if O <= _WIDE else DirectTile(8, 32, 8, registers=168)
    return DirectTile(16, 32, 8, registers=168) if O <= _WIDE else DirectTile(16, 64, 4, registers=255)


def guess_for_small_groups(M: int, O: int, bits: int) -> DirectTile | None:  # noqa: E741
    """Choose a tile for weights of which each 16 or 32 inputs have a scale; None: there are too many tokens. Larger
    tiles have more scales than registers. (Compiled for sm_90, none of these uses local memory.)"""
    if M > _MAX_DIRECT_TOKENS:
        return None
    if O > _WIDE:
        return DirectTile(8 if M <= 8 else 16, 32, 4, ahead=False, registers=255)
    if M <= 8:
        return DirectTile(8, 16, 8, registers=128 if bits == 4 else 168)
    return DirectTile(16, 16, 8, registers=232)


def staged_guess(M: int, O: int) -> IntegerTile | None:  # noqa: E741
    """Choose an `IntegerTile` for sizes that were not measured."""
    if M > MAX_TOKENS:
        return None
    block_m = max(8, 1 << (M - 1).bit_length())
    if block_m == 8:
        return IntegerTile(8, 16, 64, 6, 1, prefetch=512) if O <= _WIDE else IntegerTile(8, 32, 64, 6, 2)
    if block_m == 64:  # the best ones of a Llama-3-8B layer
        tiles = -(-O // 128)
        splits = next((n for n in (4, 2, 1) if n * tiles <= _MULTIPROCESSORS), None)
        if splits is None:
            return IntegerTile(64, 64, 64, 4, 4, scale_sums=False)
        return IntegerTile(64, 128, 64, 4, 8, splits=splits)
    if block_m <= 32:
        splits = next(n for n in (4, 2, 1) if n * -(-O // 64) <= 2 * _MULTIPROCESSORS or n == 1)
        step, stages = {16: (64, 5), 32: (64, 4)}[block_m]  # two programs fit into a multiprocessor
        return IntegerTile(block_m, 64, step, stages, 4, splits=splits)
    splits = max((n for n in (1, 2, 3, 4) if n * -(-O // 128) <= _MULTIPROCESSORS), default=1)
    return IntegerTile(128, 128, 32, 4, 8, splits=splits, scale_sums=False)
