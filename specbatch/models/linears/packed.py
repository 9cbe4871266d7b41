"""Linear layers on CPU in float32 whose results for one token do not depend on the other tokens, to the last bit.

oneDNN packs a weight once. That is faster for the few tokens of decoding and verification: 8 tokens cost 1.2x of one,
and 3x with a weight that is not packed. It chooses its algorithm, and with it the order of summation, by the number of
tokens and threads. So tokens are computed in blocks of fixed sizes, which a check has found to give the same bits. The
bitwise invariance of the CPU path rests on this; tests/engine/test_invariance.py tests it.

Shape suffixes: T tokens, R tokens of one block, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.activations import Activation
from specbatch.kernels.torch.model import gated
from specbatch.models.linears.linear import GatedLinear, Linear
from specbatch.torch_threads import use_threads

# The smallest block. A single token is computed as a block of this size, at the same cost: weights are streamed from
# memory.
BLOCK_TOKENS = 4
_LARGER_BLOCKS = (128, 64, 32, 16, 8)
_PACK_TOKENS = 16  # the layout that oneDNN chooses for this number of tokens serves 1 to 128 well
# Reading a weight once costs as much as computing this number of tokens (measured: 16 GB/s, 90 GFLOP/s, two cores).
_STREAM_COST = 14


def thread_counts(most: int) -> tuple[int, ...]:
    """The numbers of threads to choose from: `most`, three quarters, a half, a quarter ... one."""
    halves = [max(1, most >> shift) for shift in range(most.bit_length())]
    return tuple(sorted({*halves, max(1, most * 3 // 4)}, reverse=True))


def is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


class PackedLinear(Linear):
    """A token's result has the same bits whatever the other tokens are."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._gemm = _PackedGemm(weight_OI, bias_O)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return _in_blocks(self._gemm, x_TI, self._gemm.settings.blocks)


class PackedGatedLinear(GatedLinear):
    """A gated pair of `PackedLinear`. An activation that oneDNN has is fused into the GEMM, which computes it alike for
    every element. Torch's own computes the elements at the end of a thread's share by another formula."""

    def __init__(
        self, gate_OI: Tensor, up_OI: Tensor, biases_O: tuple[Tensor, Tensor] | None, activation: Activation
    ) -> None:
        gate_bias_O, up_bias_O = biases_O or (None, None)
        self._gate, self._up = _PackedGemm(gate_OI, gate_bias_O), _PackedGemm(up_OI, up_bias_O)
        self._activation = _ONEDNN_NAMES.get(activation)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return _in_blocks(self._block, x_TI, self._gate.settings.blocks)  # gate and up have one size

    def _block(self, x_RI: Tensor) -> Tensor:
        if self._activation is None:
            return gated(self._gate(x_RI), self._up(x_RI), "clamped_swiglu")
        return self._up.times(x_RI, self._gate(x_RI, *self._activation))


class PackedActivatedLinear(GatedLinear):
    """act(x U^T + b) with the activation fused, as in `PackedGatedLinear`. All elements of relu are exact."""

    def __init__(self, up_OI: Tensor, bias_O: Tensor | None, activation: Activation) -> None:
        self._up, self._is_squared = _PackedGemm(up_OI, bias_O), activation == "relu2"
        self._activation = _ONEDNN_NAMES["relu" if self._is_squared else activation]

    def __call__(self, x_TI: Tensor) -> Tensor:
        return _in_blocks(self._block, x_TI, self._up.settings.blocks)

    def _block(self, x_RI: Tensor) -> Tensor:
        y_RO = self._up(x_RI, *self._activation)
        return y_RO * y_RO if self._is_squared else y_RO


# oneDNN's name of an activation, and of its algorithm. It has no name for gpt-oss's.
_ONEDNN_NAMES: Mapping[Activation, tuple[str, str]] = {
    "silu": ("swish", ""),
    "gelu_tanh": ("gelu", "tanh"),
    "gelu": ("gelu", "none"),
    "relu": ("relu", ""),
}


