"""Weights as whole numbers of 4 or 8 bits, of which some inputs of an output share a scale and a zero point."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

UNIT = 256  # inputs that are packed together; a row of a weight is padded to a multiple of it


class IntegerWeight(NamedTuple):
    """A weight of O outputs and I inputs, packed for kernels: element (o, i) is (number - zero) * scale.

    `words_OW`: int16. A word holds P = 16 / `bits` numbers, the first one in the lowest bits. Word w of each UNIT of a
    row has the inputs w, w + UNIT / P, w + 2 UNIT / P and so on: a kernel gets P tiles of neighbours from one.
    `scales_GO`: floating-point numbers, one for each `group` inputs. `zeros_GO`: uint8, or float32 where they are no
    whole numbers (GGUF, which stores a minimum); None: all are half of the range, 8 or 128.
    """

    words_OW: Tensor
    scales_GO: Tensor
    zeros_GO: Tensor | None
    bits: int
    num_in: int
    group: int

    @property
    def has_whole_zeros(self) -> bool:
        return self.zeros_GO is None or not self.zeros_GO.is_floating_point()
