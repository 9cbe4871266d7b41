"""The type of a matrix that kernels multiply with."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

# A matrix W, or the layer that computes x W^T in its place. On a CPU in float32 it is a layer: the bits that torch
# gives a row of x W^T depend on the number of rows.
Matrix = Tensor | Callable[[Tensor], Tensor]
