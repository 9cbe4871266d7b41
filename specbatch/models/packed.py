"""Matrix products on CPU in float32 whose rows do not depend on each other, to the last bit.

oneDNN packs a weight once. That is faster for the few rows of decoding and verification (8 rows cost 1.2x of one,
against 3x with an unpacked weight). It picks its algorithm, and with it the order of summation, by the number of
rows and threads; so rows are computed in blocks of fixed sizes, of which a check has found that they give the same
bits. The bitwise invariance of the CPU path rests on this; tests/engine/test_invariance.py watches it.

Shape suffixes: T rows, R rows of one block, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# The smallest block; a single row is computed as this many, which costs the same: weights are streamed from memory.
BLOCK_ROWS = 4
_LARGER_BLOCKS = (128, 64, 32, 16, 8)
_PACK_ROWS = 16  # the layout that oneDNN chooses for this many rows serves 1 to 128 well
# Streaming a weight once costs as much as computing this many rows (measured at 16 GB/s and 90 GFLOP/s on two cores).
_STREAM_COST = 14


def thread_counts(most: int) -> tuple[int, ...]:
    """The numbers of threads to choose from: `most`, three quarters, a half, a quarter ... one."""
    halves = [max(1, most >> shift) for shift in range(most.bit_length())]
    return tuple(sorted({*halves, max(1, most * 3 // 4)}, reverse=True))


def is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


class PackedLinear:
    """y = x W^T + b, in one block at a time."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        out_features, in_features = weight_OI.shape
        self._weight = _pack(weight_OI)
        self._bias = bias_O
        self.settings = _settle(in_features, out_features, torch.get_num_threads())

    def multiply(self, x_RI: Tensor, activation: str = "none") -> Tensor:
        """One block, with oneDNN's activation fused into the GEMM."""
        with _threads(self.settings.threads_for(torch.get_num_threads())):
            return torch.ops.mkldnn._linear_pointwise(x_RI, self._weight, self._bias, activation, [], "")

    def multiply_by(self, x_RI: Tensor, factor_RO: Tensor) -> Tensor:
        """One block, multiplied elementwise by `factor_RO`."""
        with _threads(self.settings.threads_for(torch.get_num_threads())):
            return torch.ops.mkldnn._linear_pointwise.binary(x_RI, factor_RO, self._weight, self._bias, "mul")


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """How products of one size are run: the numbers of threads and the sizes of blocks that agree bit by bit, both
    largest first."""

    threads: tuple[int, ...]
    blocks: tuple[int, ...]

    def threads_for(self, available: int) -> int:
        """The most threads up to `available`; where fewer would give other bits, the fewest that do not."""
        return next((count for count in self.threads if count <= available), self.threads[-1])


def in_blocks(function: Callable[[Tensor], Tensor], x_TI: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """Apply a function of rows in blocks of these sizes, the last of which is padded with zeros."""
    num_rows = x_TI.shape[0]
    sizes = _cover(num_rows, blocks)
    padding = sum(sizes) - num_rows
    x_TI = F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI.contiguous()
    out = function(x_TI) if len(sizes) == 1 else torch.cat([function(part) for part in x_TI.split(sizes)])
    return out[:num_rows] if padding else out


@cache
def _cover(num_rows: int, blocks: tuple[int, ...]) -> list[int]:
    """The cheapest sizes of blocks, largest first, that hold `num_rows` rows."""
    whole = max(0, num_rows // blocks[0] - 1)  # as many of the largest as leave a choice for the rest
    best, rest = [blocks[0]] * whole, num_rows - whole * blocks[0]
    options = [[size] for size in blocks if size >= rest]
    options += [[size, *_cover(rest - size, blocks)] for size in blocks if size < rest]
    return best + min(options, key=lambda sizes: sum(size + _STREAM_COST for size in sizes))


def _pack(weight_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _PACK_ROWS)


@cache
def _settle(in_features: int, out_features: int, max_threads: int) -> BlockSettings:
    """Find settings under which a row's bits do not depend on its place in a block, the block's size or the number
    of threads.

    A property of this machine and of the size alone, hence measured once for each. With more threads than there are
    blocks of output features, oneDNN splits the rows too and computes the parts by different kernels: then fewer are
    used.
    """
    generator = torch.Generator().manual_seed(0)
    weight = _pack(torch.empty(out_features, in_features).uniform_(-1, 1, generator=generator))
    x = torch.empty(max(_LARGER_BLOCKS), in_features).uniform_(-1, 1, generator=generator)

    def multiply(rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")

    def is_stable(count: int) -> bool:
        """Whether a row of the smallest block may lie anywhere in it."""
        block = x[:BLOCK_ROWS]
        with _threads(count):
            result = multiply(block)
            return all(
                torch.equal(multiply(block.roll(shift, 0)), result.roll(shift, 0)) for shift in range(1, BLOCK_ROWS)
            )

    def agrees(count: int) -> bool:
        with _threads(count):
            return all(torch.equal(multiply(x[:size]), small[:size]) for size in blocks)

    counts = thread_counts(max_threads)
    most = next(count for count in counts if count == 1 or is_stable(count))
    with _threads(most):
        small = torch.cat([multiply(part) for part in x.split(BLOCK_ROWS)])
        blocks = (*(size for size in _LARGER_BLOCKS if torch.equal(multiply(x[:size]), small[:size])), BLOCK_ROWS)
    fewer = [count for count in counts if count < most and is_stable(count) and agrees(count)]
    return BlockSettings((most, *fewer), blocks)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
