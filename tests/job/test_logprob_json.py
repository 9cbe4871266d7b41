"""Log-probabilities are written as if each were an object that is encoded with its line."""

from __future__ import annotations

import json
import math
from itertools import accumulate
from typing import Any

import pytest

from specbatch.job.jsonl import Encoded, encode_line
from specbatch.job.logprob_json import LOWEST_LOGPROB, LogprobJson
from specbatch.types import TokenLogprob, TokenLogprobs

TEXTS = {1: " a", 2: '\n"\\\x7f', 3: "é😀", 4: " a", 5: "<|end|>"}
SMALL = -1.1920928244535389e-07
ALONE = [TokenLogprob(1, -0.25), TokenLogprob(5, SMALL)]
GREEDY = [TokenLogprob(2, -0.1, ((2, -0.1),)), TokenLogprob(3, SMALL, ((3, SMALL),))]
ZEROS = [*GREEDY, TokenLogprob(4, 0.0, ((4, -0.0),))]
SAMPLED = [*GREEDY, TokenLogprob(4, -2.0, ((1, -0.5),)), TokenLogprob(5, math.nan, ((5, math.inf),))]
SEVERAL = [
    TokenLogprob(2, -0.1, ((2, -0.1), (1, -2.5), (4, -3.0))),
    TokenLogprob(3, -7.0, ((1, SMALL), (4, -9.5), (3, -math.inf))),
    TokenLogprob(5, -math.inf, ((5, math.nan), (1, -1e5), (2, -1e6))),
]


def at_least(value: float) -> float:
    return LOWEST_LOGPROB if value < LOWEST_LOGPROB else value


def native(lp: TokenLogprob) -> dict[str, Any]:
    top = [{"token": TEXTS[t], "token_id": t, "logprob": at_least(v)} for t, v in lp.top]
    return {"token": TEXTS[lp.token_id], "token_id": lp.token_id, "logprob": at_least(lp.logprob), "top": top}


def chat_entry(token: int, value: float) -> dict[str, Any]:
    return {"token": TEXTS[token], "logprob": at_least(value), "bytes": list(TEXTS[token].encode())}


def chat(scores: list[TokenLogprob]) -> dict[str, Any]:
    content = [
        {**chat_entry(lp.token_id, lp.logprob), "top_logprobs": [chat_entry(*top) for top in lp.top]} for lp in scores
    ]
    return {"content": content, "refusal": None}


def completion(scores: list[TokenLogprob]) -> dict[str, Any]:
    tokens = [TEXTS[lp.token_id] for lp in scores]
    return {
        "tokens": tokens,
        "token_logprobs": [at_least(lp.logprob) for lp in scores],
        "top_logprobs": [{TEXTS[t]: at_least(v) for t, v in lp.top} for lp in scores],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)],
    }


@pytest.mark.parametrize("id", ["x", "\ud800 é", math.nan])
@pytest.mark.parametrize("scores", [ALONE, GREEDY, ZEROS, SAMPLED, SEVERAL, SEVERAL[:1], []])
def test_bytes_are_those_of_objects(scores: list[TokenLogprob], id: Any) -> None:
    """Also in lines that are ASCII, or have a number that JSON lacks."""
    written, columns = LogprobJson(TEXTS.__getitem__), TokenLogprobs.of(scores)
    assert repr(list(columns)) == repr(scores)  # of NaN, too
    assert repr(columns[-2:]) == repr(scores[-2:])
    for encoded, plain in [
        (written.native(columns, after_null=True), [None, *map(native, scores)]),
        (written.chat(columns), chat(scores)),
        (written.completion(columns), completion(scores)),
    ]:
        line = {"id": id, "first": encoded, "in": [{"again": encoded}], "last": "é"}
        assert encode_line(line) == encode_line({"id": id, "first": plain, "in": [{"again": plain}], "last": "é"})


def test_encoded_values_stay_in_their_place() -> None:
    line = {"a": [Encoded("1"), Encoded('"é"')], "b": {"c": Encoded("[]")}, "text": '"1"'}
    assert json.loads(encode_line(line)) == {"a": [1, "é"], "b": {"c": []}, "text": '"1"'}
