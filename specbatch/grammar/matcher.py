"""Where a text is in its grammar, by a matcher of llguidance, and the masks of many texts in threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.grammar.masks import only_token


@dataclass(frozen=True, slots=True)
class Threads:
    """That compute masks. `executor`: of llguidance."""

    executor: Any
    count: int


class Matcher:
    """See `types.GrammarMatcher`."""

    def __init__(self, compiled: Any, vocab_size: int, threads: Threads) -> None:
        """`compiled`: a matcher of the library at the beginning of a text, which does not move. Its copies share a
        lexer: of these matchers, one thread at a time computes a mask."""
        self._compiled = compiled
        self._threads = threads
        self._tokens: list[int] = []
        self._vocab_size = vocab_size
        self._start()

    def fork(self) -> Matcher:
        other = Matcher.__new__(Matcher)
        other._compiled, other._threads, other._vocab_size = self._compiled, self._threads, self._vocab_size
        other._tokens = self._tokens.copy()
        other._matcher = self._matcher.deep_copy()
        return other

    def advance(self, token: int) -> bool:
        return self.advance_by([token]) == 1

    def advance_by(self, tokens: Sequence[int]) -> int:
        if not tokens or self._matcher.is_stopped():
            return 0
        if max(tokens) >= self._vocab_size:
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token >= self._vocab_size)]
        count: int = self._matcher.try_consume_tokens(list(tokens))
        self._tokens += tokens[:count]
        return count

    def allows(self, token: int) -> bool:
        # The library takes no token where it has stopped, and an unknown one is an error, which it never leaves.
        return token < self._vocab_size and not self._matcher.is_stopped() and self._takes(token)

    def back(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        del self._tokens[-num_tokens:]
        if self._matcher.is_error() or not self._matcher.rollback(num_tokens):
            self._start()  # an error is never left; what came before it may go on elsewhere
            self._matcher.consume_tokens(self._tokens)

    def may_be_forced(self) -> bool:
        return bool(self._matcher.compute_ff_bytes()) or self._matcher.is_stopped()

    def forced_token(self) -> int | None:
        if self._has_ended or not self.may_be_forced():
            return None
        # The library's mask is the first of these. Where there is none, a longer token may begin with the same text.
        token = next(iter(self._matcher.compute_ff_tokens()), None)
        return token if token is not None and self._takes(token) else None

    def is_complete(self) -> bool:
        return bool(self._matcher.is_accepting())  # False after an error

    def mask(self) -> NDArray[np.int32]:
        mask_W: NDArray[np.int32] = self.masks([self])[0]
        return mask_W

    def masks(self, matchers: Sequence[Matcher]) -> NDArray[np.int32]:
        num_words = -(-self._vocab_size // 32)
        masks_BW = np.empty((len(matchers), num_words), dtype=np.int32)
        # In the order of their lexers, because threads take neighbours: two with one lexer would wait for each other.
        order = sorted(range(len(matchers)), key=lambda i: id(matchers[i]._compiled))
        live = [(one, i) for i in order if not (one := matchers[i]._matcher).is_stopped()]
        if len(live) > 1:
            self._threads.executor.unsafe_compute_mask_ptr(live, masks_BW.ctypes.data, 4 * num_words, len(matchers))
        elif live:
            [(matcher, i)] = live
            matcher.unsafe_compute_mask_ptr(masks_BW[i].ctypes.data, 4 * num_words)
        for one, mask_W in zip(matchers, masks_BW, strict=True):
            # Also by a limit, or an end that was found late.
            if one._matcher.is_stopped() or (one._matcher.compute_ff_bytes() and not one._takes_only(mask_W)):
                mask_W[:] = 0
        return masks_BW

    def _takes_only(self, mask_W: NDArray[np.int32]) -> bool:
        """False: one token alone may come, and the library refuses it."""
        token = only_token(mask_W)
        return token is None or self._takes(token) or bool(self._matcher.is_accepting())

    def _takes(self, token: int) -> bool:
        """The library forces the text `<think>` as the token of that name, which it has as a mark and not as that text:
        it refuses that."""
        return bool(self._matcher.validate_tokens([token]) == 1)

    @property
    def _has_ended(self) -> bool:
        return bool(self._matcher.is_stopped())  # also after an error

    def _start(self) -> None:
        self._matcher = self._compiled.deep_copy()
