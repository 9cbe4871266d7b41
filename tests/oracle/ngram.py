"""Drafts without a model: `none`, and prompt lookup (Saxena 2023), which continues the latest earlier occurrence of the
sequence's last few tokens, in the prompt or in the generated text.
"""

from __future__ import annotations

from specbatch.cache.pages import KVCache
from specbatch.engine.sequence import Sequence
from tests.oracle.proposer import TargetOutput
from tests.oracle.tree import DraftTree


class NoProposer:
    """Plain decoding: draft trees have the root alone."""

    num_lookahead = 1
    prefix_lookahead = 0
    aux_layers: tuple[int, ...] = ()
    cache: KVCache | None = None

    def start(self, seq: Sequence) -> None:
        pass

    def extend(self, sequences: list[Sequence], output: TargetOutput) -> None:
        pass

    def propose(self, sequences: list[Sequence]) -> DraftTree:
        return DraftTree.chain([[seq.tokens[-1]] for seq in sequences])


class NgramIndex:
    """Index of a growing token list: where each n-gram was last seen, for n in [min_match, max_match]."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._sizes = range(min_match, max_match + 1)
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        self._indexed = 0  # n-grams that end before this token are indexed

    def update(self, tokens: list[int]) -> None:
        """Index every n-gram that has a token after it."""
        for end in range(max(1, self._indexed), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._indexed = len(tokens)

    def find(self, tokens: list[int]) -> int | None:
        """Return the index of the token after the last earlier occurrence of the longest indexed suffix of `tokens`."""
        for size in reversed(self._sizes):
            if size < len(tokens):
                found = self._after.get(tuple(tokens[-size:]))
                if found is not None:
                    return found
        return None


class NgramProposer:
    """Chains of up to num_draft_tokens - 1 tokens; shorter, or the root alone, where the text offers less.

    A match near the end of the text is continued over the drafted tokens themselves, so that a repeating pattern is
    drafted to full length.
    """

    prefix_lookahead = 0
    aux_layers: tuple[int, ...] = ()
    cache: KVCache | None = None

    def __init__(self, num_draft_tokens: int, min_match: int, max_match: int) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._min_match = min_match
        self._max_match = max_match

    @property
    def num_lookahead(self) -> int:
        return self._num_draft_tokens

    def start(self, seq: Sequence) -> None:
        if seq.draft_state is None:  # a preempted sequence keeps its index, because its tokens stay the same
            seq.draft_state = NgramIndex(self._min_match, self._max_match)

    def extend(self, sequences: list[Sequence], output: TargetOutput) -> None:
        pass

    def propose(self, sequences: list[Sequence]) -> DraftTree:
        return DraftTree.chain([[seq.tokens[-1], *self._continue(seq)] for seq in sequences])

    def _continue(self, seq: Sequence) -> list[int]:
        index: NgramIndex = seq.draft_state
        index.update(seq.tokens)
        start = index.find(seq.tokens)
        if start is None:
            return []
        count = min(self._num_draft_tokens - 1, seq.max_length - len(seq.tokens))
        drafted: list[int] = []
        for i in range(start, start + count):
            drafted.append(seq.tokens[i] if i < len(seq.tokens) else drafted[i - len(seq.tokens)])
        return drafted
