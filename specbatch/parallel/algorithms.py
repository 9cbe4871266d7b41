"""Which algorithm adds tensors of GPUs, by their size.

- `one_shot`: each GPU reads the tensors of all others and adds them in the order of ranks. One step, many bytes.
- `two_shot`: each GPU adds a part, in the same order, and reads the sums of the others' parts. Two steps, few bytes.
- `nccl`: by the library, in an order that it chooses by size and place: fastest for many bytes.
- `gather`: each GPU gets all tensors by NCCL, and adds them in the order of ranks.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Algorithm = Literal["one_shot", "two_shot", "nccl", "gather"]


class Limits(NamedTuple):
    """Largest tensors, in bytes."""

    one_shot: int
    two_shot: int


_KIB = 1024
# By number of GPUs. Two: measured on H100s (docs/bench/2026-11-25-h100x2-sums.json). To 64 KiB two_shot takes 14 us,
# all others 9. At 1 MiB one_shot takes 17 us and nccl 16, at 4 MiB two_shot 30 and nccl 36, at 8 MiB nccl wins. Four
# and eight: not measured, first values from the sizes at which others change over on one host with NVLink. Torch's
# kernels for other numbers of GPUs add in an order that differs from rank to rank, so that ranks would get different
# bits.
LIMITS = {
    1: Limits(1024 * _KIB, 4096 * _KIB),  # for tests on one GPU
    2: Limits(1024 * _KIB, 4096 * _KIB),
    4: Limits(256 * _KIB, 4096 * _KIB),
    8: Limits(128 * _KIB, 2048 * _KIB),
}
_DTYPES = (torch.bfloat16, torch.float32)  # that torch's kernels add
ALIGNMENT = 16  # bytes: their widest load. They refuse less than 4, and are slow below 16


def algorithm_for(num_bytes: int, dtype: torch.dtype, size: int, *, fixed_order: bool) -> Algorithm:
    """`size`: GPUs. `fixed_order`: an element's bits may not depend on how many others there are: then large tensors
    are added by `one_shot`, too, in pieces."""
    limits = LIMITS.get(size)
    if limits is None or dtype not in _DTYPES or num_bytes % ALIGNMENT:
        return "gather" if fixed_order else "nccl"
    if fixed_order or num_bytes <= limits.one_shot:
        return "one_shot"
    return "two_shot" if num_bytes <= limits.two_shot else "nccl"


def buffer_bytes(size: int) -> int:
    """Of the memory that all GPUs of a group can read."""
    return LIMITS[size].two_shot if size in LIMITS else 0
