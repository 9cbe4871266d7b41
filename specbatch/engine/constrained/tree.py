"""Draft trees under grammars, on the host: which nodes a grammar forbids, which tokens it forces, and what may come
after each node. `check.py` says which nodes need a mask.

A forbidden node is not verified, nor are those after it. Where only one token may come next, and no draft has it, the
token becomes a node: it is sure to be accepted, whatever the model says. So a whole span that the grammar forces is
committed in one round, with any draft method.

Shape suffixes: W words of a mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbatch.engine.constrained.state import GrammarState
from specbatch.matcher import Walk

_FORCED = -1  # the index of a node that is not a draft


@dataclass(slots=True)
class GrammarTree:
    """A draft tree without what the grammar forbids, and with what it forces. Node 0 is the root, and a parent comes
    before its children."""

    tokens: list[int]
    parents: list[int]  # -1: the root
    drafts: list[int]  # the node of the draft tree; below 0: the grammar forces it, or most likely does
    # The only token that may come after each node, or FREE, or ODD. None: it is not known.
    forced: list[int | None]
    # Of a chain that ends before its drafts do: the token of the next draft, which the grammar forbids.
    forbidden: list[int]

    @staticmethod
    def of(tokens: Sequence[int], parents: Sequence[int] | None) -> GrammarTree:
        """Copy a draft tree without changes. `parents` None: it is a chain."""
        count = len(tokens)
        chain = range(-1, count - 1)
        return GrammarTree(
            list(tokens), list(chain if parents is None else parents), list(range(count)), [None] * count, []
        )

    def add(self, token: int, parent: int, draft: int) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.drafts.append(draft)
        self.forced.append(None)

    def add_forced(self, state: GrammarState, node: int, most: int) -> int:
        """Add the forced tokens after a node, where the state is; return their number. They are asked for once, because
        the library makes tokens of the whole forced text each time. The masks of the later ones are computed."""
        tokens = state.forced(most)
        end = next((i + 1 for i, token in enumerate(tokens) if state.is_end(token)), len(tokens))
        self.forced[node] = tokens[0] if tokens else None
        for token in tokens[:end]:
            self.add(token, node, _FORCED)
            node = len(self.tokens) - 1
        return end

    def known(self, node: int) -> int | None:
        """The token that alone may come after a node, where it is known."""
        token = self.forced[node]
        return None if token is None or token < 0 else token

    @property
    def num_drafts(self) -> int:
        return sum(draft > 0 for draft in self.drafts)


def grow(
    state: GrammarState,
    tokens: Sequence[int],
    parents: Sequence[int] | None,
    max_nodes: int,
    max_depth: int,
    *,
    all_sure: bool = False,
) -> GrammarTree:
    """Grow a draft tree under the grammar. `tokens`, `parents`: the tree (node 0: the root; None: a chain). The state
    is after the root, before and after the call. Forced nodes are added up to `max_nodes` nodes in all, and down to
    `max_depth`. `all_sure`: in a chain, every forced token is sure to be accepted, not only the first; this takes
    longer."""
    if parents is None:
        return _grow_chain(state, tokens, max_nodes, max_depth, all_sure)
    children: list[list[int]] = [[] for _ in tokens]
    sizes = [1] * len(tokens)  # number of nodes of each subtree
    for node in range(len(tokens) - 1, 0, -1):
        children[parents[node]].insert(0, node)
        sizes[parents[node]] += sizes[node]
    tree = GrammarTree([], [], [], [], [])
    num_left = len(tokens)  # draft nodes that are not decided yet
    # What is to be added: (parent, token, draft, depth). None: the state goes back to where the parent's token led.
    stack: list[tuple[int, int, int, int] | None] = [(-1, tokens[0], 0, 0)]
    while stack:
        if (item := stack.pop()) is None:
            state.back(1)
            continue
        parent, token, draft, depth = item
        node = len(tree.tokens)
        tree.add(token, parent, draft)
        if node and state.is_end(token):
            num_left -= sizes[draft] if draft >= 0 else 0
            continue
        drafts = children[draft] if draft >= 0 else []
        num_left -= draft >= 0
        if not drafts and (depth >= max_depth or node + 1 + num_left >= max_nodes):
            continue  # nothing comes after it
        if node and not state.enter(token):  # nothing comes after it
            num_left -= sum(sizes[d] for d in drafts)
            continue
        if node:
            stack.append(None)
        legal = [d for d in drafts if state.allows(tokens[d])]
        if len(legal) < len(drafts):
            num_left -= sum(sizes[d] for d in drafts) - sum(sizes[d] for d in legal)
        stack += [(node, tokens[d], d, depth + 1) for d in reversed(legal)]
        if not legal and depth < max_depth and node + 1 + num_left < max_nodes:
            tree.add_forced(state, node, min(max_depth - depth, max_nodes - node - 1 - num_left))
    return tree


def _grow_chain(
    state: GrammarState, tokens: Sequence[int], max_nodes: int, max_depth: int, all_sure: bool
) -> GrammarTree:
    """Grow a chain: the result is that of the walk over a tree, in fewer steps."""
    drafts = tokens[1:]
    num_entered = num_legal = state.enter_all(drafts)
    has_ended = num_legal < len(drafts) and state.is_end(drafts[num_legal]) and state.allows(drafts[num_legal])
    num_legal += has_ended
    count = num_legal + 1
    tree = GrammarTree.of(tokens[:count], None)
    while not has_ended and (room := min(max_nodes, max_depth + 1) - len(tree.tokens)) > 0:
        if len(tree.tokens) > count:
            if not state.enter(tree.tokens[-1]):
                break
            num_entered += 1
        if not tree.add_forced(state, len(tree.tokens) - 1, 1 if all_sure else room) or not all_sure:
            break
        has_ended = state.is_end(tree.tokens[-1])
    if len(tree.tokens) == count <= len(drafts):
        tree.forbidden = [drafts[num_legal]]
    state.back(num_entered)
    return tree


def write_masks(wanted: Sequence[tuple[GrammarState, GrammarTree, Sequence[int]]], masks_KW: NDArray[np.int32]) -> int:
    """The masks of these nodes, one tree after the other. Each state is after the root, or where `choose` led it, which
    is at a node before all of these or at the first of them. Returns the number of masks that were computed, all at
    once; where only one token may come, nothing has to be."""
    walks: list[tuple[GrammarState, Walk]] = []
    start = 0
    for state, tree, nodes in wanted:
        walks += [(state, walk) for walk in _walks(state, tree, nodes, start, masks_KW)]
        start += len(nodes)
    GrammarState.write_masks(walks, masks_KW)
    return sum(len(walk.tokens) + 1 for _, walk in walks)


def _walks(
    state: GrammarState, tree: GrammarTree, nodes: Sequence[int], start: int, masks_KW: NDArray[np.int32]
) -> Iterator[Walk]:
    """Walk to each of these nodes whose mask must be computed; known masks are written at once. Nodes that follow each
    other share one walk. If the matcher fails at a node, nothing may come after it."""
    first = 0
    while first < len(nodes):
        node = nodes[first]
        if (token := tree.known(node)) is not None:
            state.write_forced(token, masks_KW[start + first])
            first += 1
            continue
        end = first + 1
        while end < len(nodes) and nodes[end] == nodes[end - 1] + 1 and tree.parents[nodes[end]] == nodes[end - 1]:
            if tree.known(nodes[end]) is not None:
                break
            end += 1
        tokens = [tree.tokens[other] for other in nodes[first + 1 : end]]
        walk = state.walk(_path(tree, node)[state.num_ahead :], tokens, start + first)
        if walk is not None:
            yield walk
        else:
            masks_KW[start + first : start + end] = 0
        first = end


def _path(tree: GrammarTree, node: int) -> list[int]:
    """The tokens that lead to a node, without the root's."""
    path = []
    while node > 0:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]
