"""The state of a request in its grammar: which tokens may come next, and whether a single one may.

Shape suffixes: W words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specbatch.grammar.masks import only_token
from specbatch.matcher import GrammarMatcher, Walk

# Values of `only_token` if there is no forced token: several may come (FREE), or the mask must be computed (ODD).
FREE, ODD = -1, -2


class GrammarState:
    """The state of one request in its grammar. `stops`: the tokens that end the request; `eos` is added to them.
    `vocab_size`: the number of tokens of the model."""

    def __init__(self, matcher: GrammarMatcher, eos: Iterable[int], stops: Iterable[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._stops = frozenset(eos) | frozenset(stops)
        # Tokens that are no part of a text. The tokenizer can have another end token than the model.
        self._no_text = frozenset(eos) | {matcher.end}
        self._vocab_size = vocab_size
        stop_words = {token >> 5 for token in self._stops if token < vocab_size}
        # No token past these words may come.
        self.num_words = min(-(-vocab_size // 32), max(matcher.num_words, *(word + 1 for word in stop_words), 1))
        # The words of a mask with such tokens, and the last one: it may have bits past the vocabulary.
        others = (-(-vocab_size // 32) - 1, matcher.end >> 5)
        words = {word for word in (*others, *stop_words) if word < self.num_words}
        self._words = np.array(sorted(words))
        self._text_bits = np.array(
            [_word(w, lambda t: t < vocab_size and t not in self._no_text) for w in sorted(words)]
        )
        self._stop_bits = np.array([_word(w, lambda t: t < vocab_size and t in self._stops) for w in sorted(words)])
        self._num_followed = 0  # tokens of the output that the matcher has seen
        self.failure: str | None = None  # an error of the matcher, for which the request cannot go on
        self._ahead: list[int] = []  # tokens after these that it has seen, too, and that will most likely be committed

    def follow(self, tokens: Sequence[int], num_prompt: int = 0) -> None:
        """Advance to the end of the output, which comes after the prompt. The output has grown by tokens that the masks
        allowed, none of which ends it. Tokens that `choose` took and that were not committed, because a launch failed,
        are taken back. If the matcher fails on the way, `failure` says why."""
        if self.failure is not None:
            return
        new = tokens[num_prompt + self._num_followed :]
        self._num_followed += len(new)
        if new != self._ahead:
            pairs = zip(new, self._ahead, strict=False)
            known = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(new), len(self._ahead)))
            self.back(len(self._ahead) - known)
            new = new[known:]
            num_legal = self._matcher.advance_by(new)
            if num_legal < len(new):
                token = new[num_legal]
                self.failure = self._matcher.failure(token) or f"no text goes on after token {token}"
        self._ahead = []

    def failure_after(self, tokens: Sequence[int], num_prompt: int) -> str | None:
        """Return the error for which nothing may come after the output (see `follow`); None: there is no error."""
        self.follow(tokens, num_prompt)
        return self.failure or self._matcher.failure(None)

    def may_end_after(self, tokens: Sequence[int], num_prompt: int) -> bool:
        """Return whether the output is complete, see `follow`."""
        self.follow(tokens, num_prompt)
        return self.failure is None and self._matcher.is_complete()

    @property
    def num_ahead(self) -> int:
        """Tokens that `choose` took since `follow`."""
        return len(self._ahead)

    def only_token(self) -> int:
        """The token that alone `mask` has, or FREE, or ODD."""
        if self._matcher.is_complete() or (token := self._matcher.only_token()) is None:
            return FREE
        return token if token >= 0 and token < self._vocab_size and self.allows(token) else ODD

    def takes(self, token: int, only: int) -> bool:
        """Return whether `mask` has the token; False where only the mask can show it. `only`: the result of
        `only_token`."""
        return token == only if only != FREE else token >= 0 and self.allows(token)

    def choose(self, token: int, only: int) -> bool:
        """Return the same as `takes`. If the mask has the token and the token does not end the request, advance with
        it."""
        if token in self._stops or token in self._no_text or token < 0:
            return self.takes(token, only)
        if (only != FREE and token != only) or token >= self._vocab_size or not self._matcher.advance(token):
            return False
        self._ahead.append(token)
        return True

    def mask(self) -> NDArray[np.int32]:
        """(W,) what may come next. A token that ends the request may come where the output is complete."""
        masks_1W = np.empty((1, self.num_words), dtype=np.int32)
        GrammarState.write_masks([(self, Walk(self._matcher, (), 0))], masks_1W)
        return masks_1W[0]

    @staticmethod
    def write_masks(walks: Sequence[tuple[GrammarState, Walk]], masks_KW: NDArray[np.int32]) -> None:
        """Write `mask` of each place of these walks to its line: of all of one kind in one call, because threads
        compute them, and numpy takes about as long for one as for many."""
        alike: dict[tuple[type, frozenset[int]], list[tuple[GrammarState, Walk]]] = {}
        for state, walk in walks:
            alike.setdefault((type(state._matcher), state._stops), []).append((state, walk))
        for members in alike.values():
            first = members[0][0]
            is_complete_K = first._matcher.write_masks([walk for _, walk in members], masks_KW)
            lines = [line for _, walk in members for line in range(walk.line, walk.line + len(walk.tokens) + 1)]
            lines_B = np.array(lines)
            at = (lines_B[:, None], first._words)
            stops = np.where(is_complete_K[lines_B, None], first._stop_bits, np.int32(0))
            masks_KW[at] = (masks_KW[at] & first._text_bits) | stops

    def walk(self, path: Sequence[int], tokens: Sequence[int], line: int) -> Walk | None:
        """Start a walk after `path`, along `tokens`, which may all come. None: the matcher fails on the path."""
        matcher = self._matcher
        if path:
            matcher = matcher.fork()
            if matcher.advance_by(path) < len(path):
                return None
        return Walk(matcher, tokens, line)

    def is_end(self, token: int) -> bool:
        """Return whether the request ends with this token."""
        return token in self._stops

    def allows(self, token: int) -> bool:
        """Return whether a token may come next. Where a text is forced, the mask has one of its tokens, and this
        function allows all tokens with which the text can begin."""
        if token in self._stops and self._matcher.is_complete():
            return True
        return token not in self._no_text and self._matcher.allows(token)

    def enter(self, token: int) -> bool:
        """Go on with a token that may come next and does not end the request. Returns whether it did: the matcher can
        meet a limit of the library."""
        return self._matcher.advance(token)

    def enter_all(self, tokens: Sequence[int]) -> int:
        """Go on with the first tokens that may come and do not end the request; returns their number."""
        if not self._stops.isdisjoint(tokens):
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token in self._stops)]
        return self._matcher.advance_by(tokens)

    def back(self, num_tokens: int) -> None:
        self._matcher.back(num_tokens)

    def forced(self, most: int) -> list[int]:
        """The only token that may come next, and at most `most` - 1 tokens that may come after it and are likely: the
        masks decide. Empty: more tokens may come next, or the request cannot go on."""
        if self._matcher.is_complete():
            token = only_token(self.mask()) if self._matcher.may_be_forced() else None
            return [] if token is None else [token]
        tokens = self._matcher.forced_tokens(most)
        wrong = (i for i, token in enumerate(tokens) if token >= self._vocab_size or token in self._no_text)
        return tokens[: next(wrong, len(tokens))]

    def write_forced(self, token: int, mask_W: NDArray[np.int32]) -> None:
        """`mask`, where it is known that this token alone may come."""
        mask_W[:] = 0
        mask_W.view(np.uint32)[token >> 5] = 1 << (token & 31)


def _word(index: int, has: Callable[[int], bool]) -> np.int32:
    """A word of a mask that has these tokens."""
    return np.uint32(sum(1 << bit for bit in range(32) if has(32 * index + bit))).view(np.int32)
