"""Inputs of a linear layer in FP8 (E4M3: 4 bits of exponent, 3 of mantissa, at most 448)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-12  # the scale of a token whose features are all 0
GROUP = 128  # the features of an input that share a scale, if weights have blocks


class Quantised(NamedTuple):
    """Quantised inputs. The input is `values_TI` times its scale. Scales are float32: (T, 1), or (T, G) with a scale
    for each GROUP of features."""

    values_TI: Tensor
    scale_TG: Tensor
