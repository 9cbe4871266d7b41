"""Matrix products on CPU in float32 whose rows do not depend on each other, to the last bit.

oneDNN packs a weight once. That is faster for the few rows of decoding and verification (8 rows cost 1.2x of one,
against 3x with an unpacked weight). It picks its algorithm, and with it the order of summation, by the number of
rows and threads; so rows are computed in blocks of fixed sizes, of which a check has found that they give the same
bits. The bitwise invariance of the CPU path rests on this; tests/test_invariance.py watches it.

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

# Weights are streamed from memory, so up to this many rows cost little more than one.
BLOCK_ROWS = 16
_LARGER_BLOCKS = (128, 64, 32)


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
        """One block, with oneDNN's activation fused behind the product."""
        with _threads(self.settings.num_threads):
            return torch.ops.mkldnn._linear_pointwise(x_RI, self._weight, self._bias, activation, [], "")

    def multiply_by(self, x_RI: Tensor, factor_RO: Tensor) -> Tensor:
        """One block, multiplied elementwise by `factor_RO`."""
        with _threads(self.settings.num_threads):
            return torch.ops.mkldnn._linear_pointwise.binary(x_RI, factor_RO, self._weight, self._bias, "mul")


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """How products of one size are run: threads, and the sizes of blocks that agree bit by bit, largest first."""

    num_threads: int
    blocks: tuple[int, ...]


def in_blocks(function: Callable[[Tensor], Tensor], x_TI: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """Apply a function of rows in blocks of these sizes, the last of which is padded with zeros."""
    num_rows = x_TI.shape[0]
    padding = -num_rows % BLOCK_ROWS
    x_TI = F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI.contiguous()
    if x_TI.shape[0] in blocks:
        return function(x_TI)[:num_rows]
    parts, start = [], 0
    for size in blocks:
        while x_TI.shape[0] - start >= size:
            parts.append(function(x_TI[start : start + size]))
            start += size
    return torch.cat(parts)[:num_rows]


def _pack(weight_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), BLOCK_ROWS)


@cache
def _settle(in_features: int, out_features: int, max_threads: int) -> BlockSettings:
    """Find settings under which a row's bits depend neither on its place in a block nor on the block's size.

    A property of this machine and of the size alone, hence measured once for each. With more threads than there are
    blocks of output features, oneDNN splits the rows too and computes the parts by different kernels: then fewer are
    used.
    """
    generator = torch.Generator().manual_seed(0)
    weight = _pack(torch.empty(out_features, in_features).uniform_(-1, 1, generator=generator))
    x = torch.empty(max(_LARGER_BLOCKS), in_features).uniform_(-1, 1, generator=generator)

    def multiply(rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")

    num_threads, block = max_threads, x[:BLOCK_ROWS]
    while True:
        with _threads(num_threads):
            result = multiply(block)
            stable = all(torch.equal(multiply(block.roll(shift, 0)), result.roll(shift, 0)) for shift in (1, 5, 8))
            if stable or num_threads == 1:
                small = torch.cat([multiply(part) for part in x.split(BLOCK_ROWS)])
                larger = [s for s in _LARGER_BLOCKS if torch.equal(multiply(x[:s]), small[:s])]
                return BlockSettings(num_threads, (*larger, BLOCK_ROWS))
        num_threads //= 2


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
