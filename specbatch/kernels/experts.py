"""The weights of a layer's experts, stacked: the operand of the operations of `mixture.py`.

Shape suffixes: X experts, E hidden size, I inner features of an expert, F inner features of gate and of up.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specbatch.kernels.activations import Activation


class ExpertWeights(NamedTuple):
    """Gated feed-forwards of one size. Of `gate_up_XFE`, (X, 2 I, E), the first I rows of an expert are its gate."""

    gate_up_XFE: Tensor
    down_XEI: Tensor
    activation: Activation = "silu"
