"""Stop strings: which token completes one, and the text before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

_BROKEN = "\ufffd"  # what bytes that are no character are decoded to
_CONTEXT_CHARS = 8  # before the longest stop string, because decoders join and strip across tokens
_MAX_RUN = 16  # characters of several tokens, one after another, that are decoded in addition
_MAX_BYTES = 4  # bytes of a UTF-8 character
_MAX_LOOK = 32  # tokens whose own texts are joined before a text is decoded
_NOT_OWN = {ord(" "): None}


def adds_its_own_text(tokenizer: Any) -> bool:
    """Return whether a token adds the same characters to each text. Two kinds of characters are ignored: spaces, and
    those that are not ASCII, which can be made of several tokens. `tokenizer`: a transformers tokenizer."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return decoder is not None and _is_plain(json.loads(decoder.__getstate__()))


def _is_plain(decoder: dict[str, Any]) -> bool:
    match decoder:
        case {"type": "Sequence", "decoders": parts}:
            return all(map(_is_plain, parts))
        case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "} | {"type": "Strip", "content": " "}:
            return True
        case {"type": kind}:
            return kind in ("ByteLevel", "ByteFallback", "Metaspace", "Fuse")
    return False


class TokenTexts(dict[int, str | None]):
    """A map from a token id to its text when it is decoded alone; None: a special token, which no text shows. A text is
    decoded at its first use."""

    def __init__(self, decode: Callable[[Sequence[int]], str], show: Callable[[int], str]) -> None:
        """`decode` leaves special tokens out, and `show` does not."""
        super().__init__()
        self.decode = decode
        self._show = show
        self.own = _OwnTexts(self)

    def __missing__(self, token: int) -> str | None:
        text = self[token] = self.decode([token]) or (None if self._show(token) else "")
        return text


class _OwnTexts(dict[int, str]):
    """A map from a token id to the characters that the token adds at every position: see `adds_its_own_text`."""

    def __init__(self, texts: TokenTexts) -> None:
        super().__init__()
        self._texts = texts

    def __missing__(self, token: int) -> str:
        own = self[token] = _own_text(self._texts[token] or "")
        return own


class StopTokens(dict[int, bool]):
    """A map from a token id to whether the token can complete a stop string that ends with one of `last_chars`. This is
    decided at its first use. `plain`: see `adds_its_own_text`; with other tokenizers each token can. `others`: the
    tokens seen so far that cannot."""

    def __init__(self, texts: TokenTexts, last_chars: frozenset[str], *, plain: bool) -> None:
        super().__init__()
        self.plain = plain
        self.others: set[int] = set()
        self._texts = texts
        self._last_chars = last_chars
        # A space can come with any token. A broken character counts as text from the next token on.
        self._all = not plain or not last_chars.isdisjoint(" " + _BROKEN)
        self._has_others = not all(map(str.isascii, last_chars))

    def __missing__(self, token: int) -> bool:
        text = self._texts[token]
        found = self[token] = text is not None and (
            self._all or not self._last_chars.isdisjoint(text) or (self._has_others and _BROKEN in text)
        )
        if not found:
            self.others.add(token)
        return found


