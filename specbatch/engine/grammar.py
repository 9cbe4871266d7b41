"""Draft trees under grammars, on the host: which nodes a grammar forbids, which tokens it forces, and what may come
after each node.

A forbidden node is not verified, nor are those after it. Where only one token may come next, and no draft has it, the
token becomes a node: it is sure to be accepted, whatever the model says. So a whole span that the grammar forces is
committed in one round, with any draft method.

Shape suffixes: W words of a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbatch.types import GrammarMatcher

MAX_FORCED = 15  # nodes that a tree may have in addition to those of its draft shape, where shapes are free
_FORCED = -1  # in place of a draft node's index


class GrammarState:
    """Of a request. `stops`: tokens that end it, `eos` among them. `vocab_size`: of the model."""

    def __init__(self, matcher: GrammarMatcher, eos: Iterable[int], stops: Iterable[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos = frozenset(eos)
        self._stops = self._eos | frozenset(stops)
        self._stop_bits_W = _bits(self._stops, vocab_size)
        self._text_bits_W = _bits(range(vocab_size), vocab_size) & ~_bits(self._eos, vocab_size)
        self._num_followed = 0  # tokens of the output that the matcher has seen

    def follow(self, output: Sequence[int]) -> None:
        """Go to the end of the output. It has grown by tokens that the masks allowed, none of which ends it."""
        for token in output[self._num_followed :]:
            self.enter(token)
        self._num_followed = len(output)

    def mask(self) -> NDArray[np.int32]:
        """(W,) what may come next. A token that ends the request may come where the output is complete."""
        return self._with_ends(self._matcher.mask())

    @staticmethod
    def masks(states: Sequence[GrammarState]) -> list[NDArray[np.int32]]:
        """`mask` of each."""
        masks: dict[int, NDArray[np.int32]] = {}
        for kind in {type(state._matcher) for state in states}:
            alike = [(i, state) for i, state in enumerate(states) if type(state._matcher) is kind]
            found = alike[0][1]._matcher.masks([state._matcher for _, state in alike])
            masks |= {i: state._with_ends(words) for (i, state), words in zip(alike, found, strict=True)}
        return [masks[i] for i in range(len(states))]

    def _with_ends(self, words: NDArray[np.int32]) -> NDArray[np.int32]:
        mask_W = np.zeros_like(self._text_bits_W)
        words = words[: len(mask_W)]  # a tokenizer may have more tokens than the model, or fewer
        mask_W[: len(words)] = words
        mask_W &= self._text_bits_W
        return mask_W | self._stop_bits_W if self._matcher.is_complete() else mask_W

    @property
    def everything(self) -> NDArray[np.int32]:
        """(W,) the mask that forbids nothing."""
        return np.full_like(self._text_bits_W, -1)

    def is_end(self, token: int) -> bool:
        """Whether the request ends with this token."""
        return token in self._stops

    def allows(self, token: int) -> bool:
        """Whether a token may come next, where `forcing_mask` is None."""
        if token in self._stops and self._matcher.is_complete():
            return True
        if token in self._eos or not self._matcher.advance(token):
            return False
        self._matcher.back(1)
        return True

    def enter(self, token: int) -> None:
        """Go on with a token that may come next and does not end the request."""
        is_legal = self._matcher.advance(token)
        assert is_legal, f"token {token} is not allowed here"

    def back(self, num_tokens: int) -> None:
        self._matcher.back(num_tokens)

    def forcing_mask(self) -> NDArray[np.int32] | None:
        """The mask, if only one token may come next, and perhaps otherwise."""
        return self.mask() if self._matcher.may_be_forced() else None


@dataclass(slots=True)
class GrammarTree:
    """A draft tree without what the grammar forbids, and with what it forces. Node 0 is the root, and a parent comes
    before its children."""

    tokens: list[int]
    parents: list[int]  # -1: the root
    drafts: list[int]  # the node of the draft tree; below 0: the grammar forces it
    masks: list[NDArray[np.int32] | None]  # (W,) of what may come after each node; None: not computed yet
    # Of a chain that ends before its drafts do: the token of the next draft, which the grammar forbids.
    forbidden: list[int]

    @property
    def num_drafts(self) -> int:
        return sum(draft > 0 for draft in self.drafts)


def grow(
    state: GrammarState, tokens: Sequence[int], parents: Sequence[int], max_nodes: int, max_depth: int
) -> GrammarTree:
    """The draft tree `tokens`, `parents` (node 0: the root) under the grammar, whose state is after the root, before
    and after the call. Forced nodes are added up to `max_nodes` nodes in all, and down to `max_depth`."""
    children: list[list[int]] = [[] for _ in tokens]
    sizes = [1] * len(tokens)  # of subtrees
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
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.drafts.append(draft)
        if node and state.is_end(token):
            tree.masks.append(state.everything)  # nothing of what comes after it counts
            num_left -= sizes[draft] if draft >= 0 else 0
            continue
        if node:
            state.enter(token)
            stack.append(None)
        drafts = children[draft] if draft >= 0 else []
        mask_W = state.forcing_mask() if drafts or depth < max_depth else None
        tree.masks.append(mask_W)
        num_left -= draft >= 0
        legal = [d for d in drafts if (state.allows(tokens[d]) if mask_W is None else _has(mask_W, tokens[d]))]
        num_left -= sum(sizes[d] for d in drafts) - sum(sizes[d] for d in legal)
        stack += [(node, tokens[d], d, depth + 1) for d in reversed(legal)]
        forced = None if mask_W is None or legal or depth == max_depth else _only(mask_W)
        if forced is not None and len(tree.tokens) + num_left < max_nodes:
            stack.append((node, forced, _FORCED, depth + 1))
        elif drafts and not legal:
            tree.forbidden = [tokens[drafts[0]]]
    return tree


def fill_masks(grown: Sequence[tuple[GrammarState, GrammarTree]]) -> None:
    """Compute the masks that are missing, one of each tree at a time. Each state is after the root, before and after
    the call."""
    walks = [(state, tree, _missing(state, tree)) for state, tree in grown]
    while walks:
        at = [(walk, node) for walk in walks if (node := next(walk[2], None)) is not None]
        masks = GrammarState.masks([state for (state, _, _), _ in at])
        for ((_, tree, _), node), mask_W in zip(at, masks, strict=True):
            tree.masks[node] = mask_W
        walks = [walk for walk, _ in at]


def _missing(state: GrammarState, tree: GrammarTree) -> Iterator[int]:
    """The nodes without a mask. The state is there at each."""
    here: list[int] = []  # the path to where the state is, without the root
    for node, mask_W in enumerate(tree.masks):
        if mask_W is not None:
            continue
        path = _path(tree, node)
        shared = 0
        while shared < min(len(here), len(path)) and here[shared] == path[shared]:
            shared += 1
        state.back(len(here) - shared)
        for step in path[shared:]:
            state.enter(tree.tokens[step])
        here = path
        yield node
    state.back(len(here))


def _path(tree: GrammarTree, node: int) -> list[int]:
    path = []
    while node > 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1]


def _has(mask_W: NDArray[np.int32], token: int) -> bool:
    return bool(mask_W[token >> 5] >> (token & 31) & 1)


def _only(mask_W: NDArray[np.int32]) -> int | None:
    """The token, if the mask has one bit."""
    words = mask_W.nonzero()[0]
    if len(words) != 1:
        return None
    word = int(mask_W[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + word.bit_length() - 1 if word & (word - 1) == 0 else None


def _bits(tokens: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """(W,) int32 words."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    bits[[token for token in tokens if token < vocab_size]] = True
    return np.packbits(bits, bitorder="little").view(np.int32)
