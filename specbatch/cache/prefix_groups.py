"""Groups of sequences of a batch that share their first pages, and the table in which the device reads them.

Full pages of a prompt are shared between requests (`prefix.py`), so page lists show what sequences share. A sequence is
in one group at most: of nested groups, the ones that save the most reading are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbatch.batch import PREFIX_UNIT, PrefixGroups
from specbatch.cache.cascade_costs import CascadeCosts

MAX_GROUPS = 256


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The smallest group, and the smallest batch (padding included) whose rounds read groups. `costs`: the model that
    leaves out groups without gain; None: all groups are used."""

    min_sequences: int = 4
    min_tokens: int = 256  # tokens that the sequences share
    min_batch: int = 1
    costs: CascadeCosts | None = None


class Group(NamedTuple):
    """Sequences, by index, and the tokens that they share."""

    members: Sequence[int] | NDArray[np.int32]
    tokens: int

    @property
    def saved(self) -> int:
        """The number of tokens that need not be read."""
        return (len(self.members) - 1) * self.tokens


class _Node:
    """Sequences that share their first `depth` units of pages: those of `parent`, then `edge`."""

    __slots__ = ("below", "best", "children", "depth", "edge", "group", "is_group", "members", "parent")

    def __init__(self, parent: _Node | None, edge: tuple[int, ...], depth: int) -> None:
        self.parent, self.edge, self.depth = parent, edge, depth
        self.children: dict[tuple[int, ...], _Node] = {}  # the key is the pages of the edge's first unit
        self.members: dict[int, None] = {}
        self.below = 0  # tokens that the children's best groups save
        self.best = 0  # tokens that the best groups of these sequences save
        self.is_group = False  # True: the best is one group of all these sequences
        self.group: Group | None = None  # made by `groups`; None: not made since the last change


class GroupTree:
    """A radix tree of the sequences' pages, where each sequence is a number. The cost of a change depends on the number
    of the sequence's pages, not on the number of sequences."""

    def __init__(self, page_size: int, limits: GroupLimits) -> None:
        self._unit = math.lcm(page_size, PREFIX_UNIT)
        self._unit_pages = self._unit // page_size
        self._min_sequences, self._min_tokens = limits.min_sequences, max(limits.min_tokens, self._unit)
        self._root = _Node(None, (), 0)
        self._ends: dict[int, _Node] = {}

    def __contains__(self, member: int) -> bool:
        return member in self._ends

    def add(self, member: int, pages: Sequence[int]) -> None:
        """Add a sequence. `pages`: its full pages, whose slots are all computed."""
        assert member not in self._ends, member
        width = self._unit_pages
        rest = tuple(pages[: len(pages) // width * width])
        node = self._root
        node.members[member] = None
        while rest:
            child = node.children.get(rest[:width])
            if child is None:
                child = _Node(node, rest, node.depth + len(rest) // width)
                node.children[rest[:width]] = child
            common = self._common_pages(child.edge, rest)
            if common < len(child.edge):
                child = self._split(child, common)
            child.members[member] = None
            node, rest = child, rest[common:]
        self._ends[member] = node
        while node.parent is not None:
            node = self._counted(node)

    def remove(self, member: int) -> None:
        node = self._ends.pop(member)
        while node.parent is not None:
            del node.members[member]
            if not node.members:
                del node.parent.children[node.edge[: self._unit_pages]]
            node = self._counted(node)
        del node.members[member]

    def groups(self) -> list[Group]:
        """Return at most MAX_GROUPS groups. The first saves the most."""
        found, nodes = [], [self._root]
        for node in nodes:  # the list grows in the loop
            if node.is_group:
                if node.group is None:
                    members = np.fromiter(node.members, np.int32, len(node.members))
                    node.group = Group(members, node.depth * self._unit)
                found.append(node.group)
            else:
                nodes += [child for child in node.children.values() if child.best]
        return sorted(found, key=lambda group: -group.saved)[:MAX_GROUPS]

    def _split(self, child: _Node, pages: int) -> _Node:
        """Insert a node after the first `pages` pages of `child`'s edge, and return it."""
        parent, width = child.parent, self._unit_pages
        assert parent is not None
        middle = _Node(parent, child.edge[:pages], parent.depth + pages // width)
        middle.members, middle.below, middle.best = dict(child.members), child.best, child.best
        parent.children[child.edge[:width]] = middle
        child.parent, child.edge = middle, child.edge[pages:]
        middle.children[child.edge[:width]] = child
        return middle

    def _counted(self, node: _Node) -> _Node:
        """Decide again whether a node's sequences are one group or the groups of its children. Return its parent."""
        parent, tokens, count = node.parent, node.depth * self._unit, len(node.members)
        assert parent is not None
        saved = (count - 1) * tokens if count >= self._min_sequences and tokens >= self._min_tokens else 0
        node.is_group = saved > 0 and saved >= node.below
        best = saved if node.is_group else node.below
        parent.below += best - node.best
        node.best, node.group = best, None
        return parent

    def _common_pages(self, a: tuple[int, ...], b: tuple[int, ...]) -> int:
        """Return the number of pages in the whole units that both begin with. It searches by bisection, because slices
        are compared fast."""
        width = self._unit_pages
        if a == b[: len(a)]:
            return len(a)
        low, high = 0, min(len(a), len(b)) // width
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if a[: middle * width] == b[: middle * width] else (low, middle - 1)
        return low * width


class GroupTable:
    """The groups of one batch in device memory, at an address that captured graphs hold. `limits`: the limits for its
    groups."""

    def __init__(self, max_batch_size: int, limits: GroupLimits, device: torch.device) -> None:
        self.limits = limits
        self._sizes = [MAX_GROUPS] * 3 + [max_batch_size] * 2
        self._written: list[Group] = []
        self._packed = np.zeros(sum(self._sizes), dtype=np.int32)
        self._buffer = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        self._groups = PrefixGroups(*self._buffer.split(self._sizes))

    @property
    def written(self) -> list[Group]:
        return self._written

    def of_batch(self, size: int) -> PrefixGroups | None:
        """Return the groups that a round of `size` sequences reads, padding included. Return None if such rounds read
        no groups."""
        return self._groups.of_batch(size) if size >= self.limits.min_batch else None

    def write(self, groups: list[Group], upload: Callable[[np.ndarray], Tensor]) -> None:
        """Write the groups of the next round. `upload`: copies an array to the device, in order with launches."""
        if groups is self._written:
            return
        packed = self._pack(groups)
        if not np.array_equal(packed, self._packed):
            self._buffer.copy_(upload(packed))
        self._written, self._packed = groups, packed

    def _pack(self, groups: list[Group]) -> np.ndarray:
        buffer = np.zeros(sum(self._sizes), dtype=np.int32)
        if groups:
            sizes, firsts, tokens, members, tokens_of = np.split(buffer, np.cumsum(self._sizes[:-1]))
            count, together = len(groups), np.concatenate([group.members for group in groups])
            sizes[:count] = [len(group.members) for group in groups]
            firsts[1:count] = np.cumsum(sizes[: count - 1])
            tokens[:count] = [group.tokens for group in groups]
            members[: len(together)] = together
            tokens_of[together] = np.repeat(tokens[:count], sizes[:count])
        return buffer