class _PackedGemm:
    """x W^T + b of one block."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        out_features, in_features = weight_OI.shape
        self._weight = _pack(weight_OI)
        self._bias = bias_O
        self.settings = _settle(in_features, out_features, torch.get_num_threads())

    def __call__(self, x_RI: Tensor, activation: str = "none", algorithm: str = "") -> Tensor:
        """Compute the GEMM with oneDNN's activation of the result, fused."""
        with use_threads(self.settings.threads_for(torch.get_num_threads())):
            return torch.ops.mkldnn._linear_pointwise(x_RI, self._weight, self._bias, activation, [], algorithm)

    def times(self, x_RI: Tensor, factor_RO: Tensor) -> Tensor:
        """The result multiplied elementwise by `factor_RO`, fused."""
        with use_threads(self.settings.threads_for(torch.get_num_threads())):
            return torch.ops.mkldnn._linear_pointwise.binary(x_RI, factor_RO, self._weight, self._bias, "mul")


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """The settings with which GEMMs of one size give the same bits: numbers of threads and sizes of blocks, both
    largest first."""

    threads: tuple[int, ...]
    blocks: tuple[int, ...]

    def threads_for(self, available: int) -> int:
        """Return the most threads up to `available`; if fewer would give other bits, the fewest that do not."""
        return next((count for count in self.threads if count <= available), self.threads[-1])


def _in_blocks(function: Callable[[Tensor], Tensor], x_TI: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """Apply a function of tokens in blocks of these sizes. The last one is padded with zeros."""
    num_tokens = x_TI.shape[0]
    sizes = _cover(num_tokens, blocks)
    padding = sum(sizes) - num_tokens
    x_TI = F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI.contiguous()
    out = function(x_TI) if len(sizes) == 1 else torch.cat([function(part) for part in x_TI.split(sizes)])
    return out[:num_tokens] if padding else out


@cache
def _cover(num_tokens: int, blocks: tuple[int, ...]) -> list[int]:
    """The cheapest sizes of blocks, largest first, that hold `num_tokens`."""
    whole = max(0, num_tokens // blocks[0] - 1)  # largest blocks; the rest leaves a choice
    best, rest = [blocks[0]] * whole, num_tokens - whole * blocks[0]
    options = [[size] for size in blocks if size >= rest]
    options += [[size, *_cover(rest - size, blocks)] for size in blocks if size < rest]
    return best + min(options, key=lambda sizes: sum(size + _STREAM_COST for size in sizes))


def _pack(weight_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), _PACK_TOKENS)


@cache
def _settle(in_features: int, out_features: int, max_threads: int) -> BlockSettings:
    """Find settings for which a token's bits do not depend on its index in a block, the block's size or the number of
    threads.

    They depend on the machine and the size alone, so each size is measured once. With more threads than blocks of
    output features, oneDNN also splits the tokens and computes the parts by different kernels: then fewer threads are
    used.
    """
    generator = torch.Generator().manual_seed(0)
    weight = _pack(torch.empty(out_features, in_features).uniform_(-1, 1, generator=generator))
    x = torch.empty(max(_LARGER_BLOCKS), in_features).uniform_(-1, 1, generator=generator)

    def multiply(x_RI: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x_RI, weight, None, "none", [], "")

    def is_stable(count: int) -> bool:
        """Return whether a token of the smallest block gives the same bits at each index."""
        block = x[:BLOCK_TOKENS]
        with use_threads(count):
            result = multiply(block)
            return all(
                torch.equal(multiply(block.roll(shift, 0)), result.roll(shift, 0)) for shift in range(1, BLOCK_TOKENS)
            )

    def agrees(count: int) -> bool:
        with use_threads(count):
            return all(torch.equal(multiply(x[:size]), small[:size]) for size in blocks)

    counts = thread_counts(max_threads)
    most = next(count for count in counts if count == 1 or is_stable(count))
    with use_threads(most):
        small = torch.cat([multiply(part) for part in x.split(BLOCK_TOKENS)])
        blocks = (*(size for size in _LARGER_BLOCKS if torch.equal(multiply(x[:size]), small[:size])), BLOCK_TOKENS)
    fewer = [count for count in counts if count < most and is_stable(count) and agrees(count)]
    return BlockSettings((most, *fewer), blocks)
