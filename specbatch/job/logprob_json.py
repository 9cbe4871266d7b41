"""Log-probabilities as result lines have them, written as JSON at once: rows have thousands of them, and to make an
object for each and encode it later takes three times as long. What is the same each time is kept by token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeVar

from specbatch.job.jsonl import Encoded
from specbatch.types import TokenLogprobs

T = TypeVar("T")
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
        texts, ids, (own, *others) = self._texts, logprobs.token_ids, _columns(logprobs.values, 1 + logprobs.num_top)
        columns = [
            [(texts[t], number) for t, number in zip(top_ids, _numbers(values), strict=True)]
            for top_ids, values in zip(_columns(logprobs.top_ids, logprobs.num_top), others, strict=True)
        ]
        # Tokens with the same text are one key: the first one's place, the last one's value.
        tops = [_object(dict(pairs)) for pairs in zip(*columns, strict=True)] if columns else ["{}"] * len(ids)
        starts = accumulate((len(self._token_text(t)) for t in ids[:-1]), initial=0)
        return Encoded(
            f'{{"tokens": {_list([texts[t] for t in ids])}, '
            f'"token_logprobs": {_list(_numbers(own))}, '
            f'"top_logprobs": {_list(tops)}, '
            f'"text_offset": {list(starts)[: len(ids)]}}}'
        )


def _objects(logprobs: TokenLogprobs, begin: _Parts, end: _Parts, top_name: str) -> list[str]:
    """One for each token, and in it one for each of the likeliest: `begin`, the log-probability, `end`."""

    def opened(ids: Sequence[int], values: Sequence[float]) -> list[str]:
        return [f"{begin[t]}{number}{end[t]}" for t, number in zip(ids, _numbers(values), strict=True)]

    ids, num_top = logprobs.token_ids, logprobs.num_top
    own_values, *others = _columns(logprobs.values, 1 + num_top)
    own, top_ids = opened(ids, own_values), _columns(logprobs.top_ids, num_top)
    if not num_top:
        return [f'{entry}, "{top_name}": []}}' for entry in own]
    # Of greedy text the likeliest tokens are those that were chosen. Zeros can differ by their sign.
    is_greedy = top_ids[0] == ids and others[0] == own_values and 0.0 not in own_values
    columns = [own if is_greedy else opened(top_ids[0], others[0]), *map(opened, top_ids[1:], others[1:])]
    tops = columns[0] if num_top == 1 else map("}, ".join, zip(*columns, strict=True))
    return [f'{entry}, "{top_name}": [{top}}}]}}' for entry, top in zip(own, tops, strict=True)]


def _columns(values: list[T], number: int) -> list[list[T]]:
    """Of values that are given `number` for each token."""
    return [values[i::number] for i in range(number)]


def _numbers(values: Sequence[float]) -> list[str]:
    if values and not (min(values) >= LOWEST_LOGPROB and math.isfinite(sum(values))):
        return [_number(value) for value in values]
    return repr(values)[1:-1].split(", ") if values else []


def _number(value: float) -> str:
    if LOWEST_LOGPROB <= value < math.inf:
        return repr(value)
    return repr(LOWEST_LOGPROB) if value < LOWEST_LOGPROB else "null"  # as `encode_line` has NaN and infinity


def _list(parts: Sequence[str]) -> str:
    return f"[{', '.join(parts)}]"


def _object(parts: dict[str, str]) -> str:
    return f"{{{', '.join([f'{name}: {value}' for name, value in parts.items()])}}}"
