"""A store of tokens that many rows share, and the search for what may come next.

The store is a ring of bounded size: new tokens take the room of the oldest. Chains link the positions that come after
the same tokens, the newest first, as in the sliding window of deflate (RFC 1951): `_newest` has the first position of a
chain, by a hash of the tokens, and `_older` has the position after each. Matches of two sizes have chains of their own:
the long size finds rare texts, and the short one finds any. Positions that are overwritten stay in chains. A search
compares the tokens themselves, so they do no harm.

Drafts are chosen as in SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). The positions with the longest match
vote for each next token, and a draft ends where its probability gets small. After a match of m tokens, d right drafts
make a match of m + d. The next one is taken to be right in (m + d) / (m + d + 1) of the cases, times its share of the
votes. So the product for d drafts is m / (m + d) times the shares, and drafts get longer in proportion to matches.

Shape suffixes: B texts that are searched for, C candidates, D drafts, M tokens of a match, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MIN_TOKENS = 1024  # the smallest corpus
MAX_MATCH = 24  # tokens before a position that are compared; longer matches count as this long
_SIZES = (6, 2)  # the sizes of matches that have chains; the last one is the shortest match
_MAX_CANDIDATES = 8  # positions of each chain that are compared
ROOM = 128  # room of a growing text, in tokens; when it is full, the text goes on in another part of the ring
_NO_TOKEN, _NO_QUERY = -1, -2  # values that are equal to no token, and not to each other


@dataclass(slots=True)
class Text:
    """A growing text. `num_added`: tokens of it that are in the corpus, or left out. `start`, `end`, `room_end`:
    positions of its newest part, counted on where the ring begins again."""

    num_added: int = 0
    start: int = -1
    end: int = 0
    room_end: int = 0


class Found(NamedTuple):
    """Drafts for each of B texts. `positions_B`: where the first draft of each was found; -1: nowhere."""

    tokens_BD: NDArray[np.int32]
    counts_B: NDArray[np.int64]
    expected_B: NDArray[np.float64]  # sum of the probabilities of the drafts
    positions_B: NDArray[np.int64]


class Corpus:
    """A corpus of at most `max_tokens` tokens, which are at least MIN_TOKENS."""

    def __init__(self, max_tokens: int) -> None:
        assert max_tokens >= MIN_TOKENS
        self._size = max_tokens
        # MAX_MATCH entries before the ring, so that no search reads outside of it.
        self._tokens = np.full(MAX_MATCH + max_tokens, _NO_TOKEN, dtype=np.int32)
        self._num_bits = max(10, (max_tokens - 1).bit_length())
        # Index 0 of the tokens is no position, so 0 ends a chain.
        self._newest = [np.zeros(1 << self._num_bits, dtype=np.int32) for _ in _SIZES]
        self._older = [np.zeros(len(self._tokens), dtype=np.int32) for _ in _SIZES]
        self._next = 0  # the next position, counted on where the ring begins again
        self._first, self._last = 0, 0  # the range of indices with tokens of `mark_loaded`

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self._tokens, *self._newest, *self._older))

    def mark_loaded(self) -> None:
        """Mark the tokens that the corpus has now as those of a file."""
        self._first, self._last = MAX_MATCH, MAX_MATCH + min(self._next, self._size)

    def is_loaded(self, position: int) -> bool:
        """Return whether a position of `Found` has a token of a file."""
        return self._first <= position < self._last

    def extend(self, texts: Sequence[tuple[Text, list[int]]], room: int = ROOM) -> None:
        """Add the tokens that are new since the last call. Each text comes with all of its tokens. `room`: tokens that
        its part of the ring has room for in addition."""
        room = min(room, self._size // 8)
        added = [self._write(text, tokens, room) for text, tokens in texts if len(tokens) > text.num_added]
        if not added:
            return
        index_P = np.concatenate([np.arange(start, end) for start, end in added])
        for i, size in enumerate(_SIZES):
            hashes_P = self._hash(self._tokens[index_P[:, None] - np.arange(size, 0, -1)])
            order = np.argsort(hashes_P, kind="stable")
            hashes, index = hashes_P[order], index_P[order]
            older = self._newest[i][hashes]
            is_repeated = hashes[1:] == hashes[:-1]
            older[1:][is_repeated] = index[:-1][is_repeated]
            self._older[i][index] = older
            is_last = np.append(~is_repeated, True)
            self._newest[i][hashes[is_last]] = index[is_last]

    def _write(self, text: Text, tokens: list[int], room: int) -> tuple[int, int]:
        """Write the new tokens of a text, and return their range of indices."""
        new = tokens[text.num_added :][-(self._size // 2) :]
        if text.start < self._next - self._size or text.end + len(new) > text.room_end:
            context = tokens[max(0, len(tokens) - len(new) - MAX_MATCH) : len(tokens) - len(new)]
            text.start = self._reserve(len(context) + len(new) + room)
            text.room_end = self._next
            index = MAX_MATCH + text.start % self._size
            self._tokens[index : index + self._next - text.start] = _NO_TOKEN
            self._tokens[index + 1 : index + 1 + len(context)] = context
            text.end = text.start + 1 + len(context)
            if index < self._last:
                self._first = max(self._first, index + text.room_end - text.start)
        index = MAX_MATCH + text.end % self._size
        self._tokens[index : index + len(new)] = new
        text.end += len(new)
        text.num_added = len(tokens)
        return index, index + len(new)

    def _reserve(self, count: int) -> int:
        """Return the position of a free part of the ring, which begins with one entry that holds no token."""
        count += 1
        if self._next % self._size + count > self._size:
            self._next += self._size - self._next % self._size
        self._next += count
        return self._next - count

    def _hash(self, tokens_PM: NDArray[np.int32]) -> NDArray[np.int64]:
        """Hash rows of tokens to indices of `_newest`."""
        hashes = np.zeros(len(tokens_PM), dtype=np.uint64)
        for column in tokens_PM.T:
            hashes = (hashes + column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            hashes ^= hashes >> np.uint64(29)
        return (hashes >> np.uint64(64 - self._num_bits)).astype(np.int64)

    def search(self, texts: Sequence[list[int]], max_drafts: int, min_probability: float) -> Found:
        """Find drafts of at most `max_drafts` tokens, each with at least this probability."""
        last_BM = np.full((len(texts), MAX_MATCH), _NO_QUERY, dtype=np.int32)
        for line, tokens in zip(last_BM, texts, strict=True):
            line[-len(tokens) :] = tokens[-MAX_MATCH:]
        index_BC = self._candidates(last_BM)
        matches_BC, alive = np.zeros(index_BC.shape, dtype=np.int64), index_BC > 0
        for back in range(1, MAX_MATCH + 1):
            alive &= self._tokens[np.maximum(index_BC - back, 0)] == last_BM[:, -back, None]
            if not alive.any():
                break
            matches_BC += alive
        longest_B = matches_BC.max(axis=1)
        return self._vote(index_BC, (matches_BC == longest_B[:, None]) & (matches_BC >= _SIZES[-1]), longest_B,
                          max_drafts, min_probability)  # fmt: skip

    def _candidates(self, last_BM: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the newest positions of the chains, and 0 where there are no more."""
        columns: list[NDArray[np.int32]] = []
        for newest, older, size in zip(self._newest, self._older, _SIZES, strict=True):
            index_B = newest[self._hash(last_BM[:, -size:])]
            for _ in range(_MAX_CANDIDATES):
                columns.append(index_B)
                index_B = older[index_B]
        return np.stack(columns, axis=1).astype(np.int64)

    def _vote(
        self,
        index_BC: NDArray[np.int64],
        votes_BC: NDArray[np.bool_],
        longest_B: NDArray[np.int64],
        max_drafts: int,
        min_probability: float,
    ) -> Found:
        """Draft the tokens that most candidates have. `votes_BC`: the candidates that have a vote."""
        batch = len(index_BC)
        tokens_BD = np.zeros((batch, max_drafts), dtype=np.int32)
        counts_B, expected_B = np.zeros(batch, dtype=np.int64), np.zeros(batch)
        shares_B = np.ones(batch)
        positions_B = np.where(votes_BC.any(axis=1), index_BC[np.arange(batch), votes_BC.argmax(axis=1)], -1)
        lines = np.arange(batch)  # the texts whose drafts go on
        for depth in range(max_drafts):
            index, votes = index_BC[lines] + depth, votes_BC[lines]
            next_BC = self._tokens[np.minimum(index, len(self._tokens) - 1)]
            votes &= (next_BC >= 0) & (index < len(self._tokens))
            same = (next_BC[:, :, None] == next_BC[:, None, :]) & votes[:, None, :] & votes[:, :, None]
            num_same = same.sum(axis=2)
            best = num_same.argmax(axis=1)  # the first of these, which is the newest
            picked = np.arange(len(lines))
            shares_B[lines] *= num_same[picked, best] / np.maximum(votes.sum(axis=1), 1)
            probability = shares_B[lines] * longest_B[lines] / (longest_B[lines] + depth + 1)
            is_likely = (num_same[picked, best] > 0) & (probability >= min_probability)
            votes_BC[lines] = same[picked, best]
            tokens_BD[lines, depth] = next_BC[picked, best]
            lines, probability = lines[is_likely], probability[is_likely]
            counts_B[lines] += 1
            expected_B[lines] += probability
            if not len(lines):
                break
        return Found(tokens_BD, counts_B, expected_B, positions_B)
