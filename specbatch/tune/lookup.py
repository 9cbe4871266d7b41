"""Prompt lookup over whole texts at once: what `speculation.ngram.NgramIndex` would find at each position.

Shape suffixes: P positions of all rows, T tokens of all rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specbatch.tune.positions import Positions
from specbatch.tune.trace import Trace


class Lookup:
    """The texts of all rows end to end. `ends` below are numbers of tokens of the joined text."""

    def __init__(self, trace: Trace, positions: Positions, depth: int) -> None:
        """`depth`: most drafts of a round that are asked for."""
        rows = trace.rows
        self._tokens_T = np.concatenate([row.tokens for row in rows]).astype(np.int64)
        lengths = np.array([len(row.tokens) for row in rows])
        self._row_T = np.repeat(np.arange(len(rows)), lengths)
        row_first = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        self._place_T = np.arange(len(self._tokens_T)) - row_first[self._row_T]
        # The text of position p ends with its root.
        num_prompts = np.array([row.num_prompt for row in rows])
        within = np.arange(positions.count) - np.repeat(positions.first_R, positions.num_outputs_R)
        self._root_P = within + np.repeat(row_first + num_prompts, positions.num_outputs_R)
        self._left_P = np.repeat(positions.num_outputs_R, positions.num_outputs_R) - 1 - within
        self._depth = depth
        # Of the n-gram that ends with each token: a number that names it, -1 where the row has not as many tokens.
        self._grams = [self._row_T.astype(np.int64)]
        self._before: list[NDArray[np.int64]] = []
        self._matched: dict[tuple[int, int], tuple[NDArray[np.int16], NDArray[np.bool_]]] = {}

    def accepted(self, min_match: int, max_match: int) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
        """(P,) drafts accepted of a round that drafts `depth` tokens (one that drafts fewer accepts at most those), and
        (P,) whether it drafts at all: whether the text holds such a match."""
        key = min_match, max_match
        if key not in self._matched:
            # The last token of the latest earlier occurrence of the longest suffix; -1: there is none.
            found_P = np.full(len(self._root_P), -1, dtype=np.int64)
            for size in range(max_match, min_match - 1, -1):
                found_P = np.where(found_P >= 0, found_P, self._occurrence_before(size)[self._root_P])
            self._matched[key] = self._common(found_P), found_P >= 0
        return self._matched[key]

    def _occurrence_before(self, size: int) -> NDArray[np.int64]:
        """(T,) where the n-gram of `size` tokens that ends with each token ended last before that; -1: nowhere."""
        while len(self._before) < size:
            grams = self._next_grams()
            order = np.argsort(grams, kind="stable")
            same = (grams[order[1:]] == grams[order[:-1]]) & (grams[order[1:]] >= 0)
            before = np.full(len(grams), -1, dtype=np.int64)
            before[order[1:][same]] = order[:-1][same]
            self._before.append(before)
        return self._before[size - 1]

    def _next_grams(self) -> NDArray[np.int64]:
        """Names of n-grams one longer than the longest so far: a name and the token behind what it names."""
        size = len(self._grams)
        shorter = self._grams[-1]
        if size > 1:
            shorter = np.concatenate(([-1], shorter[:-1]))
        _, names = np.unique(shorter * (self._tokens_T.max() + 1) + self._tokens_T, return_inverse=True)
        grams = np.where(self._place_T >= size - 1, names.reshape(-1), -1)
        self._grams.append(grams)
        return grams

    def _common(self, found_P: NDArray[np.int64]) -> NDArray[np.int16]:
        """(P,) how far the text goes on behind the occurrence as it does behind the root. A draft that runs into the
        root goes on over itself: as long as it is right, that is the text."""
        count_P = np.zeros(len(found_P), dtype=np.int16)
        going = np.flatnonzero((found_P >= 0) & (self._left_P > 0))
        for step in range(self._depth):
            there, here = found_P[going] + 1 + step, self._root_P[going] + 1 + step
            going = going[self._tokens_T[there] == self._tokens_T[here]]
            count_P[going] += 1
            going = going[self._left_P[going] > step + 1]
        return count_P
