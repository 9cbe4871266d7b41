"""The prefix index: which full pages of tokens are in the cache already (a radix tree with one page an edge).

A node stands for one full page after a given path of pages, so two rows share exactly the pages up to the first one in
which their tokens differ. The index holds one reference to each of its pages; a page that nobody else holds can be
evicted, leaves first, least recently used first.

`lookahead` is 1 where the draft's keys and values at a slot depend on the *next* token too (EAGLE pairs the feature of
position i with token i + 1): then a page is shared only between rows that agree on the token behind it as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from specbatch.cache.pages import PagePool


class _Node:
    __slots__ = ("children", "key", "last_used", "page", "parent")

    def __init__(self, key: tuple[int, ...], page: int, parent: _Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[tuple[int, ...], _Node] = {}
        self.last_used = 0


class PrefixIndex:
    """Maps token prefixes to pages of `pool`."""

    def __init__(self, pool: PagePool, lookahead: int = 0) -> None:
        self._pool = pool
        self._lookahead = lookahead
        self._root = _Node((), -1, None)
        self._clock = 0
        self._num_pages = 0

    def __len__(self) -> int:
        """Pages held."""
        return self._num_pages

    def key(self, tokens: Sequence[int], page_number: int) -> tuple[int, ...] | None:
        """What identifies the `page_number`-th page of `tokens`, or None where the tokens do not fill it."""
        size = self._pool.page_size
        end = (page_number + 1) * size + self._lookahead
        return tuple(tokens[page_number * size : end]) if end <= len(tokens) else None

    def _walk(self, tokens: Sequence[int], limit: int) -> Iterator[_Node]:
        node, number = self._root, 0
        while number < limit:
            key = self.key(tokens, number)
            child = node.children.get(key) if key is not None else None
            if child is None:
                return
            yield child
            node, number = child, number + 1

    def match(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Pages that hold the longest cached prefix of `tokens`, `max_tokens` at most; each gains a reference."""
        self._clock += 1
        pages = []
        for node in self._walk(tokens, max_tokens // self._pool.page_size):
            node.last_used = self._clock
            pages.append(node.page)
        self._pool.retain(pages)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], num_computed: int) -> None:
        """Offer the full pages among the first `num_computed` slots of a sequence; those already known are kept as
        they are."""
        self._clock += 1
        node = self._root
        for number in range(min(num_computed // self._pool.page_size, len(pages))):
            key = self.key(tokens, number)
            if key is None:
                return
            child = node.children.get(key)
            if child is None:
                child = _Node(key, pages[number], node)
                node.children[key] = child
                self._pool.retain([pages[number]])
                self._num_pages += 1
            child.last_used = self._clock
            node = child

    def num_evictable(self) -> int:
        """Pages that eviction could free: nobody but the index holds them."""
        # A page below one in use is itself evictable, and a page above one in use is in use too (every holder of a
        # page holds its whole path), so counting single pages is exact.
        return sum(self._pool.refs(node.page) == 1 for node in self._nodes())

    def evict(self, count: int) -> int:
        """Free up to `count` pages, least recently used first; returns how many."""
        heap = [(n.last_used, id(n), n) for n in self._nodes() if not n.children and self._pool.refs(n.page) == 1]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < count:
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            self._pool.release([node.page])
            self._num_pages -= 1
            freed += 1
            if parent is not self._root and not parent.children and self._pool.refs(parent.page) == 1:
                heapq.heappush(heap, (parent.last_used, id(parent), parent))
        return freed

    def pages(self) -> list[int]:
        return [node.page for node in self._nodes()]

    def _nodes(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        nodes = list(self._nodes())
        assert len(nodes) == self._num_pages, f"{len(nodes)} nodes, {self._num_pages} counted"
        assert len({n.page for n in nodes}) == len(nodes), "one page stands at two places of the index"
        for node in nodes:
            assert self._pool.refs(node.page) >= 1, f"the index points at free page {node.page}"
            for key, child in node.children.items():
                assert child.key == key, f"page {child.page} is filed under another key"
                assert child.parent is node, f"page {child.page} has a wrong parent"
