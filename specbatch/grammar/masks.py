"""Masks of tokens: token t is in it if bit t % 32 of word t // 32 is set."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def only_token(mask_W: NDArray[np.int32]) -> int | None:
    """Return the token of a mask that has exactly one token, else None."""
    if np.count_nonzero(mask_W) != 1:
        return None
    index = int(mask_W.argmax() if mask_W.max() > 0 else mask_W.argmin())
    word = int(mask_W.view(np.uint32)[index])
    return 32 * index + word.bit_length() - 1 if word & (word - 1) == 0 else None