class StopChecker:
    """A `types.StopCheck`. Text is decoded only where a token can complete a stop string, and only its end.

    An unfinished character at the end, which is decoded to U+FFFD, is not text yet. The result does not depend on how
    many tokens a call brings.
    """

    def __init__(self, texts: TokenTexts, stops: Sequence[str], ends: StopTokens, min_tokens: int = 0) -> None:
        """`ends`: the tokens for the last characters of `stops`. `min_tokens`: a stop string that these first tokens
        complete is part of the text."""
        assert stops, "no stop strings"
        assert all(stops), stops
        self._texts = texts
        self._stops = tuple(stops)
        self._ends = ends
        self._min_tokens = min_tokens
        self._has_broken = any(_BROKEN in stop for stop in stops)  # bytes far before can be the cause
        self._num_chars = max(map(len, stops)) + _CONTEXT_CHARS
        self._marks = tuple(map(_own_text, stops)) if ends.plain and not self._has_broken else ("",)

    def __call__(self, tokens: Sequence[int], start: int, num_new: int) -> int | None:
        ends = self._ends
        if ends.others.issuperset(tokens[len(tokens) - num_new :]):
            return None
        first = max(len(tokens) - num_new, start + self._min_tokens)
        for position in range(first, len(tokens)):
            if ends[tokens[position]] and self._is_complete(tokens, start, position + 1):
                return position + 1 - start
        return None

    def _is_complete(self, tokens: Sequence[int], start: int, end: int) -> bool:
        """Return whether the text of the tokens from `start` to `end` has a stop string that counts."""
        if not self._can_be_complete(tokens, start, end):
            return False
        if not self._has_broken:
            texts = self._last_texts(tokens, start, end)
            if not any(stop in text for text in texts for stop in self._stops):
                return False
        # Once a request, as a rule: decided by the definition.
        decode = self._texts.decode
        num_old = len(decode(tokens[start : start + self._min_tokens]).rstrip(_BROKEN)) if self._min_tokens else 0
        text = decode(tokens[start:end]).rstrip(_BROKEN)
        return any(find_stop(text, stop, num_old) >= 0 for stop in self._stops)

    def _can_be_complete(self, tokens: Sequence[int], start: int, end: int) -> bool:
        """False if the characters that tokens surely add have no stop string. It is asked first, because to decode
        takes several times as long."""
        if "" in self._marks:
            return True
        own = self._texts.own
        last = own[tokens[end - 1]]
        wanted = len(last) + max(map(len, self._marks))
        first = max(start, end - _MAX_LOOK)
        for position in range(end - 2, first - 1, -1):
            if len(last) >= wanted:
                break
            last = own[tokens[position]] + last
        # A text of other characters has few of its own: it is decoded, for what is joined must not grow with the text.
        is_enough = first == start or len(last) >= wanted
        return not is_enough or any(mark in last for mark in self._marks)

    def _last_texts(self, tokens: Sequence[int], start: int, end: int) -> list[str]:
        """Return possible ends of the text, long enough for a stop string that the last token completes. There are
        several if the decoded part may begin within a character."""
        texts, decode = self._texts, self._texts.decode
        wanted, found = self._num_chars + len(texts[tokens[end - 1]] or ""), 0.0
        window: list[int] = []  # from the last one on
        for position in range(end - 1, start - 1, -1):
            text = texts[token := tokens[position]]
            if text is None:
                continue
            window.append(token)
            # In its context a token of another kind of tokenizer can be shorter.
            found += len(text) - text.count(_BROKEN) * (1 - 1 / _MAX_BYTES) if self._ends.plain else 1 / _MAX_BYTES
            # Some decoders make a run of bytes into characters only as a whole.
            if found >= wanted and (_BROKEN not in text or found >= wanted + _MAX_RUN):
                break
        window.reverse()
        ends = [decode(window)]
        for first in range(1, min(4, len(window))):
            if not ends[-1].startswith(_BROKEN):
                break
            ends.append(decode(window[first:]))
        return [text.rstrip(_BROKEN) for text in ends]


def _own_text(text: str) -> str:
    """The characters of a text that its tokens add wherever they are: see `adds_its_own_text`."""
    return text.translate(_NOT_OWN) if text.isascii() else "".join(c for c in text if c.isascii() and c != " ")


def find_stop(text: str, stop: str, num_old: int) -> int:
    """Return the index of the first `stop` in `text` that ends after the first `num_old` characters. Returns -1 if
    there is none."""
    return text.find(stop, max(0, num_old - len(stop) + 1))


def cut_at_stop(text: str, stops: Sequence[str], num_old: int = 0, include: bool = False) -> str | None:
    """`text` before the earliest stop string; None if it has none. `num_old`: see `find_stop`. `include`: the text with
    its stop string."""
    found = [(at, at + len(stop)) for stop in stops if (at := find_stop(text, stop, num_old)) >= 0]
    return text[: min(found)[include]] if found else None
