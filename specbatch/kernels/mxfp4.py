"""The sizes of MXFP4, the format of weights that `kernels/torch/parts/mxfp4.py` describes."""

from __future__ import annotations

MXFP4_GROUP = 32  # the elements of a row of a weight that share a scale
MXFP4_BYTES = 1 / 2 + 1 / MXFP4_GROUP  # the bytes of an element with its part of the scale
