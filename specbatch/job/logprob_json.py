"""Log-probabilities as result lines have them, written as JSON at once: rows have thousands of them, and to make an
object for each and encode it later takes three times as long. What is the same each time is kept by token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specbatch.job.jsonl import Encoded
from specbatch.types import TokenLogprobs

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


class LogprobJson:
    """`token_text`: the text of one token, special tokens included."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        texts = _Parts(lambda token: json.dumps(token_text(token), ensure_ascii=False))
        self._token_text, self._texts = token_text, texts
        self._begin_native = _Parts(lambda token: f'{{"token": {texts[token]}, "token_id": {token}, "logprob": ')
        self._begin_chat = _Parts(lambda token: f'{{"token": {texts[token]}, "logprob": ')
        self._no_end = _Parts(lambda token: "")
        self._bytes = _Parts(lambda token: f', "bytes": {list(token_text(token).encode("utf-8"))}')

    def native(self, logprobs: TokenLogprobs, *, after_null: bool = False) -> Encoded:
        """A list of objects. `after_null`: these are of all tokens but the first, for which the list has null."""
        objects = _objects(logprobs, self._begin_native, self._no_end, "top")
        return Encoded(_list(["null", *objects] if after_null else objects))

    def chat(self, logprobs: TokenLogprobs) -> Encoded:
        content = _list(_objects(logprobs, self._begin_chat, self._bytes, "top_logprobs"))
        return Encoded(f'{{"content": {content}, "refusal": null}}')

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
            f'{{"tokens": {_list([texts[t] for t in ids])}, '
            f'"token_logprobs": {_list(own)}, '
            f'"top_logprobs": {_list(tops)}, '
            f'"text_offset": {list(starts)[: len(ids)]}}}'
        )


def _objects(logprobs: TokenLogprobs, begin: _Parts, end: _Parts, top_name: str) -> list[str]:
    """One for each token, and in it one for each of the likeliest: `begin`, the log-probability, `end`."""

    def opened(ids: Sequence[int], numbers: Sequence[str]) -> list[str]:
        return [f"{begin[t]}{number}{end[t]}" for t, number in zip(ids, numbers, strict=True)]

    ids, num_top, values = logprobs.token_ids, logprobs.num_top, logprobs.values
    if not num_top:
        return [f'{entry}, "{top_name}": []}}' for entry in opened(ids, _numbers(values))]
    top_ids = _columns(logprobs.top_ids.ravel().tolist(), num_top)
    # Of greedy text the likeliest tokens are those that were chosen. Bits are compared, for zeros can differ by sign.
    is_greedy = top_ids[0] == ids and values[:, 0].tobytes() == values[:, 1].tobytes()
    if is_greedy and num_top == 1:
        own = opened(ids, _numbers(values[:, 0]))
        return [f'{entry}, "{top_name}": [{entry}}}]}}' for entry in own]
    own_numbers, *others = _columns(_numbers(values), 1 + num_top)
    own = opened(ids, own_numbers)
    columns = [own if is_greedy else opened(top_ids[0], others[0]), *map(opened, top_ids[1:], others[1:])]
    tops = map("}, ".join, zip(*columns, strict=True))
    return [f'{entry}, "{top_name}": [{top}}}]}}' for entry, top in zip(own, tops, strict=True)]


def _columns(values: list[T], number: int) -> list[list[T]]:
    """Of values that are given `number` for each token."""
    return [values[i::number] for i in range(number)]


def _numbers(values: NDArray[np.float64]) -> list[str]:
    """As JSON has them: the fewest digits that give the same number back."""
    flat = values.ravel()
    if len(flat) < _FEW:
        return list(map(_number, flat.tolist()))
    import pyarrow as pa  # here, because most jobs have no log-probabilities

    # A third of the time that `repr` takes, and the same digits. It writes whole and small numbers in another way.
    texts: list[str] = pa.array(flat).cast(pa.string()).to_pylist()
    size = np.abs(flat)
    for i in np.flatnonzero(~((size >= 1e-4) & (size < -LOWEST_LOGPROB) & (size != np.rint(size)))).tolist():
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
