"""The random numbers of `specbatch.draft.rng`, one after the other in plain Python."""

from __future__ import annotations

from specbatch.draft.rng import Draw
from specbatch.types import RngKey

_MASK = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox on 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(rng: RngKey, position: int, kind: Draw) -> float:
    """A draw from [0, 1) with 53 bits."""
    counter = (
        position & _MASK,
        (rng.sample << 8 | kind) & _MASK,
        rng.stream & _MASK,
        rng.stream >> 32 & _MASK,
    )
    high, low, _, _ = philox4x32(counter, (rng.seed & _MASK, rng.seed >> 32 & _MASK))
    return ((high << 32 | low) >> 11) * 2.0**-53
