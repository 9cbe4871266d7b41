"""How the parts of a model are divided among ranks. Pure arithmetic.

A rank is one of `size` processes that compute a model together; `shares[rank]` is what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Of the attention's heads, each a run of consecutive ones. Every query head of a rank reads a key/value head of
    the same rank, and each of the rank's key/value heads serves equally many query heads."""

    query: range
    kv: range


def even_shares(total: int, size: int) -> list[range]:
    """`total` items for `size` ranks; the first ranks get one more where they do not divide."""
    each, rest = divmod(total, size)
    ends = [rank * each + min(rank, rest) for rank in range(size + 1)]
    return [range(ends[rank], ends[rank + 1]) for rank in range(size)]


def head_shares(num_heads: int, num_kv_heads: int, size: int) -> list[HeadShare]:
    """Whole groups (a key/value head with its query heads) while there are at least as many as ranks. With fewer, ranks
    that share a group divide its query heads, and each holds a copy of its key/value head.

    `num_heads` is a multiple of `num_kv_heads`. Raises ValueError where a rank would have no query head.
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
