"""Log-probabilities are written as if each were an object that is encoded with its line."""

from __future__ import annotations

import json
import math
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from specbatch.files.jsonl import Encoded, encode_line
from specbatch.logprobs import LOWEST_LOGPROB, TokenLogprob, TokenLogprobs
from specbatch.results.logprob_json import LogprobJson
from specbatch.text.token_pieces import TokenPieces

TEXTS = {1: " a", 2: '\n"\\\x7f', 3: "é😀", 4: " a", 5: "<|end|>"}
PIECES = TokenPieces(lambda ids: "".join(map(TEXTS.__getitem__, ids)), TEXTS.__getitem__)
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


def by_text(tops: tuple[tuple[int, float], ...]) -> dict[str, float]:
    """Of tokens with the same text the first one has it as its key."""
    found: dict[str, float] = {}
    for token, value in tops:
        found[f"token_id:{token}" if TEXTS[token] in found else TEXTS[token]] = at_least(value)
    return found


def completion(scores: list[TokenLogprob]) -> dict[str, Any]:
    tokens = [TEXTS[lp.token_id] for lp in scores]
    return {
        "tokens": tokens,
        "token_logprobs": [at_least(lp.logprob) for lp in scores],
        "top_logprobs": [by_text(lp.top) for lp in scores],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)],
    }


@pytest.mark.parametrize("id", ["x", "\ud800 é", math.nan])
@pytest.mark.parametrize("scores", [ALONE, GREEDY, ZEROS, SAMPLED, SEVERAL, SEVERAL[:1], []])
def test_bytes_are_those_of_objects(scores: list[TokenLogprob], id: Any) -> None:
    """Also in lines that are ASCII, or have a number that JSON lacks."""
    written, columns = LogprobJson(PIECES), TokenLogprobs.of(scores)
    assert repr(list(columns)) == repr(scores)  # of NaN, too
    assert repr(columns[-2:]) == repr(scores[-2:])
    for encoded, plain in [
        (written.prompt(columns, from_first=True), [None, *map(native, scores)]),
        (written.native(columns), [*map(native, scores)]),
        (written.chat(columns), chat(scores)),
        (written.completion(columns), completion(scores)),
    ]:
        line = {"id": id, "first": encoded, "in": [{"again": encoded}], "last": "é"}
        assert encode_line(line) == encode_line({"id": id, "first": plain, "in": [{"again": plain}], "last": "é"})


def random_scores(num_top: int, *, greedy: bool) -> list[TokenLogprob]:
    """Numbers of all sizes, of which some are whole, tiny, or none that JSON has."""
    rng = np.random.default_rng(3)
    usual = -rng.exponential(1.0, 300).astype(np.float32).astype(np.float64)
    exponents = -(10 ** rng.uniform(-12, 5, 300))
    with np.errstate(invalid="ignore"):  # of NaN
        bits = rng.integers(0, 2**32, 300, dtype=np.uint64).astype(np.uint32).view(np.float32).astype(np.float64)
    special = [0.0, -0.0, -1.0, -1e-4, -9999.0, -9999.5, -9998.5, math.nan, math.inf, -math.inf, 1e-4, 2.5, SMALL]
    values = [*usual.tolist(), *exponents.tolist(), *bits.tolist(), *special]
    tokens, others = (rng.integers(1, 6, (len(values), 1 + num_top)).tolist() for _ in range(2))
    return [
        TokenLogprob(
            own[0],
            value,
            tuple(
                (own[0] if greedy and not i else t, value if greedy and not i else value - i) for i, t in enumerate(top)
            ),
        )
        for value, own, top in zip(values, tokens, [one[:num_top] for one in others], strict=True)
    ]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_bytes_of_many_numbers(num_top: int, greedy: bool) -> None:
    """As many as a library formats."""
    scores = random_scores(num_top, greedy=greedy)
    test_bytes_are_those_of_objects(scores, "x")
    test_bytes_are_those_of_objects(scores[:250], "x")  # without those that JSON lacks


def test_encoded_values_stay_in_their_place() -> None:
    line = {"a": [Encoded("1"), Encoded('"é"')], "b": {"c": Encoded("[]")}, "text": '"1"'}
    assert json.loads(encode_line(line)) == {"a": [1, "é"], "b": {"c": []}, "text": '"1"'}
