"""Log-probabilities as result lines have them, written as JSON at once: rows have thousands of them, and to make an
object for each and encode it later takes three times as long. What is the same each time is kept by token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specbatch.job.jsonl import Encoded
from specbatch.logprobs import TokenLogprobs

T = TypeVar("T")
_FEW = 64  # numbers for which Python takes no longer than a library's call
LOWEST_LOGPROB = -9999.0  # replaces minus infinity, which JSON lacks; the value is OpenAI's


class _Parts(dict[int, str]):
    """By token id, each made at its first use; bounded by the vocabulary."""

    def __init__(self, make: Callable[[int], str]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> str:
        part = self[token] = self._make(token)
        return part

    def of(self, tokens: Iterable[int]) -> list[str]:
        return list(map(self.__getitem__, tokens))


class _Format:
    """How tokens are written, each with a list of likely ones. `begin`: an object of a token up to its number. `end`:
    what follows the number; None: nothing."""

    def __init__(self, begin: Callable[[int], str], end: Callable[[int], str] | None, top_name: str) -> None:
        self._first = _Parts(lambda token: f", {begin(token)}")
        self._first_top = _Parts(lambda token: f', "{top_name}": [{begin(token)}')
        self._next_top = _Parts(lambda token: f"}}, {begin(token)}")
        self._end = None if end is None else _Parts(end)
        self._last = f', "{top_name}": []}}'

    def objects(self, logprobs: TokenLogprobs) -> str:
        """One for each token, joined as in a list."""
        ids, k, values = logprobs.token_ids, logprobs.num_top, logprobs.values
        top_ids = _columns(logprobs.top_ids.ravel().tolist(), k)
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
    """`token_text`: the text of one token, special tokens included."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        self._texts = texts = _Parts(lambda token: json.dumps(token_text(token), ensure_ascii=False))
        self._token_text = token_text
        self._native = _Format(
            lambda token: f'{{"token": {texts[token]}, "token_id": {token}, "logprob": ', None, "top"
        )
        self._chat = _Format(
            lambda token: f'{{"token": {texts[token]}, "logprob": ',
            lambda token: f', "bytes": {list(token_text(token).encode("utf-8"))}',
            "top_logprobs",
        )

    def native(self, logprobs: TokenLogprobs, *, after_null: bool = False) -> Encoded:
        """A list of objects. `after_null`: these are of all tokens but the first, for which the list has null."""
        null = "null" if not logprobs.token_ids else "null, "
        return Encoded(f"[{null if after_null else ''}{self._native.objects(logprobs)}]")

    def chat(self, logprobs: TokenLogprobs) -> Encoded:
        return Encoded(f'{{"content": [{self._chat.objects(logprobs)}], "refusal": null}}')

    def completion(self, logprobs: TokenLogprobs) -> Encoded:
        texts, ids, k = self._texts, logprobs.token_ids, logprobs.num_top
        own, *others = _columns(_numbers(logprobs.values), 1 + k)
        columns = [
            [(texts[t], number) for t, number in zip(top_ids, numbers, strict=True)]
            for top_ids, numbers in zip(_columns(logprobs.top_ids.ravel().tolist(), k), others, strict=True)
        ]
        # Tokens with the same text are one key: the first one's place, the last one's value.
        tops = [_object(dict(pairs)) for pairs in zip(*columns, strict=True)] if columns else ["{}"] * len(ids)
        starts = accumulate((len(self._token_text(t)) for t in ids[:-1]), initial=0)
        return Encoded(
            f'{{"tokens": {_list(texts.of(ids))}, '
            f'"token_logprobs": {_list(own)}, '
            f'"top_logprobs": {_list(tops)}, '
            f'"text_offset": {list(starts)[: len(ids)]}}}'
        )


def _columns(values: list[T], number: int) -> list[list[T]]:
    """Of values that are given `number` for each token."""
    return [values[i::number] for i in range(number)]


def _interleaved(columns: Sequence[list[str]]) -> str:
    """Row by row. Columns are joined at once: to make a text of each row takes three times as long."""
    parts = [""] * (len(columns) * len(columns[0]))
    for i, column in enumerate(columns):
        parts[i :: len(columns)] = column
    return "".join(parts)


def _numbers(values: NDArray[np.float64]) -> list[str]:
    """As JSON has them: the fewest digits that give the same number back."""
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
    return repr(LOWEST_LOGPROB) if value < LOWEST_LOGPROB else "null"  # as `encode_line` has NaN and infinity


def _list(parts: Sequence[str]) -> str:
    return f"[{', '.join(parts)}]"


def _object(parts: dict[str, str]) -> str:
    return f"{{{', '.join([f'{name}: {value}' for name, value in parts.items()])}}}"
