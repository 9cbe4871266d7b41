"""A grammar for the answer that comes after the model's reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbatch.matcher import GrammarMatcher, Walk


class Reasoning(NamedTuple):
    """The tokens that begin and end a reasoning, see `AfterReasoning`."""

    begin: int | None
    end: tuple[int, ...]
    vocab_size: int


class _At(Enum):
    START = 0  # the reasoning may begin
    REASONING = 1
    ANSWER = 2


class AfterReasoning:
    """A matcher (see `GrammarMatcher`). The reasoning is any text up to the tokens `end`, of which the first comes
    nowhere else in them. Other tokens may come before the last one: the header of a message can have more parts. The
    answer comes after it, in the grammar of `answer`. `begin`: the token with which the output may begin its reasoning;
    it may also begin with the answer. None: the prompt has begun the reasoning."""

    automaton = "it comes after a reasoning"

    def __init__(self, answer: GrammarMatcher, begin: int | None, end: tuple[int, ...], vocab_size: int) -> None:
        self._answer = answer
        self._begin, self._end, self._vocab_size = begin, end, vocab_size
        self._at = _At.REASONING if begin is None else _At.START
        self._found = 0  # tokens of `end` that the reasoning ends with
        self._were: list[tuple[_At, int]] = []  # the state before each token

    @property
    def end(self) -> int:
        return self._answer.end

    def advance(self, token: int) -> bool:
        was, now, found = self._at, self._at, 0
        if was is _At.START:
            now = _At.REASONING if token == self._begin else _At.ANSWER
        elif was is _At.REASONING:
            found = self._found_after(self._found, token)
            now = _At.ANSWER if found == len(self._end) else now
        is_answer = now is _At.ANSWER and was is not _At.REASONING
        if not (self._answer.advance(token) if is_answer else token < self._vocab_size):
            return False
        self._were.append((was, self._found))
        self._at, self._found = now, found
        return True

    def _found_after(self, found: int, token: int) -> int:
        """Return how many tokens of `end` the reasoning has after `token`, if it had `found` before."""
        if token == self._end[found]:
            return found + 1
        if token == self._end[0]:
            return 1
        return found if found == len(self._end) - 1 else 0

    def advance_by(self, tokens: Sequence[int]) -> int:
        return next((i for i, token in enumerate(tokens) if not self.advance(token)), len(tokens))

    def allows(self, token: int) -> bool:
        if self._at is _At.ANSWER or (self._at is _At.START and token != self._begin):
            return self._answer.allows(token)
        return token < self._vocab_size

    def fork(self) -> AfterReasoning:
        other = AfterReasoning(self._answer.fork(), self._begin, self._end, self._vocab_size)
        other._at, other._found, other._were = self._at, self._found, self._were.copy()
        return other

    def back(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            was, found = self._were.pop()
            if self._at is _At.ANSWER and was is not _At.REASONING:
                self._answer.back(1)
            self._at, self._found = was, found

    def is_complete(self) -> bool:
        return self._at is not _At.REASONING and self._answer.is_complete()

    def failure(self, token: int | None) -> str | None:
        return None if self._at is _At.REASONING else self._answer.failure(token)

    def may_be_forced(self) -> bool:
        return self._at is _At.ANSWER and self._answer.may_be_forced()

    def only_token(self) -> int | None:
        if self._at is _At.REASONING:
            return None
        token = self._answer.only_token()
        # At the start there are two tokens: this one, and the one that begins the reasoning.
        return token if self._at is _At.ANSWER or token is None else -1

    def forced_tokens(self, most: int) -> list[int]:
        return self._answer.forced_tokens(most) if self._at is _At.ANSWER else []

    @property
    def num_words(self) -> int:
        return max(-(-self._vocab_size // 32), self._answer.num_words)

    def mask(self) -> NDArray[np.int32]:
        masks_1W = np.empty((1, self.num_words), dtype=np.int32)
        self.write_masks([Walk(self, (), 0)], masks_1W)
        return masks_1W[0]

    def write_masks(self, walks: Sequence[Walk], masks_KW: NDArray[np.int32]) -> NDArray[np.bool_]:
        answers: list[Walk] = []
        begins: list[tuple[int, int]] = []  # (line, the token that begins the reasoning)
        for matcher, tokens, line in walks:
            at, first = matcher._at, 0  # first: the position of the answer's first mask in the walk
            if at is _At.START:
                if matcher._begin is not None:
                    begins.append((line, matcher._begin))
                if tokens and tokens[0] == matcher._begin:
                    answers.append(Walk(matcher._answer.fork(), (), line))
                    at, first = _At.REASONING, 1
            if at is _At.REASONING:
                first = matcher._begin_of_answer(tokens, first)
                reasoning = masks_KW[line + (matcher._at is _At.START) : line + first]
                matcher._write_any_token(reasoning)
            if first <= len(tokens):
                answers.append(Walk(matcher._answer, tokens[first:], line + first))
        kind = answers[0].matcher if answers else None
        is_complete_K = kind.write_masks(answers, masks_KW) if kind else np.zeros(len(masks_KW), dtype=np.bool_)
        for line, token in begins:
            if token >> 5 < masks_KW.shape[1]:
                masks_KW[line].view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))
        return is_complete_K

    def _begin_of_answer(self, tokens: Sequence[int], first: int) -> int:
        """Return the index of the first token of the answer in a walk, whose reasoning goes on at `first`. It is above
        the number of tokens if the reasoning does not end."""
        found = self._found
        for i in range(first, len(tokens)):
            found = self._found_after(found, tokens[i])
            if found == len(self._end):
                return i + 1
        return len(tokens) + 1

    def _write_any_token(self, masks_KW: NDArray[np.int32]) -> None:
        words, past = divmod(self._vocab_size, 32)
        masks_KW[:, :words] = -1
        masks_KW[:, words:] = 0
        if past and words < masks_KW.shape[1]:
            masks_KW[:, words] = (1 << past) - 1
