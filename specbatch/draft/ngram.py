"""Prompt lookup (Saxena 2023): find the last earlier occurrence of the sequence's last few tokens, in the prompt or in
the output. The drafts are the tokens that followed it. At the end of the text the drafts go on with themselves, so a
repeated pattern is drafted to full length.

A row can predict its output (OpenAI's `prediction`). The prediction is searched, too. Of equally long occurrences, the
one in the prediction counts.

On CUDA a kernel searches the text in each round. On a CPU the host keeps an index of each sequence, which costs less.
Both give the same drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.host import HostDraftMethod, HostSequence, HostTrees, match_scores
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.shape import DraftShape


class NgramDraft(DraftMethod):
    """Prompt lookup on the device: chains of up to num_draft_tokens - 1 drafts, after matches of min_match to max_match
    tokens."""

    reads_tokens = True

    def __init__(self, shape: DraftShape, min_match: int, max_match: int, ops: ModuleType) -> None:
        self.num_nodes = self.max_path = self.num_lookahead = shape.num_draft_tokens
        self._min_match, self._max_match = min_match, max_match
        self._lookup = ops.ngram_lookup

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        drafts_BD, count_B, matched_B = self._lookup(
            table.tokens_SL,
            table.predicted_SL,
            view.req_idx_B,
            view.length_B + 1,
            view.field(Field.NUM_PREDICTED),
            view.field(Field.LIMIT),
            self._min_match,
            self._max_match,
            self.num_nodes - 1,
        )
        scores_BN = match_scores(matched_B, count_B + 1, self.num_nodes) if self.scored else None
        tokens_BN = torch.cat((view.field(Field.ROOT)[:, None], drafts_BD), dim=1)
        return DraftTrees(tokens_BN, count_B + 1, scores_BN=scores_BN)


class NgramIndex:
    """Index of a growing token list: where each n-gram occurred last, for n from min_match to max_match."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._sizes = range(min_match, max_match + 1)
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its last occurrence
        self._num_indexed = 0  # n-grams that end before this token are in the index

    def update(self, tokens: list[int]) -> None:
        """Add every n-gram that has a token after it."""
        for end in range(max(1, self._num_indexed), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(tokens[end - size : end])] = end
        self._num_indexed = len(tokens)

    def find(self, tokens: list[int]) -> tuple[int, int] | None:
        """Find the last occurrence of the longest suffix of `tokens` that has one, with a token after it. Return the
        length of the suffix and the index of that token. Return None if no suffix has one."""
        for size in reversed(self._sizes):
            if size <= len(tokens):
                found = self._next.get(tuple(tokens[-size:]))
                if found is not None:
                    return size, found
        return None


class RowIndex:
    """Index of a sequence: of its tokens, and of its prediction."""

    def __init__(self, predicted: list[int], min_match: int, max_match: int) -> None:
        self._predicted = predicted
        self._in_text, self._in_predicted = NgramIndex(min_match, max_match), NgramIndex(min_match, max_match)
        self._in_predicted.update(predicted)

    def find(self, tokens: list[int]) -> tuple[int, list[int], int]:
        """Find the last earlier occurrence of the longest suffix of `tokens` that has one. Return its length, the text
        that it is in, and the index of the token after it. The length is 0 if no suffix has one."""
        self._in_text.update(tokens)
        size, start = self._in_text.find(tokens) or (0, 0)
        other_size, other_start = self._in_predicted.find(tokens) or (0, 0)
        if other_size and other_size >= size:
            return other_size, self._predicted, other_start
        return size, tokens, start


def continuation(text: list[int], start: int, count: int) -> list[int]:
    """Return the `count` tokens of `text` from `start` on. At the end of the text they go on with themselves."""
    drafts = text[start : start + count]
    while drafts and len(drafts) < count:
        drafts += drafts[: count - len(drafts)]
    return drafts


class HostNgramDraft(HostDraftMethod):
    """Prompt lookup on the host, with an index for each sequence. A preempted sequence keeps its index, because its
    tokens stay the same."""

    def __init__(self, shape: DraftShape, min_match: int, max_match: int) -> None:
        super().__init__(DraftShape(shape.num_draft_tokens - 1, 1, shape.num_draft_tokens))
        self._min_match, self._max_match = min_match, max_match

    def host_draft(self, sequences: Sequence[HostSequence]) -> HostTrees:
        found = [self._drafts(seq) for seq in sequences]
        return HostTrees.chains([drafts for drafts, _ in found], [size for _, size in found])

    def _drafts(self, seq: HostSequence) -> tuple[list[int], int]:
        """Return the drafts and the number of tokens of the match."""
        if seq.draft_state is None:
            seq.draft_state = RowIndex(seq.predicted, self._min_match, self._max_match)
        index: RowIndex = seq.draft_state
        size, text, start = index.find(seq.tokens)
        count = min(self.num_nodes - 1, seq.max_length - len(seq.tokens))
        return continuation(text, start, count) if size else [], size
