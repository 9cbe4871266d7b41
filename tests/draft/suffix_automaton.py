"""A draft method as a new author would write it: one file with a host-side draft, here from a suffix automaton (Blumer
et al. 1985) of each sequence's tokens. It drafts what followed the longest suffix that occurred before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specbatch.draft.host import HostDraftMethod, HostSequence, HostTrees
from specbatch.draft.shape import DraftShape


class SuffixAutomaton:
    """All substrings of a growing token list. State 0 is the empty string."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]  # of each state: the state after one more token
        self._link = [-1]  # the state of its longest suffix that occurs elsewhere, too
        self._length = [0]  # of its longest string
        self._last = 0  # the whole text
        self.num_tokens = 0

    def append(self, token: int) -> None:
        state, new = self._last, self._add({}, 0, self._length[self._last] + 1)
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            target = self._next[state][token]
            if self._length[target] == self._length[state] + 1:
                self._link[new] = target
            else:
                clone = self._add(dict(self._next[target]), self._link[target], self._length[state] + 1)
                self._link[target] = self._link[new] = clone
                while state >= 0 and self._next[state].get(token) == target:
                    self._next[state][token] = clone
                    state = self._link[state]
        self._last = new
        self.num_tokens += 1

    def _add(self, following: dict[int, int], link: int, length: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        return len(self._next) - 1

    @property
    def longest_match(self) -> int:
        """The state of the longest suffix of the text that occurred before; 0: there is none."""
        return max(0, self._link[self._last])

    def following(self, state: int) -> list[tuple[int, int]]:
        """Tokens that followed this string, each with the state after it. The empty string says nothing."""
        while state > 0 and not self._next[state]:
            state = self._link[state]
        return list(self._next[state].items()) if state > 0 else []


class SuffixDraft(HostDraftMethod):
    """At every node the first topk tokens that followed, level by level, until there are num_draft_tokens nodes."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self._topk = shape.topk

    def host_draft(self, sequences: Sequence[HostSequence]) -> HostTrees:
        tokens = np.zeros((len(sequences), self.num_nodes), dtype=np.int64)
        parents = np.full_like(tokens, -1)
        num_nodes = np.ones(len(sequences), dtype=np.int64)
        for b, seq in enumerate(sequences):
            automaton = seq.draft_state = seq.draft_state or SuffixAutomaton()
            for token in seq.tokens[automaton.num_tokens :]:
                automaton.append(token)
            level = [(0, automaton.longest_match)]
            for _ in range(self.max_path - 1):
                found = [(node, one) for node, state in level for one in automaton.following(state)[: self._topk]]
                level = []
                for parent, (token, state) in found[: self.num_nodes - int(num_nodes[b])]:
                    node = int(num_nodes[b])
                    tokens[b, node], parents[b, node] = token, parent
                    level.append((node, state))
                    num_nodes[b] += 1
        return HostTrees(tokens, num_nodes, None if self._topk == 1 else parents)
