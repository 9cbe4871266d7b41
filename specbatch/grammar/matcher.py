"""The matcher of one output, by llguidance, which also computes the masks of many outputs in threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbatch.grammar.masks import only_token
from specbatch.grammar.token_automaton import TokenAutomaton
from specbatch.matcher import Walk

DEAD_END = "no text goes on from here"
_ENDS = ("NoExtension", "NoExtensionBias")  # The library's errors for a dead end; it can notice the second one late.
_MAX_WORDS = 40  # An error has no more words.


@dataclass(frozen=True, slots=True)
class Threads:
    """The threads that compute masks. `executor`: llguidance's. `end`: the token of its tokenizer that ends a text."""

    executor: Any
    count: int
    end: int


class Matcher:
    """See `specbatch.matcher.GrammarMatcher`."""

    def __init__(self, compiled: Any, vocab_size: int, threads: Threads, automaton: TokenAutomaton | str = "") -> None:
        """`compiled`: a matcher of the library, which stays at the beginning of a text. Its copies share a lexer, so
        only one thread at a time computes a mask of them."""
        self.automaton = automaton
        self._compiled = compiled
        self._threads = threads
        self._tokens: list[int] = []
        self._vocab_size = vocab_size
        self._start()

    @property
    def end(self) -> int:
        return self._threads.end

    def fork(self) -> Matcher:
        other = Matcher.__new__(Matcher)
        other._compiled, other._threads, other._vocab_size = self._compiled, self._threads, self._vocab_size
        other.automaton = self.automaton
        other._tokens = self._tokens.copy()
        other._matcher = self._matcher.deep_copy()
        return other

    def advance(self, token: int) -> bool:
        # This does the same as `advance_by` in fewer steps, because the device may wait for it.
        if token >= self._vocab_size or self._matcher.is_stopped():
            return False
        if self._matcher.try_consume_tokens([token]) != 1:
            return self._consume_afresh([token]) == 1
        self._tokens.append(token)
        return True

    def advance_by(self, tokens: Sequence[int]) -> int:
        if not tokens or self._matcher.is_stopped():
            return 0
        if max(tokens) >= self._vocab_size:
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token >= self._vocab_size)]
        count: int = self._matcher.try_consume_tokens(list(tokens))
        self._tokens += tokens[:count]
        return count if count == len(tokens) else count + self._consume_afresh(tokens[count:])

    def allows(self, token: int) -> bool:
        # The library allows no token after it has stopped. An unknown token is an error, and the library never leaves
        # an error.
        return token < self._vocab_size and not self._matcher.is_stopped() and self._takes(token)

    def back(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        del self._tokens[-num_tokens:]
        if self._matcher.is_error() or not self._matcher.rollback(num_tokens):
            self._restart()

    def failure(self, token: int | None) -> str | None:
        if not self._matcher.is_error() and token is None:
            self.mask()
        matcher = self._matcher
        if not matcher.is_error() and token is not None and token < self._vocab_size:
            matcher = matcher.deep_copy()
            matcher.try_consume_tokens([token])
        if not matcher.is_error():
            return None
        error = first_words(matcher.get_error())
        return DEAD_END if error in _ENDS else error

    def may_be_forced(self) -> bool:
        return self._is_forced() or bool(self._matcher.is_stopped())

    def only_token(self) -> int | None:
        tokens = [] if self._has_ended or not self._is_forced() else self._matcher.compute_ff_tokens()
        self._recover()
        return tokens[0] if tokens else None

    def forced_tokens(self, most: int) -> list[int]:
        if self._has_ended or not self.may_be_forced():
            return []
        # The library's mask has only the first of these tokens. If there is none, a longer token may begin with the
        # same text.
        tokens: list[int] = self._matcher.compute_ff_tokens()[:most]
        tokens = tokens[: self._matcher.validate_tokens(tokens)]
        self._recover()
        return tokens

    def is_complete(self) -> bool:
        return bool(self._matcher.is_accepting())  # False after an error

    @property
    def num_words(self) -> int:
        return -(-self._vocab_size // 32)

    def mask(self) -> NDArray[np.int32]:
        masks_1W = np.empty((1, self.num_words), dtype=np.int32)
        self.write_masks([Walk(self, (), 0)], masks_1W)
        return masks_1W[0]

    def write_masks(self, walks: Sequence[Walk], masks_KW: NDArray[np.int32]) -> NDArray[np.bool_]:
        if masks_KW.shape[1] != self.num_words or not masks_KW.flags.c_contiguous:
            return self._write_other_width(walks, masks_KW)
        # Walks with the same lexer are neighbours, because a thread computes neighbours: in two threads they would wait
        # for each other.
        walks = sorted(walks, key=lambda walk: id(walk.matcher._compiled))
        going_on = [walk for walk in walks if not walk.tokens and not walk.matcher._has_ended]
        alone = [(walk.matcher._matcher, walk.line) for walk in going_on]
        chains = [(walk.matcher._matcher, walk.line, walk.tokens) for walk in walks if walk.tokens]
        where = (masks_KW.ctypes.data, 4 * self.num_words, len(masks_KW))
        if alone:
            self._threads.executor.unsafe_compute_mask_ptr(alone, *where)
            for matcher, _, line in going_on:
                if matcher._matcher.is_error():
                    matcher._restart()
                    if not matcher._has_ended:
                        matcher._compute_mask(masks_KW[line])
        if chains:
            self._threads.executor.unsafe_compute_mask_ptr_with_draft_token(chains, *where)
        is_complete_K = np.zeros(len(masks_KW), dtype=np.bool_)
        for walk in walks:
            if not walk.tokens:
                is_complete_K[walk.line] = walk.matcher.is_complete()
                walk.matcher._clear_wrong(masks_KW[walk.line])
        if chains:
            self._check_chains([walk for walk in walks if walk.tokens], masks_KW, is_complete_K)
        return is_complete_K

    def _write_other_width(self, walks: Sequence[Walk], masks_KW: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Write masks of another width: a tokenizer can have more tokens than the model, or fewer."""
        words_KW = np.empty((len(masks_KW), self.num_words), dtype=np.int32)
        is_complete_K = self.write_masks(walks, words_KW)
        known = min(self.num_words, masks_KW.shape[1])
        lines = [walk.line + i for walk in walks for i in range(len(walk.tokens) + 1)]
        masks_KW[lines, :known] = words_KW[lines, :known]
        masks_KW[lines, known:] = 0
        return is_complete_K

    def _check_chains(
        self, walks: Sequence[Walk], masks_KW: NDArray[np.int32], is_complete_K: NDArray[np.bool_]
    ) -> None:
        """Correct the masks of walks with tokens, and find where a text is complete. Only a mask that leaves this open
        is checked, because a check is a call of the library for each position.

        The library's mask has its end token wherever a text is complete or an error has ended it. A mask that has the
        walk's next token is right: even if it has no other token, the library has accepted this one."""
        starts = np.cumsum([0, *(len(walk.tokens) + 1 for walk in walks)])
        lines = np.concatenate([np.arange(walk.line, walk.line + len(walk.tokens) + 1) for walk in walks])
        nexts = np.array([token for walk in walks for token in (*walk.tokens, self._threads.end)])
        ends = self._threads.end
        may_end = masks_KW[lines, ends >> 5] >> (ends & 31) & 1 != 0
        has_next = masks_KW[lines, nexts >> 5] >> (nexts & 31) & 1 != 0
        has_next[starts[1:] - 1] = True  # the last mask of a walk has no next token
        is_open = np.logical_or.reduceat(may_end | ~has_next, starts[:-1]).tolist()
        for walk, start, is_one_open in zip(walks, starts[:-1].tolist(), is_open, strict=True):
            matcher, last_W = walk.matcher, masks_KW[walk.line + len(walk.tokens)]
            if is_one_open or matcher._has_ended:
                has_next_here = has_next[start : start + len(walk.tokens)].tolist()
                matcher._write_slowly(walk, masks_KW, is_complete_K, (*has_next_here, False).index(False) + 1)
            elif (token := only_token(last_W)) is not None and not matcher._takes(*walk.tokens, token):
                last_W[:] = 0

    def _write_slowly(
        self, walk: Walk, masks_KW: NDArray[np.int32], is_complete_K: NDArray[np.bool_], num_written: int
    ) -> None:
        """Write the masks of a walk position by position. The library has already written the first `num_written`,
        unless an error came."""
        if self._matcher.is_error():
            self._restart()
            num_written = 0
        num_entered, masks_NW = 0, masks_KW[walk.line : walk.line + len(walk.tokens) + 1]
        for i, mask_W in enumerate(masks_NW):
            if i and not self.advance(walk.tokens[i - 1]):  # a limit of the library
                masks_NW[i:] = 0
                break
            num_entered = i
            if i >= num_written and not self._has_ended:
                self._compute_mask(mask_W)
            is_complete_K[walk.line + i] = self.is_complete()
            self._clear_wrong(mask_W)
        self.back(num_entered)

    def _clear_wrong(self, mask_W: NDArray[np.int32]) -> None:
        # A limit of the library, or a dead end that it notices late, also ends a text.
        if self._has_ended or (self._is_forced() and not self._takes_only(mask_W)):
            mask_W[:] = 0

    def _takes_only(self, mask_W: NDArray[np.int32]) -> bool:
        """Return False if the mask has a single token and the library refuses it."""
        token = only_token(mask_W)
        return token is None or self._takes(token) or bool(self._matcher.is_accepting())

    def _takes(self, *tokens: int) -> bool:
        """Return whether the library accepts these tokens. It can force the text `<think>` as the token of that name,
        but refuse the token, because in its tokenizer the token is a mark and not that text."""
        takes = bool(self._matcher.validate_tokens(list(tokens)) == len(tokens))
        return takes or self._recover()

    def _is_forced(self) -> bool:
        return bool(self._matcher.compute_ff_bytes()) or self._recover()

    @property
    def _has_ended(self) -> bool:
        return bool(self._matcher.is_stopped())  # True after an error, too

    def _start(self) -> None:
        self._matcher = self._compiled.deep_copy()

    def _consume_afresh(self, tokens: Sequence[int]) -> int:
        """Try refused tokens again after an error of the library, one by one from a new start. Return the number of
        accepted tokens.

        Where a text is forced, the library looks ahead, and what it sees there can exceed its limits. After such an
        error it reports no token as accepted, not even those before the error."""
        if not self._matcher.is_error():
            return 0
        self._restart()
        count = 0
        while count < len(tokens) and self._matcher.try_consume_tokens([tokens[count]]) == 1:
            self._tokens.append(tokens[count])
            count += 1
        self._recover()
        return count

    def _compute_mask(self, mask_W: NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
        if self._matcher.is_error():  # see `_consume_afresh`
            self._restart()
            if not self._matcher.is_error():
                self._matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)

    def _recover(self) -> bool:
        """Leave an error that came from a try, such as a limit that a token would exceed. Return False."""
        if self._matcher.is_error():
            self._restart()
        return False

    def _restart(self) -> None:
        """Start a new matcher with the accepted tokens, because the library never leaves an error. If the error comes
        again, these tokens cause it."""
        self._start()
        self._matcher.consume_tokens(self._tokens)


def first_words(error: str) -> str:
    """Return the beginning of the library's error, which says what is wrong. The rest repeats the grammar."""
    return " ".join(" ".join(error.split("<state>")[0].split()).split(" ")[:_MAX_WORDS])
