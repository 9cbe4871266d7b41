"""A grammar of the answer that comes after the model's reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from specbatch.types import GrammarMatcher


class _At(Enum):
    START = 0  # the reasoning may begin
    REASONING = 1
    ANSWER = 2


class AfterReasoning:
    """A matcher (see `types.GrammarMatcher`): reasoning is any text up to the token `end`; what comes after is in the
    grammar of `answer`. `begin`: the token with which the output may begin its reasoning; it can also begin its answer.
    None: the prompt has begun the reasoning."""

    def __init__(self, answer: GrammarMatcher, begin: int | None, end: int, vocab_size: int) -> None:
        self._answer = answer
        self._begin, self._end, self._vocab_size = begin, end, vocab_size
        self._at = _At.REASONING if begin is None else _At.START
        self._were: list[_At] = []  # before each token

    def advance(self, token: int) -> bool:
        was, now = self._at, self._at
        if was is _At.START:
            now = _At.REASONING if token == self._begin else _At.ANSWER
        elif was is _At.REASONING and token == self._end:
            now = _At.ANSWER
        is_answer = now is _At.ANSWER and was is not _At.REASONING
        if not (self._answer.advance(token) if is_answer else token < self._vocab_size):
            return False
        self._were.append(was)
        self._at = now
        return True

    def advance_by(self, tokens: Sequence[int]) -> int:
        return next((i for i, token in enumerate(tokens) if not self.advance(token)), len(tokens))

    def allows(self, token: int) -> bool:
        if self._at is _At.ANSWER or (self._at is _At.START and token != self._begin):
            return self._answer.allows(token)
        return token < self._vocab_size

    def fork(self) -> AfterReasoning:
        other = AfterReasoning(self._answer.fork(), self._begin, self._end, self._vocab_size)
        other._at, other._were = self._at, self._were.copy()
        return other

    def back(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            was = self._were.pop()
            if self._at is _At.ANSWER and was is not _At.REASONING:
                self._answer.back(1)
            self._at = was

    def is_complete(self) -> bool:
        return self._at is not _At.REASONING and self._answer.is_complete()

    def may_be_forced(self) -> bool:
        return self._at is _At.ANSWER and self._answer.may_be_forced()

    def forced_token(self) -> int | None:
        return self._answer.forced_token() if self._at is _At.ANSWER else None

    def mask(self) -> NDArray[np.int32]:
        mask_W: NDArray[np.int32] = self.masks([self])[0]
        return mask_W

    def masks(self, matchers: Sequence[AfterReasoning]) -> NDArray[np.int32]:
        in_answer = [i for i, one in enumerate(matchers) if one._at is not _At.REASONING]
        inner = [matchers[i]._answer for i in in_answer]
        answers_BW = inner[0].masks(inner) if inner else np.empty((0, 0), dtype=np.int32)
        num_words = max(-(-self._vocab_size // 32), answers_BW.shape[1])
        masks_BW = np.zeros((len(matchers), num_words), dtype=np.int32)
        for one, mask_W in zip(matchers, masks_BW, strict=True):
            if one._at is _At.REASONING:
                one._write_any_token(mask_W)
        masks_BW[in_answer, : answers_BW.shape[1]] = answers_BW
        for one, mask_W in zip(matchers, masks_BW, strict=True):
            if one._at is _At.START and one._begin is not None:
                mask_W.view(np.uint32)[one._begin >> 5] |= np.uint32(1 << (one._begin & 31))
        return masks_BW

    def _write_any_token(self, mask_W: NDArray[np.int32]) -> None:
        words, past = divmod(self._vocab_size, 32)
        mask_W[:words] = -1
        if past:
            mask_W[words] = (1 << past) - 1
