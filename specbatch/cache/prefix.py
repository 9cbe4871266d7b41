"""The prefix index: the full pages of tokens that are in the cache (a radix tree with one page for each edge).

A node is one full page after a given path of pages, so two requests share exactly the pages up to the first one in
which their tokens differ. The index holds one reference to each of its pages. A page without another owner is *idle*
and can be evicted: leaves first, the least recently used first.

The cache of a GPU can have 100,000 pages, and every step asks for the number that could be evicted, so nothing here
walks over all of them: idle pages are counted as they come and go, and idle leaves wait in a heap.

`lookahead` is 1 where the draft's keys and values at a slot also depend on the *next* token (EAGLE pairs the feature of
position i with token i + 1). Then a page is shared only between requests that have the same token after it.

A request of a hybrid also needs the state after the pages that it takes (`states.py`). So it takes pages only up to one
with a *checkpoint* of the state. There are fewer checkpoints than pages: the least recently used one is overwritten.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from specbatch.cache.pages import PagePool


class _Node:
    __slots__ = ("checkpoint", "children", "is_queued", "key", "last_used", "page", "parent")

    def __init__(self, key: tuple[int, ...], page: int, parent: _Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[tuple[int, ...], _Node] = {}
        self.last_used = 0
        self.is_queued = False  # True: the node has its one entry in the heap
        self.checkpoint: int | None = None  # the line of the state after the page


class PrefixIndex:
    """A map from token prefixes to pages of `pool`. The pool reports unshared pages to it, so a pool has at most one
    index."""

    def __init__(self, pool: PagePool, lookahead: int = 0, checkpoints: Iterable[int] | None = None) -> None:
        """Make an empty index. `checkpoints`: the lines for checkpoints of states; None: requests need no state."""
        self._pool = pool
        self._needs_states = checkpoints is not None
        self._free_checkpoints = list(checkpoints or ())
        self._num_checkpoints = len(self._free_checkpoints)
        self._with_checkpoint: dict[_Node, None] = {}  # nodes
        self._lookahead = lookahead
        self._root = _Node((), -1, None)
        self._nodes: dict[int, _Node] = {}  # page -> node
        self._clock = 0
        self._num_idle = 0  # pages that only the index holds
        # Entries are (last_used, page), and are cleaned lazily: every idle leaf has an entry, whose time can be older
        # than its last use, and other nodes can have an entry that is left over.
        self._heap: list[tuple[int, int]] = []
        assert pool.on_unshared is None, "two indices over one pool"
        pool.on_unshared = self._on_unshared

    def __len__(self) -> int:
        """The number of pages in the index."""
        return len(self._nodes)

    def key(self, tokens: Sequence[int], page_number: int) -> tuple[int, ...] | None:
        """Return the tokens that identify the `page_number`-th page of `tokens`, or None if the tokens do not fill
        it."""
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

    def _usable(self, tokens: Sequence[int], max_tokens: int) -> list[_Node]:
        """Return the nodes of the longest prefix that a request can take."""
        nodes = list(self._walk(tokens, max_tokens // self._pool.page_size))
        while self._needs_states and nodes and nodes[-1].checkpoint is None:
            nodes.pop()
        return nodes

    def match(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Return the pages that hold the longest cached prefix of at most `max_tokens` of `tokens`. Each gets another
        reference."""
        self._clock += 1
        pages = []
        for node in self._usable(tokens, max_tokens):
            node.last_used = self._clock
            self._num_idle -= self._pool.refs(node.page) == 1
            pages.append(node.page)
        self._pool.retain(pages)
        return pages

    def num_cached(self, tokens: Sequence[int], max_tokens: int) -> int:
        """Return the number of tokens that `match` would find. This does not count as a use of their pages."""
        return self._pool.page_size * len(self._usable(tokens, max_tokens))

    def num_known(self, tokens: Sequence[int], max_tokens: int) -> int:
        """Return the number of tokens whose pages are in the index, with a state or without."""
        return self._pool.page_size * sum(1 for _ in self._walk(tokens, max_tokens // self._pool.page_size))

    @property
    def has_checkpoints(self) -> bool:
        return self._num_checkpoints > 0

    def checkpoint_of(self, pages: Sequence[int]) -> int | None:
        """Return the line of the state after these pages, which `match` has returned."""
        return self._nodes[pages[-1]].checkpoint if pages and self._needs_states else None

    def has_checkpoint(self, tokens: Sequence[int], num_tokens: int) -> bool:
        """Return whether there is a state after the first `num_tokens` of `tokens`, which are whole pages."""
        node = self._node_after(tokens, num_tokens)
        return node is not None and node.checkpoint is not None

    def take_checkpoint(self) -> int | None:
        """Return a line for a new checkpoint: a free one, or that of the checkpoint that was not used for the longest
        time, which is no more. Return None if all lines wait for their states."""
        if not self._free_checkpoints:
            if not self._with_checkpoint:
                return None
            self._drop_checkpoint(min(self._with_checkpoint, key=lambda node: node.last_used))
        return self._free_checkpoints.pop()

    def return_checkpoint(self, line: int) -> None:
        """Take a line back that `take_checkpoint` has returned, and that holds no state."""
        self._free_checkpoints.append(line)

    def add_checkpoint(self, tokens: Sequence[int], num_tokens: int, line: int) -> None:
        """Keep the state after the first `num_tokens` of `tokens`. If their last page is not in the index, the line is
        free again."""
        node = self._node_after(tokens, num_tokens)
        if node is None or node.checkpoint is not None:
            self.return_checkpoint(line)
            return
        node.checkpoint = line
        self._with_checkpoint[node] = None

    def _node_after(self, tokens: Sequence[int], num_tokens: int) -> _Node | None:
        nodes = list(self._walk(tokens, num_tokens // self._pool.page_size))
        return nodes[-1] if len(nodes) * self._pool.page_size == num_tokens and nodes else None

    def _drop_checkpoint(self, node: _Node) -> None:
        if node.checkpoint is not None:
            self._free_checkpoints.append(node.checkpoint)
            node.checkpoint = None
            del self._with_checkpoint[node]

    def insert(self, tokens: Sequence[int], pages: Sequence[int], num_computed: int, num_cached: int = 0) -> None:
        """Add the full pages among the first `num_computed` slots of a sequence.

        It stops at the first page whose tokens the index has in another page. Below that page, the sequence's pages
        would prevent its eviction, although no request holds it. The pages of the first `num_cached` slots came from
        the index. If one of them is no longer there, it was forgotten (`forget`), and what was computed from it must
        not be shared either."""
        self._clock += 1
        node = self._root
        for number in range(min(num_computed // self._pool.page_size, len(pages))):
            key = self.key(tokens, number)
            if key is None:
                return
            child = node.children.get(key)
            if child is None:
                if number * self._pool.page_size < num_cached:
                    return
                child = _Node(key, pages[number], node)
                node.children[key] = child
                self._nodes[child.page] = child
                self._pool.retain([child.page])
            elif child.page != pages[number]:
                return
            child.last_used = self._clock
            node = child

    def forget(self, tokens: Sequence[int], pages: Sequence[int], num_cached: int) -> None:
        """Remove a sequence's pages from the index, except those of its first `num_cached` slots, and all pages that
        other sequences have added below them. States that it may have computed are no more, either."""
        node = self._root
        for number, known in enumerate(list(self._walk(tokens, len(pages)))):
            if number * self._pool.page_size >= num_cached:
                self._drop_checkpoint(known)
        for number, page in enumerate(pages):
            key = self.key(tokens, number)
            child = node.children.get(key) if key is not None else None
            if child is None or child.page != page:
                return
            if number * self._pool.page_size >= num_cached:
                self._drop(child)
                return
            node = child

    def _drop(self, top: _Node) -> None:
        """Remove a node and all nodes below it from the index."""
        parent = top.parent
        assert parent is not None
        del parent.children[top.key]
        dropped, queued = [top], set[int]()
        for node in dropped:  # the list grows in the loop
            dropped.extend(node.children.values())
            del self._nodes[node.page]
            self._drop_checkpoint(node)
            self._num_idle -= self._pool.refs(node.page) == 1
            if node.is_queued:
                queued.add(node.page)
        if queued:
            self._heap = [entry for entry in self._heap if entry[1] not in queued]
            heapq.heapify(self._heap)
        self._pool.release(node.page for node in dropped)
        if parent is not self._root:
            self._queue(parent)

    def num_evictable(self) -> int:
        """Return the number of pages that eviction could free: those that only the index holds."""
        # An owner of a page of the index also owns the path above it, so none of these pages is above one in use.
        return self._num_idle

    def evict(self, count: int) -> int:
        """Free up to `count` pages, the least recently used first. Return the number of freed pages."""
        freed = 0
        while self._heap and freed < count:
            last_used, page = heapq.heappop(self._heap)
            node = self._nodes[page]
            node.is_queued = False
            if last_used < node.last_used:
                self._queue(node)
                continue
            # To take a page, or to add another below it, is a use.
            is_idle_leaf = not node.children and self._pool.refs(page) == 1
            assert is_idle_leaf, f"page {page} became busy without being used"
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            del self._nodes[page]
            self._drop_checkpoint(node)
            self._pool.release([page])
            self._num_idle -= 1
            freed += 1
            if parent is not self._root:
                self._queue(parent)
        return freed

    def _queue(self, node: _Node) -> None:
        """Add a node to the heap of pages to evict, if it is an idle leaf and not there yet."""
        if not (node.is_queued or node.children) and self._pool.refs(node.page) == 1:
            heapq.heappush(self._heap, (node.last_used, node.page))
            node.is_queued = True

    def _on_unshared(self, page: int) -> None:
        node = self._nodes.get(page)
        if node is not None:
            self._num_idle += 1
            self._queue(node)

    def pages(self) -> list[int]:
        return list(self._nodes)

    def check_integrity(self) -> None:
        lines = [node.checkpoint for node in self._with_checkpoint] + self._free_checkpoints
        assert len(set(lines)) == len(lines) == self._num_checkpoints, "a checkpoint is lost, or there twice"
        assert all(self._nodes.get(node.page) is node for node in self._with_checkpoint), "a checkpoint of no page"
        queued = {page: last_used for last_used, page in self._heap}
        assert len(queued) == len(self._heap), "a page waits twice for eviction"
        assert queued.keys() <= self._nodes.keys(), "a page that is gone waits for eviction"
        num_idle = num_reached = 0
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            num_reached += 1
            page, refs = node.page, self._pool.refs(node.page)
            assert self._nodes.get(page) is node, f"page {page} is twice in the index, or not at all"
            assert refs >= 1, f"the index points at free page {page}"
            assert node.is_queued == (page in queued), f"page {page} has a wrong mark"
            assert queued.get(page, 0) <= node.last_used, f"page {page} waits for a time to come"
            num_idle += refs == 1
            assert node.children or refs > 1 or node.is_queued, f"page {page} would never be evicted"
            for key, child in node.children.items():
                assert child.key == key, f"page {child.page} is filed under another key"
                assert child.parent is node, f"page {child.page} has a wrong parent"
                assert refs > 1 or self._pool.refs(child.page) == 1, f"{child.page} holds up {page}"
        assert num_reached == len(self._nodes), f"{num_reached} nodes, {len(self._nodes)} known"
        assert num_idle == self._num_idle, f"{num_idle} idle pages, {self._num_idle} counted"
