"""Rules of requests: the engine against the oracle, which applies them one token after the other."""

from __future__ import annotations

from typing import Any

import pytest

from specbatch.draft.shape import DraftShape
from specbatch.types import Completion, Request, RngKey, SamplingParams
from tests.tiny_models import VOCAB, random_prompts, tiny_device_engine, tiny_engine, tiny_oracle

SHAPES: dict[str, tuple[str, DraftShape | None]] = {
    "none": ("none", None),
    "ngram": ("ngram", DraftShape(4, 1, 5)),
    "draft_model-chain": ("draft_model", DraftShape(3, 1, 4)),
    "draft_model-tree": ("draft_model", DraftShape(3, 3, 8)),
    "eagle3-chain": ("eagle3", DraftShape(3, 1, 4)),
    "eagle3-tree": ("eagle3", DraftShape(3, 2, 6)),
}
Rule = tuple[dict[str, Any], tuple[tuple[int, ...], ...]]  # sampling options, bad words
RULES: dict[str, Rule] = {
    "repetition": ({"repetition_penalty": 1.3}, ()),
    "less repetition": ({"repetition_penalty": 0.8, "presence_penalty": -0.5}, ()),
    "presence": ({"presence_penalty": 1.5}, ()),
    "frequency": ({"frequency_penalty": 0.7}, ()),
    "bias": ({"logit_bias": {3: 4.0, 0: -100.0, 60: 2.5}}, ()),
    "allowed": ({"allowed_token_ids": tuple(range(0, VOCAB, 2))}, ()),
    "bad words": ({"allowed_token_ids": (3, 5, 8)}, ((5, 5), (3, 8, 3), (8, 3), (7,), (5, 3, 3, 5))),
    "min_tokens": ({"min_tokens": 9, "stop_token_ids": tuple(range(20))}, ()),
    "all": (
        {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.3,
            "logit_bias": {5: 3.0, 7: 3.0},
            "min_tokens": 5,
            "stop_token_ids": (7, 9),
        },
        ((5, 5), (11,)),
    ),
}
NONE: Rule = ({}, ())


def requests(rules: list[Rule], temperatures: tuple[float, ...] = (0.0,), **sampling: Any) -> list[Request]:
    """Of some prompts, the first of which comes more than once. `temperatures`: of one request after the other."""
    prompts = random_prompts(len(rules), shared=9)
    wanted = []
    for i, (options, bad_words) in enumerate(rules):
        params = SamplingParams(
            temperature=temperatures[i % len(temperatures)], **{"max_tokens": 12, **options, **sampling}
        )
        wanted.append(Request(i, prompts[0 if i % 3 == 2 else i], params, RngKey(7, i, 0), bad_words=bad_words))
    return wanted


def run(engine: Any, wanted: list[Request]) -> list[Completion]:
    for request in wanted:
        engine.submit(request)
    done: dict[int, Completion] = {}
    while len(done) < len(wanted):
        done |= {completion.request_id: completion for completion in engine.step()}
        engine.check_integrity()
    return [done[i] for i in range(len(wanted))]


def decided(completions: list[Completion]) -> list[Any]:
    return [
        (c.token_ids, c.finish_reason, c.speculation, f"{c.margin.value:.5g}", c.no_token_left) for c in completions
    ]


MIXED = [NONE, *RULES.values(), NONE, RULES["all"]]
SLOW = [pytest.param(case, (t,), marks=pytest.mark.slow) for case in SHAPES for t in (0.0, 0.9)]


@pytest.mark.parametrize(
    ("case", "temperatures"),
    [("none", (0.0, 0.9)), ("draft_model-tree", (0.0, 0.9)), ("eagle3-chain", (0.9, 0.0)), *SLOW],
)
def test_as_the_oracle(case: str, temperatures: tuple[float, ...]) -> None:
    wanted = requests(MIXED, temperatures)
    expected = decided(run(tiny_oracle(*SHAPES[case], eos=(0,)), wanted))
    assert decided(run(tiny_engine(*SHAPES[case], eos=(0,)), wanted)) == expected
    assert decided(run(tiny_device_engine(*SHAPES[case], eos=(0,)), wanted)) == expected
