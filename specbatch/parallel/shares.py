"""The division of a model's parts among ranks. This is arithmetic only.

A rank is one of `size` processes that compute a model together. `shares[rank]` is the part that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The division of a model among ranks. `tensors`: each rank has a part of every layer (tensor parallelism). `experts`:
# the same, but each rank has whole experts. `requests`: each rank has whole experts, and all of the rest, which it
# computes for requests of its own.
Division = Literal["tensors", "experts", "requests"]


@dataclass(frozen=True, slots=True)
class HeadShare:
    """A rank's heads of attention: consecutive query heads and consecutive key/value heads. Every query head reads a
    key/value head of the same rank, and each of the rank's key/value heads serves the same number of query heads."""

    query: range
    kv: range


def even_shares(total: int, size: int) -> list[range]:
    """Divide `total` items among `size` ranks. If this does not come out even, the first ranks get one more."""
    each, rest = divmod(total, size)
    ends = [rank * each + min(rank, rest) for rank in range(size + 1)]
    return [range(ends[rank], ends[rank + 1]) for rank in range(size)]


def head_shares(num_heads: int, num_kv_heads: int, size: int) -> list[HeadShare]:
    """Divide the heads among ranks. A group is a key/value head with its query heads. If there are at least as many
    groups as ranks, each rank gets whole groups. If there are fewer, several ranks divide the query heads of one group,
    and each of them holds a copy of its key/value head.

    `num_heads` is a multiple of `num_kv_heads`. It raises ValueError if a rank would have no query head.
    """
    per_group = num_heads // num_kv_heads
    if num_kv_heads >= size:
        return [
            HeadShare(range(kv.start * per_group, kv.stop * per_group), kv) for kv in even_shares(num_kv_heads, size)
        ]
    if size > num_heads:
        raise ValueError(f"{num_heads} heads for {size} ranks")
    shares = []
    for kv, ranks in enumerate(even_shares(size, num_kv_heads)):
        if len(ranks) > per_group:
            raise ValueError(f"{per_group} query heads of a key/value head for {len(ranks)} ranks")
        first = kv * per_group
        shares += [
            HeadShare(range(first + part.start, first + part.stop), range(kv, kv + 1))
            for part in even_shares(per_group, len(ranks))
        ]
    return shares
