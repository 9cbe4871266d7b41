"""The bytes that each token adds to a text.

A character can be made of several tokens, and a decoder shows each of these alone as U+FFFD. So the bytes of such a
token are read from its name in the vocabulary: letters for bytes (byte-level BPE), or `<0xF0>` (byte fallback). All
other tokens add text, and the decoder itself says which: some decoders drop the space of the first token, or put one
before all others.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

_BROKEN = "\ufffd"  # what bytes that are no character are decoded to
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_VISIBLE = "a0.e1"  # one of these is a token of each vocabulary that can write text
# How a decoder writes bytes that are no character: one U+FFFD for each beginning of a character, or one for each byte
# of the whole run.
ByteKind = Literal["none", "level", "fallback"]


class TokenPiece(NamedTuple):
    """The name and the bytes that a token adds to a text."""

    name: str  # its text; of bytes that are no text their hexadecimal digits; of a token without text its name
    data: bytes  # empty: a special token, which the text leaves out
    joins: bool  # the decoder makes characters of these bytes together with those of the tokens next to it

    @property
    def is_text(self) -> bool:
        """Return whether the name is the text of the bytes."""
        return self.name.encode() == self.data


class TokenPieces(dict[int, TokenPiece]):
    """A map from a token id to its piece, and from `~id` to its piece if it is the first one of a text. A piece is
    found at its first use; the vocabulary bounds their number."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        show: Callable[[int], str],
        token_bytes: Callable[[int], bytes | None] = lambda token: None,
        *,
        kind: ByteKind = "none",
        before: Sequence[int] = (),
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """`decode` leaves special tokens out, and `show` does not. `token_bytes`: of a token that can be a part of a
        character; None of others. `before`: a token with a visible text, after which others are decoded. `marks`:
        tokens after which a new text begins."""
        super().__init__()
        self._decode = decode
        self._show = show
        self._token_bytes = token_bytes
        self._kind = kind
        self._before = list(before)
        self._text_before = decode(self._before) if before else ""
        self._marks = dict(marks or {})

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        decode: Callable[[Sequence[int]], str],
        show: Callable[[int], str],
        marks: Mapping[int, str],
    ) -> TokenPieces:
        """Make the pieces of a transformers tokenizer."""
        kind = _kind_of(tokenizer)
        token_bytes = _READERS[kind](tokenizer)
        return cls(decode, show, token_bytes, kind=kind, before=_visible_token(tokenizer, decode), marks=marks)

    def __missing__(self, key: int) -> TokenPiece:
        piece = self[key] = self._find(key)
        return piece

    def _find(self, key: int) -> TokenPiece:
        token = ~key if key < 0 else key
        text = self._decode([*self._before, token]).removeprefix(self._text_before)
        if not text:
            return TokenPiece(self._show(token), b"", joins=False)
        if key < 0:
            text = self._decode([token])
        data = self._token_bytes(token) if text else None
        if data is None or (self._kind == "level" and _BROKEN not in text):
            return TokenPiece(text, text.encode(), joins=False)
        return TokenPiece(_text_of(data), data, joins=True)

    def keys_of(self, token_ids: Sequence[int]) -> list[int]:
        """The keys of the tokens of one text."""
        keys, marks = list(token_ids), self._marks
        begins = [0]
        if not marks.keys().isdisjoint(token_ids):
            begins += [i + 1 for i, token in enumerate(token_ids) if token in marks]
        for begin in begins:
            if (first := self.first_of(keys, begin)) is not None:
                keys[first] = ~keys[first]
        return keys

    def first_of(self, token_ids: Sequence[int], begin: int = 0) -> int | None:
        """The index of the first token, from `begin` on, that adds something: decoders do not get the others."""
        return next((i for i in range(begin, len(token_ids)) if self[token_ids[i]].data), None)

    def offsets(self, keys: Sequence[int]) -> list[int]:
        """Return, for each token, the index of the character of the text in which it begins."""
        pieces = [self[key] for key in keys]
        if not any(piece.joins for piece in pieces):
            sizes = [len(piece.name) if piece.data else 0 for piece in pieces]
            return list(accumulate(sizes[:-1], initial=0))[: len(pieces)]
        found: list[int] = []
        offset = 0
        for run in _runs(pieces):
            ends = list(accumulate(self._sizes(b"".join(piece.data for piece in run))))
            starts = accumulate((len(piece.data) for piece in run[:-1]), initial=0)
            found += [offset + bisect_right(ends, start) for start in starts]
            offset += len(ends)
        return found

    def _sizes(self, data: bytes) -> list[int]:
        """The numbers of bytes that the decoder makes characters of."""
        sizes: list[int] = []
        start = 0
        while start < len(data):
            try:
                text, num_broken = data[start:].decode(), 0
            except UnicodeDecodeError as error:
                if self._kind == "fallback":
                    return [1] * len(data)
                text, num_broken = data[start : start + error.start].decode(), error.end - error.start
            found = [*(len(character.encode()) for character in text), *([num_broken] if num_broken else [])]
            sizes += found
            start += sum(found)
        return sizes


def _runs(pieces: Sequence[TokenPiece]) -> Iterator[list[TokenPiece]]:
    """Pieces whose bytes are decoded together. One without bytes ends no run."""
    run: list[TokenPiece] = []
    joins = False
    for piece in pieces:
        if run and piece.data and not (joins and piece.joins):
            yield run
            run = []
        run.append(piece)
        joins = piece.joins if piece.data else joins
    if run:
        yield run


def _text_of(data: bytes) -> str:
    """The text of bytes, or their digits, as OpenAI writes them: `\\xf0\\x9f`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def _kind_of(tokenizer: Any) -> ByteKind:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return "none"
    state = json.loads(decoder.__getstate__())
    kinds = {part["type"] for part in (state, *state.get("decoders", ()))}
    return "level" if "ByteLevel" in kinds else "fallback" if "ByteFallback" in kinds else "none"


def _visible_token(tokenizer: Any, decode: Callable[[Sequence[int]], str]) -> list[int]:
    for text in _VISIBLE:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids and decode(ids[-1:]).strip() == text:
            return list(ids[-1:])
    return []


def _no_bytes(tokenizer: Any) -> Callable[[int], bytes | None]:
    return lambda token: None


def _bytes_of_letters(tokenizer: Any) -> Callable[[int], bytes | None]:
    from specbatch.models.formats.tokenizer import byte_letters  # here, because it imports transformers

    bytes_of = {letter: byte for byte, letter in enumerate(byte_letters())}

    def read(token: int) -> bytes | None:
        name = tokenizer.convert_ids_to_tokens(token)
        # The decoder takes a name with another letter for a text.
        is_bytes = isinstance(name, str) and all(letter in bytes_of for letter in name)
        return bytes(bytes_of[letter] for letter in name) if is_bytes else None

    return read


def _bytes_of_fallback(tokenizer: Any) -> Callable[[int], bytes | None]:
    def read(token: int) -> bytes | None:
        name = tokenizer.convert_ids_to_tokens(token)
        found = _FALLBACK.fullmatch(name) if isinstance(name, str) else None
        return None if found is None else bytes([int(found[1], 16)])

    return read


_READERS: Mapping[ByteKind, Callable[[Any], Callable[[int], bytes | None]]] = {
    "none": _no_bytes,
    "level": _bytes_of_letters,
    "fallback": _bytes_of_fallback,
}
