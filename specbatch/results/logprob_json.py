"""Log-probabilities as result lines have them, written as JSON at once: rows have thousands of them, and to make an
object for each and encode it later takes three times as long. What is the same each time is kept by token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specbatch.files.jsonl import Encoded
from specbatch.logprobs import LOWEST_LOGPROB, TokenLogprobs
from specbatch.text.token_pieces import TokenPiece, TokenPieces

T = TypeVar("T")
_FEW = 64  # numbers for which Python takes no longer than a library's call


class _Parts(dict[int, str]):
    """Parts of JSON by key of `TokenPieces`. Each is made at its first use, and the vocabulary bounds their number."""

    def __init__(self, make: Callable[[int], str]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> str:
        part = self[token] = self._make(token)
        return part

    def of(self, tokens: Iterable[int]) -> list[str]:
        return list(map(self.__getitem__, tokens))


class _Format:
    """Writer of tokens, each with a list of likely ones. `begin`: the object of a token up to its number. `end`: the
    text that follows the number; None: nothing."""

    def __init__(self, begin: Callable[[int], str], end: Callable[[int], str] | None, top_name: str) -> None:
        self._first = _Parts(lambda token: f", {begin(token)}")
        self._first_top = _Parts(lambda token: f', "{top_name}": [{begin(token)}')
        self._next_top = _Parts(lambda token: f"}}, {begin(token)}")
        self._end = None if end is None else _Parts(end)
        self._last = f', "{top_name}": []}}'

    def objects(self, logprobs: TokenLogprobs, ids: list[int]) -> str:
        """One for each token, joined as in a list. `ids`: the tokens, or the keys of their pieces in a text."""
        k, values = logprobs.num_top, logprobs.values
        top_ids = _top_columns(logprobs, ids)
        # Of greedy text the likeliest tokens are those that were chosen. Bits are compared, for zeros can differ by
        # their sign.
        is_greedy = k > 0 and top_ids[0] == ids and values[:, 0].tobytes() == values[:, 1].tobytes()
        numbers = _columns(_numbers(values[:, is_greedy:]), 1 + k - is_greedy)
        if is_greedy:
            numbers.insert(0, numbers[0])
        columns = self._column(self._first, ids, numbers[0])
        for i, (of_top, of_number) in enumerate(zip(top_ids, numbers[1:], strict=True)):
            columns += self._column(self._next_top if i else self._first_top, of_top, of_number)
        columns.append(["}]}" if k else self._last] * len(ids))
        return _interleaved(columns)[2:]

    def _column(self, begin: _Parts, ids: list[int], numbers: list[str]) -> list[list[str]]:
        return [begin.of(ids), numbers] if self._end is None else [begin.of(ids), numbers, self._end.of(ids)]


class LogprobJson:
    """Writes the log-probabilities of tokens that `pieces` has the text of."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._texts = _Parts(lambda key: json.dumps(_completion_name(pieces[key]), ensure_ascii=False))
        self._native = _Format(lambda key: _native_begin(pieces[key], key), None, "top")
        self._prompt = _Format(lambda key: _native_begin(_as_it_is(pieces[key]), key), None, "top")
        self._chat = _Format(
            lambda key: f'{{"token": {_quoted(pieces[key].name)}, "logprob": ',
            lambda key: f', "bytes": {list(pieces[key].data)}',
            "top_logprobs",
        )

    def prompt(self, logprobs: TokenLogprobs, *, from_first: bool, first_text: int | None = None) -> Encoded:
        """A list of objects. The prompt has the text of its special tokens, too. `from_first`: these are of all tokens
        but the first, for which the list has null. `first_text`: the index of the token that begins the prompt's text,
        if that is one of these."""
        keys = list(logprobs.token_ids)
        if first_text is not None:
            keys[first_text] = ~keys[first_text]
        null = "null" if not keys else "null, "
        return Encoded(f"[{null if from_first else ''}{self._prompt.objects(logprobs, keys)}]")

    def native(self, logprobs: TokenLogprobs) -> Encoded:
        """A list of objects."""
        return Encoded(f"[{self._native.objects(logprobs, self._pieces.keys_of(logprobs.token_ids))}]")

    def chat(self, logprobs: TokenLogprobs) -> Encoded:
        objects = self._chat.objects(logprobs, self._pieces.keys_of(logprobs.token_ids))
        return Encoded(f'{{"content": [{objects}], "refusal": null}}')

    def completion(self, logprobs: TokenLogprobs) -> Encoded:
        texts, keys, k = self._texts, self._pieces.keys_of(logprobs.token_ids), logprobs.num_top
        own, *others = _columns(_numbers(logprobs.values), 1 + k)
        columns = [
            list(zip(top_keys, texts.of(top_keys), numbers, strict=True))
            for top_keys, numbers in zip(_top_columns(logprobs, keys), others, strict=True)
        ]
        tops = list(map(_top_object, zip(*columns, strict=True))) if columns else ["{}"] * len(keys)
        return Encoded(
            f'{{"tokens": {_list(texts.of(keys))}, '
            f'"token_logprobs": {_list(own)}, '
            f'"top_logprobs": {_list(tops)}, '
            f'"text_offset": {self._pieces.offsets(keys)}}}'
        )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_it_is(piece: TokenPiece) -> TokenPiece:
    """A piece of a text that special tokens are not left out of."""
    return piece if piece.data else piece._replace(data=piece.name.encode())


