"""The states of layers with a Gated DeltaNet (`kernels/delta.py`): those of running requests and checkpoints.

A line holds the state of one sequence in all such layers. The first lines belong to request indices, the next one to
padding, the others to checkpoints. A *checkpoint* is the state after the tokens of a page and all before it. A request
that begins with the same tokens starts from it.

Shape suffixes: L layers, S lines, H value heads, V and K dimensions of value and key heads, R inputs that are kept, C
channels of the convolution, P parts of a state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specbatch.kernels.delta import LayerStates, parts_of_head


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The sizes of one line. `max_nodes`: the most nodes of a round's chain."""

    num_layers: int
    num_heads: int
    value_dim: int
    key_dim: int
    channels: int
    conv_size: int
    max_nodes: int

    @property
    def num_inputs(self) -> int:
        """Return R: nodes of the last round, nodes of this one, and what the convolution reads before them."""
        return self.conv_size - 1 + 2 * self.max_nodes

    def shapes(self, num_lines: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of states, inputs, gates and lengths."""
        before = self.num_layers, num_lines
        return (
            (*before, self.num_heads, self.value_dim, self.key_dim),
            (*before, self.num_inputs, self.channels),
            (*before, self.num_inputs, 2 * self.num_heads),
            (*before, self.num_heads * parts_of_head(self.value_dim)),
        )

    def line_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a line of a model that computes in `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        states, inputs, gates, lengths = map(math.prod, self.shapes(1))
        return states * wide.itemsize + (inputs + gates) * dtype.itemsize + lengths * 4


class StateCache:
    """The lines. `num_requests`: request indices, without padding's. `num_checkpoints`: lines after padding's."""

    def __init__(
        self, sizes: StateSizes, num_requests: int, num_checkpoints: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.checkpoints = range(num_requests + 1, num_requests + 1 + num_checkpoints)
        states, inputs, gates, lengths = sizes.shapes(self.checkpoints.stop)
        wide = torch.promote_types(dtype, torch.float32)
        self.states_LSHVK = torch.zeros(states, dtype=wide, device=device)
        self.inputs_LSRC = torch.zeros(inputs, dtype=dtype, device=device)
        self.gates_LSR2H = torch.zeros(gates, dtype=dtype, device=device)
        self.lengths_LSP = torch.zeros(lengths, dtype=torch.int32, device=device)

    def layer(self, layer: int) -> LayerStates:
        """Return views of a layer's tensors. `layer`: its number among those with states."""
        return LayerStates(*(x[layer] for x in self._tensors))

    def start(self, line: int, checkpoint: int | None) -> None:
        """Set the state of a request that starts: to a checkpoint, or to the state before the first token. Launched in
        order with the passes, so the device waits for the line's former user."""
        for tensor in self._tensors:
            if checkpoint is None:
                tensor[:, line].zero_()
            else:
                tensor[:, line].copy_(tensor[:, checkpoint])

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def _tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.states_LSHVK, self.inputs_LSRC, self.gates_LSR2H, self.lengths_LSP
