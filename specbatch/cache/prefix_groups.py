"""Which sequences of a batch have their first pages in common, and where the device reads it.

Full pages of a prompt are shared between requests (`prefix.py`), so what sequences share can be seen from their pages.
A sequence is in one group at most: of nested groups, those are taken that save the most reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbatch.batch import PREFIX_UNIT, PrefixGroups

MAX_GROUPS = 256


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The smallest group. Not measured yet: `scripts/bench/bench_cascade.py` compares."""

    min_sequences: int = 4
    min_tokens: int = 256  # that they share


class Group(NamedTuple):
    """Sequences, by index, and the tokens that they share."""

    members: list[int]
    tokens: int

    @property
    def saved(self) -> int:
        """Tokens that need not be read."""
        return (len(self.members) - 1) * self.tokens


@dataclass(slots=True)
class _Shared:
    """Sequences from `first` on, in order of their pages, that share as many units; and the groups among them."""

    units: int
    first: int
    groups: list[Group] = field(default_factory=list)


class GroupFinder:
    """Finds groups by their pages."""

    def __init__(self, page_size: int, limits: GroupLimits) -> None:
        self._unit = math.lcm(page_size, PREFIX_UNIT)
        self._unit_pages = self._unit // page_size
        self._min_sequences, self._min_tokens = limits.min_sequences, max(limits.min_tokens, self._unit)

    def find(self, pages: Sequence[list[int]]) -> list[Group]:
        """Groups of the sequences with these pages, those that save the most first; MAX_GROUPS at most."""
        order = sorted(range(len(pages)), key=pages.__getitem__)
        open_: list[_Shared] = [_Shared(0, 0)]
        for i in range(1, len(order) + 1):
            units = self._shared_units(pages[order[i - 1]], pages[order[i]]) if i < len(order) else 0
            first = i - 1
            while open_[-1].units > units:
                ended = open_.pop()
                groups, first = self._best(ended, order[ended.first : i]), ended.first
                if open_[-1].units < units:
                    open_.append(_Shared(units, first))
                open_[-1].groups += groups
            if open_[-1].units < units:
                open_.append(_Shared(units, first))
        return sorted(open_[0].groups, key=lambda group: -group.saved)[:MAX_GROUPS]

    def _best(self, shared: _Shared, members: list[int]) -> list[Group]:
        """All of them as one group, or the groups among them."""
        whole = Group(members, shared.units * self._unit)
        if len(members) < self._min_sequences or whole.tokens < self._min_tokens:
            return shared.groups
        return [whole] if whole.saved >= sum(group.saved for group in shared.groups) else shared.groups

    def _shared_units(self, a: list[int], b: list[int]) -> int:
        """Whole units of pages in common at the beginning; by halves, because comparing slices is fast."""
        low, high = 0, min(len(a), len(b)) // self._unit_pages
        while low < high:
            middle = (low + high + 1) // 2
            begin, end = low * self._unit_pages, middle * self._unit_pages
            low, high = (middle, high) if a[begin:end] == b[begin:end] else (low, middle - 1)
        return low


class GroupTable:
    """The groups of one batch in device memory. Captured graphs hold the address. `limits`: of its groups."""

    def __init__(self, max_batch_size: int, limits: GroupLimits, device: torch.device) -> None:
        self.limits = limits
        self._sizes = [MAX_GROUPS] * 3 + [max_batch_size] * 2
        self._written: list[Group] = []
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        self.groups = PrefixGroups(*self._buffer.split(self._sizes))

    @property
    def written(self) -> list[Group]:
        return self._written

    def write(self, groups: list[Group], upload: Callable[[np.ndarray], Tensor]) -> None:
        """`upload`: to the device, in order with what is launched."""
        if groups != self._written:
            self._buffer.copy_(upload(self._packed(groups)))
            self._written = groups

    def _packed(self, groups: list[Group]) -> np.ndarray:
        buffer = np.zeros(sum(self._sizes), dtype=np.int32)
        sizes, firsts, tokens, members, tokens_of = np.split(buffer, np.cumsum(self._sizes[:-1]))
        first = 0
        for i, group in enumerate(groups):
            end = first + len(group.members)
            sizes[i], firsts[i], tokens[i] = len(group.members), first, group.tokens
            members[first:end] = group.members
            tokens_of[group.members] = group.tokens
            first = end
        return buffer