def _native_begin(piece: TokenPiece, key: int) -> str:
    """An object up to its number. It has the bytes if these are not those of the name."""
    data = "" if piece.is_text else f', "bytes": {list(piece.data)}'
    return f'{{"token": {_quoted(piece.name)}{data}, "token_id": {_token_of(key)}, "logprob": '


def _completion_name(piece: TokenPiece) -> str:
    """The name that OpenAI's completions give: they have no field for bytes."""
    return f"bytes:{piece.name}" if piece.data and not piece.is_text else piece.name


def _token_of(key: int) -> int:
    return ~key if key < 0 else key


def _top_columns(logprobs: TokenLogprobs, ids: list[int]) -> list[list[int]]:
    """The likely tokens, most likely first: as keys where `ids` has a key."""
    k = logprobs.num_top
    columns = _columns(logprobs.top_ids.ravel().tolist(), k)
    for i in [i for i, key in enumerate(ids) if key < 0]:
        for column in columns:
            column[i] = ~column[i]
    return columns


def _top_object(tops: Sequence[tuple[int, str, str]]) -> str:
    """The likely tokens of one position. Of tokens with the same text the likeliest has it as its key, and others have
    their id, so that none is lost."""
    parts: dict[str, str] = {}
    for key, text, number in tops:
        parts[f'"token_id:{_token_of(key)}"' if text in parts else text] = number
    return f"{{{', '.join([f'{name}: {value}' for name, value in parts.items()])}}}"


def _columns(values: list[T], number: int) -> list[list[T]]:
    """Split values that have `number` entries for each token into `number` columns."""
    return [values[i::number] for i in range(number)]


def _interleaved(columns: Sequence[list[str]]) -> str:
    """Row by row. Columns are joined at once: to make a text of each row takes three times as long."""
    parts = [""] * (len(columns) * len(columns[0]))
    for i, column in enumerate(columns):
        parts[i :: len(columns)] = column
    return "".join(parts)


def _numbers(values: NDArray[np.float64]) -> list[str]:
    """Write numbers as JSON does: with the fewest digits that give the same number back."""
    flat = values.ravel()
    if len(flat) < _FEW:
        return list(map(_number, flat.tolist()))
    import pyarrow as pa  # here, because most jobs have no log-probabilities

    # A third of the time that `repr` takes, and the same digits. It writes whole and small numbers in another way.
    texts: list[str] = pa.array(flat).cast(pa.string()).to_pylist()
    as_python = (flat <= -1e-4) & (flat > LOWEST_LOGPROB) & (flat != np.rint(flat))
    for i in np.flatnonzero(~as_python).tolist():
        texts[i] = _number(float(flat[i]))
    return texts


def _number(value: float) -> str:
    if LOWEST_LOGPROB <= value < math.inf:
        return repr(value)
    # `encode_line` also writes null for NaN and infinity.
    return repr(LOWEST_LOGPROB) if value < LOWEST_LOGPROB else "null"


def _list(parts: Sequence[str]) -> str:
    return f"[{', '.join(parts)}]"
