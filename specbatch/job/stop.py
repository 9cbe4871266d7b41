"""Stop strings over a growing token sequence, at a cost that does not grow with its length."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Tokens without visible text (special tokens, pieces of a character) that are held back before the window moves on
# regardless: characters take at most 4 bytes, so a longer run is no character in the making.
_MAX_HELD = 8


class StopChecker:
    """A `types.StopCheck`: the number of tokens to keep once a stop string is complete, else None.

    Tokens are decoded one by one behind a short window of earlier ones (decoders join and strip across tokens), and an
    unfinished character (a trailing U+FFFD) waits for its last byte. The answer is the same however many tokens
    arrive per call.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        assert stops, "no stop strings"
        assert all(stops), stops
        self._decode = decode
        self._stops = tuple(stops)
        self._tail_chars = max(map(len, stops)) - 1
        self._seen = 0  # tokens fed
        self._reset()

    def __call__(self, tokens: Sequence[int], num_new: int) -> int | None:
        if len(tokens) - num_new < self._seen:  # the caller went back (preemption): start again
            self._reset()
        for position in range(self._seen, len(tokens)):
            hit = self._feed(tokens, position)
            self._seen = position + 1
            if hit and self._seen > len(tokens) - num_new:
                return self._seen
        return None

    def _reset(self) -> None:
        self._seen = 0
        self._window = 0  # tokens[window:read] are context that is decoded again
        self._read = 0  # tokens[:read] are whole characters, or as many as are held back
        self._given = 0  # characters of decode(tokens[window:]) that have been searched
        self._tail = ""  # the last characters, where a stop string may have begun

    def _feed(self, tokens: Sequence[int], position: int) -> bool:
        end = position + 1
        text = self._decode(tokens[self._window : end])
        whole = text.rstrip("\ufffd")  # a token may end in the middle of a character and still complete others
        fresh = whole[self._given :]
        if (whole == text and fresh) or end - self._read >= _MAX_HELD:
            self._window = max(self._read, end - _MAX_HELD)  # short, through endless special tokens, too
            self._read = end
            context = self._decode(tokens[self._window : end])
            # A character may be in the making even now, behind special tokens: its last byte is still to come.
            self._given = len(context if whole == text else context.rstrip("\ufffd"))
        else:
            self._given = max(self._given, len(whole))
        region = self._tail + fresh
        self._tail = region[-self._tail_chars :] if self._tail_chars else ""
        return any(stop in region for stop in self._stops)


def cut_at_stop(text: str, stops: Sequence[str]) -> str | None:
    """`text` before the earliest stop string; None where it holds none."""
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(found)] if found else None
