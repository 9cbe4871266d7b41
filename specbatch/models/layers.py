"""The layers of a decoder, inference only. Weights are plain tensors; nothing here knows about checkpoints.

Shape suffixes: T packed tokens, I input features, O output features, H heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of every product on CPU in float32. oneDNN picks its algorithm, and with it the order of summation, by the
# number of rows and threads; in calls of one fixed shape a row's bits cannot depend on the batch around it. Weights are
# streamed from memory, so up to this many rows cost little more than one.
BLOCK_ROWS = 16
# For long prompts, where a check at load finds that this many rows at once give the same bits.
LARGE_BLOCK_ROWS = 128


def _is_packable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


class Linear:
    """y = x W^T + b.

    On CPU in float32 the weight is packed once by oneDNN, which is faster for the few rows of decoding and verification
    (8 rows cost 1.2x of one, against 3x with an unpacked weight), and rows are computed in blocks of a fixed size: the
    bitwise invariance of the CPU path rests on that; tests/test_invariance.py watches it.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight_OI.shape
        self.bias = bias_O
        self._packed = _is_packable(weight_OI)
        self._weight = weight_OI
        self._num_threads = 0  # 0: as many as torch has
        self.large_block = BLOCK_ROWS
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), BLOCK_ROWS)
            self._settle()

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not self._packed:
            return F.linear(x_TI, self._weight, self.bias)
        return in_blocks(self.multiply, x_TI, self.large_block)

    def multiply(self, x_RI: Tensor, activation: str = "none") -> Tensor:
        """One product of a packed weight, with oneDNN's activation fused behind it."""
        with _threads(self._num_threads):
            return torch.ops.mkldnn._linear_pointwise(x_RI, self._weight, self.bias, activation, [], "")

    def multiply_by(self, x_RI: Tensor, factor_RO: Tensor) -> Tensor:
        """One product of a packed weight, multiplied elementwise by `factor_RO`."""
        with _threads(self._num_threads):
            return torch.ops.mkldnn._linear_pointwise.binary(x_RI, factor_RO, self._weight, self.bias, "mul")

    def _settle(self) -> None:
        """Find settings with which a row's bits do not depend on its place: more threads than there are blocks of
        output features make oneDNN split the rows too, each part by another kernel."""
        x = torch.randn(LARGE_BLOCK_ROWS, self.in_features, generator=torch.Generator().manual_seed(0))
        block = x[:BLOCK_ROWS]
        threads = torch.get_num_threads()
        while threads > 1 and any(
            not torch.equal(self.multiply(block.roll(shift, 0)), self.multiply(block).roll(shift, 0))
            for shift in (1, 5, 8)
        ):
            threads //= 2
            self._num_threads = threads
        small = torch.cat([self.multiply(part) for part in x.split(BLOCK_ROWS)])
        if torch.equal(self.multiply(x), small):
            self.large_block = LARGE_BLOCK_ROWS


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run with `count` threads; 0 leaves torch's setting alone."""
    before = torch.get_num_threads()
    if count in (0, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_blocks(function: Callable[[Tensor], Tensor], x_TI: Tensor, large_block: int) -> Tensor:
    """Apply a function of rows in blocks of `large_block` and BLOCK_ROWS rows, the last one padded with zeros."""
    num_rows = x_TI.shape[0]
    padding = -num_rows % BLOCK_ROWS
    x_TI = F.pad(x_TI, (0, 0, 0, padding)) if padding else x_TI.contiguous()
    if x_TI.shape[0] == BLOCK_ROWS:
        return function(x_TI)[:num_rows]
    split = num_rows // large_block * large_block
    parts = [*x_TI[:split].split(large_block), *x_TI[split:].split(BLOCK_ROWS)]
    return torch.cat([function(part) for part in parts if part.shape[0]])[:num_rows]


class GatedLinear:
    """silu(x G^T) * (x U^T): the first half of a SwiGLU feed-forward.

    On CPU in float32 the activation is fused into the products, where it is computed alike for every element.
    Torch's own computes the elements at the end of a thread's share by another formula.
    """

    def __init__(self, gate_OI: Tensor, up_OI: Tensor, gate_bias_O: Tensor | None, up_bias_O: Tensor | None) -> None:
        self._fused = _is_packable(gate_OI)
        if self._fused:
            self._gate, self._up = Linear(gate_OI, gate_bias_O), Linear(up_OI, up_bias_O)
        else:
            bias = None if gate_bias_O is None or up_bias_O is None else torch.cat((gate_bias_O, up_bias_O))
            self._gate_up = Linear(torch.cat((gate_OI, up_OI)), bias)

    def __call__(self, x_TI: Tensor) -> Tensor:
        if not self._fused:
            gate, up = self._gate_up(x_TI).chunk(2, dim=-1)
            return F.silu(gate) * up
        return in_blocks(self._multiply, x_TI, min(self._gate.large_block, self._up.large_block))

    def _multiply(self, x_RI: Tensor) -> Tensor:
        return self._up.multiply_by(x_RI, self._gate.multiply(x_RI, "swish"))


class RMSNorm:
    """Root-mean-square layer norm (Zhang and Sennrich 2019), computed in float32 at least, as the reference models
    do."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float32, torch.float64):
            return F.rms_norm(x, self.weight.shape, self.weight, self._eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * wide.to(x.dtype)


class Rotary:
    """Rotary position embedding (Su et al. 2021), rotate-half form, from tables of cos and sin for `num_positions`."""

    def __init__(
        self, inv_freq: Tensor, attention_factor: float, num_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq.float())
        cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
        self._cos = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(
            device=device, dtype=dtype
        )  # the sign of rotate-half is in the table

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin for packed tokens, each (T, 1, D): looked up once for all layers of a forward pass."""
        return self._cos[positions_T].unsqueeze(1), self._sin[positions_T].unsqueeze(1)

    @staticmethod
    def apply(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        swapped = x_THD.roll(x_THD.shape[-1] // 2, dims=-1)
        return x_THD * cos + swapped * sin  # not addcmul: it rounds some elements once and some twice
