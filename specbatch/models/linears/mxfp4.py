"""Matrices of experts that stay in MXFP4 in memory: half a byte an element, and a byte for each 32 of a row.

`kernels/torch/mxfp4.py` has the layout, and `kernels/triton/parts/mxfp4.py` makes tiles of it inside a GEMM.

Shape suffixes: X experts, N outputs, B bytes of a row (two inputs each), G groups of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specbatch.kernels.torch.mxfp4 import dequantise


class PackedReader(Protocol):
    def packed(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the values (N, B) and the scales (N, G) of a weight by its canonical name."""
        ...


@dataclass(frozen=True)
class Mxfp4Weight:
    """One matrix of each expert. Both tensors are contiguous, uint8."""

    values_XNB: Tensor
    scales_XNG: Tensor

    @staticmethod
    def load(tensors: PackedReader, experts: Sequence[Sequence[str]], device: torch.device) -> Mxfp4Weight:
        """Load the weights of these names, one after the other to its place. Those of an expert have the same inputs,
        and their outputs follow each other, such as gate and up."""
        values_XNB = scales_XNG = torch.empty(0)
        for number, names in enumerate(experts):
            parts = [tensors.packed(name) for name in names]
            values_NB, scales_NG = (torch.cat(tensors_) for tensors_ in zip(*parts, strict=True))
            if not number:
                values_XNB = torch.empty((len(experts), *values_NB.shape), dtype=torch.uint8, device=device)
                scales_XNG = torch.empty((len(experts), *scales_NG.shape), dtype=torch.uint8, device=device)
            values_XNB[number], scales_XNG[number] = values_NB, scales_NG
        return Mxfp4Weight(values_XNB, scales_XNG)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the numbers of experts, outputs and inputs."""
        num_experts, num_outputs, num_bytes = self.values_XNB.shape
        return num_experts, num_outputs, 2 * num_bytes

    def dequantised(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return the matrix (outputs, inputs) of one expert."""
        return dequantise(self.values_XNB[expert], self.scales_XNG[expert], dtype)
