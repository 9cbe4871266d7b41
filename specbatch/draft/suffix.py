"""Drafts from the outputs of all rows of a job, and from a file of earlier results (`speculation.corpus`).

The engine's requests share a corpus (`corpus.py`). Each round first adds the tokens that are new, and then searches for
the last tokens of every request. A request's prompt is not in the corpus: each request searches its own prompt and
output as `ngram` does. The drafts with the larger expected number of accepted tokens are taken.

Which tokens are in the corpus depends on the rows that ran before, so a resumed job can draft otherwise. The drafts are
deterministic, and the target decides about each of them, so texts do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specbatch.counts import DraftSources, EngineStats
from specbatch.draft.corpus import MAX_MATCH, Corpus, Found, Text
from specbatch.draft.host import HostDraftMethod, HostSequence, HostTrees
from specbatch.draft.ngram import RowIndex, continuation
from specbatch.draft.shape import DraftShape

_TEXTS_AT_ONCE = 256  # texts of a file that are added in one call


@dataclass(slots=True)
class RowDrafts:
    """The state of a request. Its tokens are read once more after its end, when the engine has appended the last."""

    tokens: list[int]
    index: RowIndex
    text: Text
    drafts: list[int] = field(default_factory=list)  # those of the last round; empty once they are counted
    num_before: int = 0  # tokens before these drafts
    source: str = "row"  # a key of `DraftSources`


@dataclass
class SharedTexts:
    """The corpus of an engine, which the draft shapes of a schedule share."""

    corpus: Corpus
    running: list[RowDrafts] = field(default_factory=list)  # the requests of the last round
    sources: DraftSources = field(default_factory=DraftSources)

    @classmethod
    def of(cls, max_tokens: int, texts: Sequence[list[int]]) -> SharedTexts:
        """Make a corpus with earlier results. `texts`: their tokens, the newest last."""
        corpus = Corpus(max_tokens)
        for first in range(0, len(texts), _TEXTS_AT_ONCE):
            corpus.extend([(Text(), text) for text in texts[first : first + _TEXTS_AT_ONCE]], room=0)
        corpus.mark_loaded()
        return cls(corpus)

    def count(self) -> None:
        """Count the drafts of the last round, and which of them were right, as far as its tokens were appended."""
        for row in self.running:
            new = row.tokens[row.num_before :]
            if row.drafts and new:
                wrong = (i for i, (draft, token) in enumerate(zip(row.drafts, new, strict=False)) if draft != token)
                accepted = next(wrong, min(len(row.drafts), len(new)))
                self.sources.record(row.source, len(row.drafts), accepted)
                row.drafts = []

    def follow(self, rows: list[RowDrafts]) -> None:
        """Add the tokens that rows have got since the last round. `rows`: the requests of this round."""
        self.count()
        known = set(map(id, rows))
        ended = [row for row in self.running if id(row) not in known]
        self.corpus.extend([(row.text, row.tokens) for row in (*ended, *rows)])
        self.running = rows


class SuffixDraft(HostDraftMethod):
    """Chains from the corpus that all rows share, or from the row's own text."""

    def __init__(self, shape: DraftShape, match: tuple[int, int], min_probability: float, shared: SharedTexts) -> None:
        super().__init__(shape)
        self._match, self._min_probability, self._shared = match, min_probability, shared

    def host_draft(self, sequences: Sequence[HostSequence]) -> HostTrees:
        rows = [self._row(seq) for seq in sequences]
        self._shared.follow(rows)
        found = self._shared.corpus.search([seq.tokens for seq in sequences], self.num_nodes - 1, self._min_probability)
        for i, (seq, row) in enumerate(zip(sequences, rows, strict=True)):
            row.source, drafts = self._better(row, found, i)
            row.drafts, row.num_before = drafts[: seq.max_length - len(seq.tokens)], len(seq.tokens)
        return HostTrees.chains([row.drafts for row in rows])

    def record(self, stats: EngineStats) -> None:
        self._shared.count()
        stats.draft_sources = self._shared.sources

    def _row(self, seq: HostSequence) -> RowDrafts:
        if seq.draft_state is None:
            index = RowIndex(seq.predicted, *self._match)
            seq.draft_state = RowDrafts(seq.tokens, index, Text(num_added=seq.num_prompt))
        row: RowDrafts = seq.draft_state
        return row

    def _better(self, row: RowDrafts, found: Found, i: int) -> tuple[str, list[int]]:
        """Return the source and the drafts of request `i`: those of the corpus, or of its own text."""
        size, text, start = row.index.find(row.tokens)
        if size:
            size = match_length(row.tokens, text, start, size)
        # The probability of draft d after a match of m tokens is m / (m + d), see `corpus`.
        count = min(self.num_nodes - 1, int(size / self._min_probability - size))
        expected = sum(size / (size + depth) for depth in range(1, count + 1))
        if found.expected_B[i] > expected:
            source = "corpus" if self._shared.corpus.is_loaded(int(found.positions_B[i])) else "job"
            return source, found.tokens_BD[i, : found.counts_B[i]].tolist()
        return "row", continuation(text, start, count)


def match_length(tokens: list[int], text: list[int], start: int, size: int) -> int:
    """Return how many of the last tokens are also before index `start` of `text`. `size` of them are."""
    most = min(MAX_MATCH, start, len(tokens))
    while size < most and text[start - size - 1] == tokens[-size - 1]:
        size += 1
    return size
