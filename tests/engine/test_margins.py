"""The margin of a completion: of greedy ones only, whatever runs with them, and of the tokens that are kept only.
`test_lossless` compares the margins of every draft method with the oracle's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.types import NO_MARGIN, Completion, FinishReason, Margin, Request, RngKey, SamplingParams
from tests.tiny_models import random_prompts, run, tiny_device_engine, tiny_engine, tiny_oracle

CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(5, 4, 8)
GREEDY = SamplingParams(max_tokens=20)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, seed=3)
PROMPTS = random_prompts(6, shared=5)
ENGINES: dict[str, Callable[..., Engine]] = {"cpu": tiny_engine, "fixed": tiny_device_engine}


def margins_of(completions: list[Completion]) -> list[tuple[str, int]]:
    return [(f"{c.margin.value:.5g}", c.margin.position) for c in completions]


@pytest.fixture(scope="module")
def plain() -> list[Completion]:
    return run(tiny_oracle("none"), PROMPTS, GREEDY)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("method", "shape"), [("none", None), ("draft_model", CHAIN), ("eagle", TREE)])
def test_greedy_requests_among_sampled_ones(
    engine: str, method: str, shape: DraftShape | None, plain: list[Completion]
) -> None:
    mixed = ENGINES[engine](method, shape, num_pages=256)
    for i, prompt in enumerate(PROMPTS):
        mixed.submit(Request(i, prompt, SAMPLED if i % 2 else GREEDY, RngKey(3, i, 0)))
    done: dict[int, Completion] = {}
    while len(done) < len(PROMPTS):
        done |= {completion.request_id: completion for completion in mixed.step()}
    assert margins_of([done[i] for i in (0, 2, 4)]) == margins_of(plain[::2])
    assert [done[i].margin for i in (1, 3, 5)] == [NO_MARGIN] * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_after_the_end_do_not_count(engine: str, plain: list[Completion]) -> None:
    """A stop string ends the text before its margin, which is computed all the same in rounds of several tokens."""
    before, prompt = max((one.margin.position, prompt) for one, prompt in zip(plain, PROMPTS, strict=True))
    assert before > 3, "the whole completion has its margin too early"

    def check_stop(tokens: Sequence[int], start: int, num_new: int) -> int | None:
        return before if len(tokens) - start >= before else None

    for keep in (None, check_stop):
        results = []
        for made in (tiny_oracle("none"), ENGINES[engine]("ngram", CHAIN), ENGINES[engine]("draft_model", CHAIN)):
            made.submit(Request(0, prompt, GREEDY, RngKey(0, 0, 0), keep))
            done: list[Completion] = []
            while not done:
                done = made.step()
            results.append(done[0])
        assert len(set(margins_of(results))) == 1
        assert (results[0].margin.position < before) == (keep is not None)


def test_the_limit_cuts_an_accepted_path() -> None:
    """For every limit, speculative decoding has the margin of plain decoding."""
    for max_tokens in range(2, 7):
        params = replace(GREEDY, max_tokens=max_tokens)
        expected = margins_of(run(tiny_engine(), PROMPTS[:2], params))
        assert margins_of(run(tiny_engine("draft_model", CHAIN), PROMPTS[:2], params)) == expected


def test_simulated_or_not_a_margin_is_of_a_token() -> None:
    for completion in run(tiny_device_engine("draft_model", CHAIN, simulate=2.5), PROMPTS[:2], GREEDY):
        assert 0 <= completion.margin.position < len(completion.token_ids)
        assert 0 <= completion.margin.value < 100


@pytest.mark.parametrize("engine", ENGINES)
def test_edited_logits_have_the_margin_and_raw_ones_the_log_probabilities(engine: str) -> None:
    params = SamplingParams(max_tokens=4, logit_bias={7: 90.0, 8: 40.0}, logprobs=0)
    for completion in run(ENGINES[engine](), PROMPTS[:2], params):
        assert completion.token_ids == [7] * 4
        assert 30 < completion.margin.value < 50
        assert all(-30 < one.logprob < -1e-3 for one in completion.logprobs or ())


def test_one_possible_token_has_no_margin() -> None:
    """A vocabulary of one token."""
    only = run(tiny_engine(vocab=1), [[0, 0]], SamplingParams(max_tokens=3))[0]
    assert (only.finish_reason, only.margin) == (FinishReason.LENGTH, NO_MARGIN)
    assert Margin(1.0, 5) < Margin(1.0, 6) < NO_MARGIN
