"""Weights as whole numbers of 4 or 8 bits, of which some inputs of an output share a scale and a zero point."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

UNIT = 256  # inputs that are packed together; a row of a weight is padded to a multiple of it


class IntegerWeight(NamedTuple):
    """A weight of O outputs and I inputs, packed for kernels: element (o, i) is (number - zero) * scale.

    `values_OB`: uint8. With 8 bits a row has one byte for each input. With 4 bits, byte b of each UNIT of a row has
    input b in its low four bits, and input b + UNIT / 2 in the others: a kernel gets two tiles of neighbours from one.
    `scales_GO`: floating-point numbers, one for each `group` inputs. `zeros_GO`: uint8; None: all are half of the
    range, 8 or 128.
    """

    values_OB: Tensor
    scales_GO: Tensor
    zeros_GO: Tensor | None
    bits: int
    num_in: int
    group: int
