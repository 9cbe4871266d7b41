"""The limits of the tensor memory accelerator (TMA), which copies tiles from global to shared memory."""

from __future__ import annotations

_WARP_GROUP = 4  # warps that start a matrix product on Hopper's tensor cores together


def can_use_tma(num_warps: int, *, to_registers: bool) -> bool:
    """Return whether a loop of a kernel may read its tiles of weights by TMA. `to_registers`: the warps copy a tile
    from shared memory to registers before they multiply it, because it is reshaped or converted.

    Triton 3.6 does not make the next copy into the same shared memory wait for the warps that read it. The warps of one
    group wait for each other when they start a product. Two groups do not: with 8 warps some sums were wrong, and
    others in each run (H200, bfloat16 and float16, gate and up of experts).
    """
    return not to_registers or num_warps <= _WARP_GROUP
