"""Draft trees under grammars, on the host: which nodes a grammar forbids, which tokens it forces, and what may come
after each node. `grammar_check` says which nodes need a mask.

A forbidden node is not verified, nor are those after it. Where only one token may come next, and no draft has it, the
token becomes a node: it is sure to be accepted, whatever the model says. So a whole span that the grammar forces is
committed in one round, with any draft method.

Shape suffixes: W words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbatch.grammar.masks import only_token
from specbatch.matcher import GrammarMatcher, Walk

MAX_FORCED = 15  # nodes that a tree may have in addition to those of its draft shape, where shapes are free
_FORCED = -1  # in place of a draft node's index
FREE, ODD = -1, -2  # in place of the only token that may come: more may come; the mask has to be computed


class Plan(NamedTuple):
    """What comes after a round whose tokens are known before it has run: see `unchecked_round`."""

    num_tokens: int  # of the request after that round
    num_new: int  # of these, those of the round
    drafts: list[int]  # of the next one


class GrammarState:
    """Of a request. `stops`: tokens that end it, `eos` among them. `vocab_size`: of the model."""

    def __init__(self, matcher: GrammarMatcher, eos: Iterable[int], stops: Iterable[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._eos = frozenset(eos)
        self._stops = self._eos | frozenset(stops)
        self._vocab_size = vocab_size
        stop_words = {token >> 5 for token in self._stops if token < vocab_size}
        # No token past these words may come.
        self.num_words = min(-(-vocab_size // 32), max(matcher.num_words, *(word + 1 for word in stop_words), 1))
        # The words of a mask with tokens that end the request, and the last one: it may have bits past the vocabulary.
        words = {word for word in (-(-vocab_size // 32) - 1, *stop_words) if word < self.num_words}
        self._words = np.array(sorted(words))
        self._text_bits = np.array([_word(w, lambda t: t < vocab_size and t not in self._eos) for w in sorted(words)])
        self._stop_bits = np.array([_word(w, lambda t: t < vocab_size and t in self._stops) for w in sorted(words)])
        self._num_followed = 0  # tokens of the output that the matcher has seen
        self.plan: Plan | None = None
        self.is_unchecked = False  # the tokens of its last round may be forbidden: see `admit`
        self.was_refused = False  # one was: the next round has its mask
        self._ahead: list[int] = []  # tokens after these that it has seen, too, and that will most likely be committed

    def follow(self, tokens: Sequence[int], num_prompt: int = 0) -> None:
        """Go to the end of the output, which comes after the prompt. It has grown by tokens that the masks allowed,
        none of which ends it. What `choose` took and was not committed after all, because a launch failed, is taken
        back."""
        new = tokens[num_prompt + self._num_followed :]
        self._num_followed += len(new)
        if new != self._ahead:
            pairs = zip(new, self._ahead, strict=False)
            known = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(new), len(self._ahead)))
            self.back(len(self._ahead) - known)
            new = new[known:]
            num_legal = self._matcher.advance_by(new)
            assert num_legal == len(new), f"token {new[num_legal]} is not allowed here"
        self._ahead = []

    def admit(self, tokens: Sequence[int]) -> int:
        """How many of the tokens that a round has committed the grammar allows: all, if that was known before."""
        if not self.is_unchecked:
            return len(tokens)
        self.is_unchecked = False
        count = next((i for i, token in enumerate(tokens) if not self.choose(token, FREE)), len(tokens))
        if count < len(tokens):
            self.plan, self.was_refused = None, True
        return count

    def begin_checked(self) -> None:
        """Forget what an unchecked round has left, which may have failed: the next one checks."""
        self.plan, self.is_unchecked, self.was_refused = None, False, False

    @property
    def num_ahead(self) -> int:
        """Tokens that `choose` took since `follow`."""
        return len(self._ahead)

    def only_token(self) -> int:
        """The token that alone `mask` has, or FREE, or ODD."""
        if self._matcher.is_complete() or (token := self._matcher.only_token()) is None:
            return FREE
        return token if token >= 0 and token < self._vocab_size and self.allows(token) else ODD

    def only_tokens(self, most: int) -> tuple[int, list[int]]:
        """`only_token`, and at most `most` - 1 tokens that most likely come after it, before one that ends the
        request."""
        if most > 1 and not self._matcher.is_complete() and (tokens := self.forced(most)):
            end = next((i for i, token in enumerate(tokens) if self.is_end(token)), len(tokens))
            return tokens[0], tokens[1 : max(1, end)]
        return self.only_token(), []

    def takes(self, token: int, only: int) -> bool:
        """Whether `mask` has the token; False where only the mask shows it. `only`: what `only_token` says."""
        return token == only if only != FREE else token >= 0 and self.allows(token)

    def choose(self, token: int, only: int) -> bool:
        """As `takes`. A token that it has and that does not end the request is gone on with, in the same step."""
        if token in self._stops or token < 0:
            return self.takes(token, only)
        if (only != FREE and token != only) or token >= self._vocab_size or not self._matcher.advance(token):
            return False
        self._ahead.append(token)
        return True

    def mask(self) -> NDArray[np.int32]:
        """(W,) what may come next. A token that ends the request may come where the output is complete."""
        masks_1W = np.empty((1, self.num_words), dtype=np.int32)
        GrammarState.write_masks([(self, Walk(self._matcher, (), 0))], masks_1W)
        return masks_1W[0]

    @staticmethod
    def write_masks(walks: Sequence[tuple[GrammarState, Walk]], masks_KW: NDArray[np.int32]) -> None:
        """Write `mask` of each place of these walks to its line: of all of one kind in one call, because threads
        compute them, and numpy takes about as long for one as for many."""
        alike: dict[tuple[type, frozenset[int]], list[tuple[GrammarState, Walk]]] = {}
        for state, walk in walks:
            alike.setdefault((type(state._matcher), state._stops), []).append((state, walk))
        for members in alike.values():
            first = members[0][0]
            is_complete_K = first._matcher.write_masks([walk for _, walk in members], masks_KW)
            lines = [line for _, walk in members for line in range(walk.line, walk.line + len(walk.tokens) + 1)]
            lines_B = np.array(lines)
            at = (lines_B[:, None], first._words)
            stops = np.where(is_complete_K[lines_B, None], first._stop_bits, np.int32(0))
            masks_KW[at] = (masks_KW[at] & first._text_bits) | stops

    def walk(self, path: Sequence[int], tokens: Sequence[int], line: int) -> Walk:
        """From after `path`. All of these tokens may come."""
        matcher = self._matcher
        if path:
            matcher = matcher.fork()
            num_legal = matcher.advance_by(path)
            assert num_legal == len(path), f"token {path[num_legal]} is not allowed here"
        return Walk(matcher, tokens, line)

    def is_end(self, token: int) -> bool:
        """Whether the request ends with this token."""
        return token in self._stops

    def allows(self, token: int) -> bool:
        """Whether a token may come next. Where a text is forced, the mask has one token of it, and this allows all with
        which the text can begin."""
        if token in self._stops and self._matcher.is_complete():
            return True
        return token not in self._eos and self._matcher.allows(token)

    def enter(self, token: int) -> None:
        """Go on with a token that may come next and does not end the request."""
        is_legal = self._matcher.advance(token)
        assert is_legal, f"token {token} is not allowed here"

    def enter_all(self, tokens: Sequence[int]) -> int:
        """Go on with the first tokens that may come and do not end the request; returns their number."""
        if not self._stops.isdisjoint(tokens):
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token in self._stops)]
        return self._matcher.advance_by(tokens)

    def back(self, num_tokens: int) -> None:
        self._matcher.back(num_tokens)

    def forced(self, most: int) -> list[int]:
        """The only token that may come next, and at most `most` - 1 tokens that may come after it and are likely: the
        masks decide. Empty: more tokens may come next, or the request cannot go on."""
        if self._matcher.is_complete():
            token = only_token(self.mask()) if self._matcher.may_be_forced() else None
            return [] if token is None else [token]
        tokens = self._matcher.forced_tokens(most)
        wrong = (i for i, token in enumerate(tokens) if token >= self._vocab_size or token in self._eos)
        return tokens[: next(wrong, len(tokens))]

    def write_forced(self, token: int, mask_W: NDArray[np.int32]) -> None:
        """`mask`, where it is known that this token alone may come."""
        mask_W[:] = 0
        mask_W.view(np.uint32)[token >> 5] = 1 << (token & 31)


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
        """A draft tree as it is; None: a chain."""
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
        """What is forced after a node, where the state is; returns the number of tokens. They are asked for once: each
        time, the library makes tokens of the whole forced text. The masks of the later ones are computed."""
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
    """The draft tree `tokens`, `parents` (node 0: the root; None: a chain) under the grammar, whose state is after the
    root, before and after the call. Forced nodes are added up to `max_nodes` nodes in all, and down to `max_depth`.
    `all_sure`: of a chain, each of them is sure to be accepted, not only the first: it takes longer."""
    if parents is None:
        return _grow_chain(state, tokens, max_nodes, max_depth, all_sure)
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
        tree.add(token, parent, draft)
        if node and state.is_end(token):
            num_left -= sizes[draft] if draft >= 0 else 0
            continue
        drafts = children[draft] if draft >= 0 else []
        num_left -= draft >= 0
        if not drafts and (depth >= max_depth or node + 1 + num_left >= max_nodes):
            continue  # nothing comes after it
        if node:
            state.enter(token)
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
    """As the walk over a tree, in fewer steps."""
    drafts = tokens[1:]
    num_entered = num_legal = state.enter_all(drafts)
    has_ended = num_legal < len(drafts) and state.is_end(drafts[num_legal]) and state.allows(drafts[num_legal])
    num_legal += has_ended
    count = num_legal + 1
    tree = GrammarTree.of(tokens[:count], None)
    while not has_ended and (room := min(max_nodes, max_depth + 1) - len(tree.tokens)) > 0:
        if len(tree.tokens) > count:
            state.enter(tree.tokens[-1])
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
    """To each of these nodes whose mask is not known; those are written. Nodes that follow each other are one walk."""
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
        yield state.walk(_path(tree, node)[state.num_ahead :], tokens, start + first)
        first = end


def _path(tree: GrammarTree, node: int) -> list[int]:
    """The tokens that lead to a node, without the root's."""
    path = []
    while node > 0:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]


def _word(index: int, has: Callable[[int], bool]) -> np.int32:
    """A word of a mask that has these tokens."""
    return np.uint32(sum(1 << bit for bit in range(32) if has(32 * index + bit))).view(np.int32)
