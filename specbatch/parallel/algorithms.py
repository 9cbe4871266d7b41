"""The algorithms that add tensors over GPUs, and the choice between them by size.

- `one_shot`: each GPU sends its tensor to all others and adds the tensors that it gets, in the order of ranks. This is
  one step; for more than two GPUs it sends many bytes.
- `copied`: copy engines send. It begins later, but multiprocessors are free for another pass. Two GPUs send their
  tensors, as in `one_shot`. More GPUs send parts, as in `two_shot`.
- `two_shot`: each GPU adds one part, in the same order, and reads the sums of the others' parts. This is two steps with
  few bytes.
- `nccl`: NCCL adds, in an order that it chooses by the size and the element's position. It is the fastest for many
  bytes.
- `gather`: each GPU gets all tensors by NCCL, and adds them in the order of ranks.
"""

from __future__ import annotations

import sys
from typing import Literal, NamedTuple

import torch

Algorithm = Literal["one_shot", "copied", "two_shot", "nccl", "gather"]


class Limits(NamedTuple):
    """The largest tensor, in bytes, that each algorithm adds. `exchange`: the largest part that `one_shot` sends to
    each other GPU in a gather, or in a scatter of sums. `alignment`: a sum by `copied` has a multiple of these bytes.
    """

    one_shot: int
    two_shot: int
    exchange: int
    copied: int = 0
    alignment: int = 1


_KIB, _MIB = 1024, 1024**2
# Limits by the number of GPUs. Those for two were measured on H100s (docs/bench/2026-11-25-h100x2-one-shot.json):
# one_shot takes half the time of nccl up to 4 MiB, and 0.8 of it at 64 MiB. So were those for four
# (docs/bench/2026-11-28-h100x4-ranks.json): one_shot is the fastest up to 256 KiB, and from 1 to 4 MiB two_shot takes
# 0.8 to 1.0 of nccl (1.1 at 512 KiB). On H200s one_shot is the fastest up to 512 KiB, but not where the norm comes with
# the sum (docs/bench/2026-11-28-h200x4-ranks.json). Those for eight are not measured: they are the sizes at which other
# engines change the algorithm on one host with NVLink. Other numbers of GPUs have no limits, because torch's two-shot
# kernel would give each of their ranks other bits: its order of additions differs from rank to rank. An exchange sends
# each GPU only what it needs, whatever their number, so one piece of an inbox goes by one_shot.
LIMITS = {
    1: Limits(128 * _MIB, 128 * _MIB, 128 * _MIB),  # only tests use one GPU; torch has no two-shot sum for it
    2: Limits(128 * _MIB, 128 * _MIB, 128 * _MIB),
    4: Limits(256 * _KIB, 4096 * _KIB, 8 * _MIB),
    8: Limits(128 * _KIB, 2048 * _KIB, 4 * _MIB),
}
_TWO_PASSES_ONE_SHOT = 512 * _KIB
_ANY = sys.maxsize
# Larger tensors are sent in pieces. A GPU has room for two pieces from each GPU, which are 64 MiB in all.
_LARGEST_PIECE, _INBOX = 16 * _MIB, 64 * _MIB
MAILBOX_BYTES = 64 * _MIB  # the room of a GPU for one piece of each other GPU that `copied` sends
DTYPES = (torch.bfloat16, torch.float32)  # the dtypes that the kernels add
ALIGNMENT = 16  # bytes: the kernels' widest load. Torch's kernels refuse less than 4, and are slow below 16


def limits_for(size: int, *, two_passes: bool) -> Limits | None:
    """Return the limits for a group of `size` GPUs. Return None if torch's kernels and ours do not add for this number.

    `two_passes`: two forward passes run at the same time. Then a one-shot sum has few programs and takes turns with the
    kernels of the other pass, so copy engines or NCCL add large tensors."""
    limits = LIMITS.get(size)
    if limits is None or not two_passes:
        return limits
    one_shot = min(limits.one_shot, _TWO_PASSES_ONE_SHOT)
    two_shot = one_shot if limits.two_shot == limits.one_shot else limits.two_shot
    copied = 0 if size == 1 else _ANY  # only tests use one GPU
    alignment = ALIGNMENT if size == 2 else ALIGNMENT * size
    return Limits(one_shot, two_shot, min(limits.exchange, _TWO_PASSES_ONE_SHOT), copied, alignment)


def algorithm_for(num_bytes: int, dtype: torch.dtype, limits: Limits | None, *, fixed_order: bool) -> Algorithm:
    """Choose the algorithm for a tensor. `limits`: the limits of the group, see `limits_for`. `fixed_order`: the bits
    of an element must not depend on the tensor's size, so `one_shot` also adds large tensors, in pieces."""
    if limits is None or not _is_added_by_kernels(num_bytes, dtype):
        return "gather" if fixed_order else "nccl"
    if fixed_order or num_bytes <= limits.one_shot:
        return "one_shot"
    if num_bytes <= limits.two_shot:
        return "two_shot"
    return "copied" if num_bytes <= limits.copied and num_bytes % limits.alignment == 0 else "nccl"


def exchange_for(num_bytes: int, dtype: torch.dtype, limits: Limits | None) -> Algorithm:
    """Choose the algorithm for an exchange in which each rank sends a part of `num_bytes` to each other one. All of
    them give the same bits."""
    if limits is None or not _is_added_by_kernels(num_bytes, dtype):
        return "nccl"
    if num_bytes <= limits.exchange:
        return "one_shot"
    return "copied" if num_bytes <= limits.copied else "nccl"


def _is_added_by_kernels(num_bytes: int, dtype: torch.dtype) -> bool:
    return dtype in DTYPES and num_bytes % ALIGNMENT == 0


def inbox_capacity(size: int) -> int:
    """Return the bytes of the largest tensor that `one_shot` sends in one piece, in a group of `size` GPUs."""
    return min(_LARGEST_PIECE, _INBOX // (2 * size)) if size in LIMITS else 0


def buffer_bytes(limits: Limits | None) -> int:
    """Return the bytes of the memory in which `two_shot` adds."""
    return 0 if limits is None or limits.two_shot <= limits.one_shot else limits.two_shot
