"""Random numbers that depend on nothing but what they are for: Philox4x32-10 (Salmon et al., SC 2011), counter based.

Key: the 64-bit seed. Counter: token position, kind of draw and sample number, stream low, stream high (`RngKey`). So a
draw does not depend on the batch, the schedule, a preemption or a restart. `kernels.torch.sampling.uniform` computes
the same numbers in tensors.
"""

from __future__ import annotations

from enum import IntEnum

from specbatch.types import RngKey

_MASK = 0xFFFFFFFF


class Draw(IntEnum):
    """What a draw decides about the token at its position. All draws are independent."""

    SAMPLE = 0  # the token itself, drawn from the target's distribution
    DRAFT = 1  # the token that the draft network drafts
    ACCEPT = 2  # whether this draft is accepted
    RESIDUAL = 3  # the token instead of a rejected draft


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
