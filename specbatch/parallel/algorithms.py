"""Which algorithm adds tensors of GPUs, by their size.

- `one_shot`: each GPU sends its tensor to all others and adds what it gets, in the order of ranks. One step; for more
  than two GPUs, many bytes.
- `copied`: the same for two GPUs, by copy engines: slower to begin, but multiprocessors are free for another pass.
- `two_shot`: each GPU adds a part, in the same order, and reads the sums of the others' parts. Two steps, few bytes.
- `nccl`: by the library, in an order that it chooses by size and place: fastest for many bytes.
- `gather`: each GPU gets all tensors by NCCL, and adds them in the order of ranks.
"""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple

import torch

Algorithm = Literal["one_shot", "copied", "two_shot", "nccl", "gather"]


class Limits(NamedTuple):
    """Largest tensors, in bytes."""

    one_shot: int
    two_shot: int
    copied: int = 0


_KIB, _MIB = 1024, 1024**2
# By number of GPUs. Two: measured on H100s (docs/bench/2026-11-25-h100x2-one-shot.json). one_shot takes half the time
# of nccl up to 4 MiB, and 0.8 of it at 64 MiB. Four and eight: not measured, first values from the sizes at which
# others change over on one host with NVLink. Torch's two-shot kernel for other numbers of GPUs adds in an order that
# differs from rank to rank, so that ranks would get different bits.
LIMITS = {
    1: Limits(128 * _MIB, 128 * _MIB),  # for tests on one GPU: torch has no two-shot sum for it
    2: Limits(128 * _MIB, 128 * _MIB),
    4: Limits(256 * _KIB, 4096 * _KIB),
    8: Limits(128 * _KIB, 2048 * _KIB),
}
_TWO_PASSES_ONE_SHOT = 512 * _KIB
_ANY = sys.maxsize
_INBOX = 16 * _MIB  # larger tensors are added in pieces; a GPU has room for two such pieces of each GPU
MAILBOX = 64 * _MIB  # the same for `copied`, with room for one piece
_DTYPES = (torch.bfloat16, torch.float32)  # that the kernels add
ALIGNMENT = 16  # bytes: their widest load. Torch's refuse less than 4, and are slow below 16


def limits_for(size: int, *, two_passes: bool) -> Limits | None:
    """Of a group of `size` GPUs. None: torch's kernels and ours do not add for this number. `two_passes`: two of them
    run at the same time. Then a one-shot sum has few programs, and takes turns with what the other pass computes: large
    tensors are left to copy engines, or to NCCL."""
    limits = LIMITS.get(size)
    if limits is None or not two_passes:
        return limits
    one_shot = min(limits.one_shot, _TWO_PASSES_ONE_SHOT)
    two_shot = one_shot if limits.two_shot == limits.one_shot else limits.two_shot
    return Limits(one_shot, two_shot, _ANY if size == 2 else 0)


def algorithm_for(num_bytes: int, dtype: torch.dtype, limits: Limits | None, *, fixed_order: bool) -> Algorithm:
    """`limits`: of the group, see `limits_for`. `fixed_order`: an element's bits may not depend on how many others
    there are: then large tensors are added by `one_shot`, too, in pieces."""
    if limits is None or dtype not in _DTYPES or num_bytes % ALIGNMENT:
        return "gather" if fixed_order else "nccl"
    if fixed_order or num_bytes <= limits.one_shot:
        return "one_shot"
    if num_bytes <= limits.two_shot:
        return "two_shot"
    return "copied" if num_bytes <= limits.copied else "nccl"


def inbox_capacity(limits: Limits | None) -> int:
    """Bytes of the largest tensor that is added by `one_shot` at once."""
    return 0 if limits is None else min(limits.one_shot, _INBOX)


def buffer_bytes(limits: Limits | None) -> int:
    """Of the memory in which `two_shot` adds."""
    return 0 if limits is None or limits.two_shot <= limits.one_shot else limits.two_shot
