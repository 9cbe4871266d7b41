"""Log-probabilities as result lines have them, written as JSON at once: rows have thousands of them, and to make an
object for each and encode it later takes three times as long. What is the same each time is kept by token."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from specbatch.job.jsonl import Encoded
from specbatch.types import TokenLogprob

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

    def native(self, logprobs: Sequence[TokenLogprob | None]) -> Encoded:
        """A list of objects, or null for a token that comes after none."""
        return Encoded(_objects(logprobs, self._begin_native, self._no_end, "top"))

    def chat(self, logprobs: Sequence[TokenLogprob]) -> Encoded:
        content = _objects(logprobs, self._begin_chat, self._bytes, "top_logprobs")
        return Encoded(f'{{"content": {content}, "refusal": null}}')

    def completion(self, logprobs: Sequence[TokenLogprob]) -> Encoded:
        texts, ids = self._texts, [lp.token_id for lp in logprobs]
        # Tokens with the same text are one key: the first one's place, the last one's value.
        tops = [{texts[t]: _number(value) for t, value in lp.top} for lp in logprobs]
        starts = accumulate((len(self._token_text(t)) for t in ids[:-1]), initial=0)
        return Encoded(
            f'{{"tokens": {_list([texts[t] for t in ids])}, '
            f'"token_logprobs": {_list([_number(lp.logprob) for lp in logprobs])}, '
            f'"top_logprobs": {_list([_object(top) for top in tops])}, '
            f'"text_offset": {list(starts)[: len(ids)]}}}'
        )


def _objects(logprobs: Sequence[TokenLogprob | None], begin: _Parts, end: _Parts, top_name: str) -> str:
    """One for each token, and in it one for each of the likeliest: `begin`, the log-probability, `end`."""
    found = []
    for lp in logprobs:
        if lp is None:
            found.append("null")
            continue
        token, value, top = lp
        own = f"{begin[token]}{_number(value)}{end[token]}"
        # The likeliest token is mostly the chosen one. Zeros can differ by their sign.
        if top and value and top[0] == (token, value):
            first, others = own + "}", top[1:]
            rest = "".join([f", {begin[t]}{_number(v)}{end[t]}}}" for t, v in others]) if others else ""
            found.append(f'{own}, "{top_name}": [{first}{rest}]}}')
        else:
            entries = _list([f"{begin[t]}{_number(v)}{end[t]}}}" for t, v in top])
            found.append(f'{own}, "{top_name}": {entries}}}')
    return _list(found)


def _number(value: float) -> str:
    if LOWEST_LOGPROB <= value < math.inf:
        return repr(value)
    return repr(LOWEST_LOGPROB) if value < LOWEST_LOGPROB else "null"  # as `encode_line` has NaN and infinity


def _list(parts: Sequence[str]) -> str:
    return f"[{', '.join(parts)}]"


def _object(parts: dict[str, str]) -> str:
    return f"{{{', '.join([f'{name}: {value}' for name, value in parts.items()])}}}"
