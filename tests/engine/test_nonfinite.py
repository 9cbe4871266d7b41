"""Logits that are not finite: one error for each request that they decide about, and nothing else is any different. A
token whose embedding is NaN spoils the requests that hold it and no others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine
from specbatch.types import Completion, FinishReason, Request, RngKey, SamplingParams
from tests.tiny_models import (
    VOCAB,
    num_target_layers,
    random_prompts,
    round_of,
    tiny_device_engine,
    tiny_engine,
    tiny_oracle,
)

CHAIN, TREE = DraftShape(3, 1, 4), DraftShape(5, 4, 8)
METHODS = [
    ("none", None),
    ("ngram", CHAIN),
    ("draft_model", CHAIN),
    ("eagle", TREE),
    ("eagle3", CHAIN),
]
SOME_SLOW = [pytest.param(*one, marks=pytest.mark.slow if one[0] in ("ngram", "eagle") else ()) for one in METHODS]
ENGINES: dict[str, Callable[..., Engine]] = {"cpu": tiny_engine, "fixed": tiny_device_engine}
WITH_ORACLE: tuple[Callable[..., Any], ...] = (tiny_oracle, *ENGINES.values())
GREEDY = SamplingParams(max_tokens=10, logprobs=2)
SAMPLED = SamplingParams(max_tokens=10, logprobs=2, temperature=0.9, top_k=12, top_p=0.95, seed=3)
IN_PROMPTS = 60  # a token for prompts; tests take it out of the others


def nan_embedding(*tokens: int, value: float = math.nan) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for token in tokens:
            tensors["model.embed_tokens.weight"][token, 3] = value
            if token == IN_PROMPTS:  # below most others, so that hardly any text holds it
                tensors["lm_head.weight"][token] = 0.0

    return spoil


def all_nan(name: str) -> Callable[[dict[str, Tensor]], None]:
    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name].fill_(math.nan)

    return spoil


def run_rows(
    engine: Engine, rows: dict[int, list[int]], params: SamplingParams, check: bool = True
) -> dict[int, Completion]:
    """Each row under its own number, whatever the others are."""
    for number, prompt in rows.items():
        engine.submit(Request(number, prompt, params, RngKey(3, number, 0)))
    done: dict[int, Completion] = {}
    while len(done) < len(rows):
        done |= {c.request_id: c for c in engine.step()}
        if check:
            engine.check_integrity()
    return done


def healthy_rows() -> dict[int, list[int]]:
    prompts = random_prompts(4, seed=2, longest=12, shared=9)
    return {i: [t if t != IN_PROMPTS else 1 for t in prompt] for i, prompt in enumerate(prompts)}


def plain_engine(method: str = "none", **settings: Any) -> Engine:
    """Plain decoding with the target of `method`."""
    return tiny_engine("none", num_pages=256, num_layers=num_target_layers(method), **settings)


def summary(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.finish_reason, completion.speculation


def assert_same_logprobs(found: Completion, expected: Completion, exact: bool) -> None:
    assert found.logprobs is not None
    assert expected.logprobs is not None
    mine, theirs = ([t.logprob for t in c.logprobs or ()] for c in (found, expected))
    assert mine == (theirs if exact else pytest.approx(theirs, abs=1e-6))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), SOME_SLOW)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_bad_prompt_fails_alone(engine: str, method: str, shape: DraftShape | None, params: SamplingParams) -> None:
    """The other rows have the tokens, counts and bits of a run without the bad ones, wherever the bad token is."""
    good = healthy_rows()
    bad = {10: [*good[0], IN_PROMPTS], 11: [IN_PROMPTS, 1, 2], 12: [*good[1][:9], IN_PROMPTS, *good[1]]}
    mixed = {10: bad[10], 0: good[0], 1: good[1], 11: bad[11], 2: good[2], 12: bad[12], **good}
    build = ENGINES[engine]
    # On a CPU float32 has equal bits whatever runs with a row.
    dtype = torch.float32 if engine == "cpu" else torch.float64
    settings: dict[str, Any] = {"num_pages": 256, "spoil": nan_embedding(IN_PROMPTS), "dtype": dtype}
    expected = run_rows(build(method, shape, **settings), good, params)
    found = run_rows(build(method, shape, **settings), mixed, params)
    for number in bad:
        assert found[number].token_ids == []
        assert found[number].finish_reason is FinishReason.ERROR
    ended = {i: c for i, c in expected.items() if c.finish_reason is not FinishReason.ERROR}
    assert len(ended) >= 3  # another may have written the bad token itself
    for number in ended:
        assert summary(found[number]) == summary(expected[number])
        assert_same_logprobs(found[number], expected[number], exact=engine == "cpu")


def written_token(method: str, params: SamplingParams, rows: dict[int, list[int]]) -> tuple[int, dict[int, Completion]]:
    """A token that no prompt holds and that plain decoding writes, in some rows and not in all, and those texts."""
    plain = run_rows(plain_engine(method), rows, params)
    held = {token for prompt in rows.values() for token in prompt}

    def off_the_half(token: int) -> int:
        return abs(len(rows) // 2 - sum(token in c.token_ids[:-1] for c in plain.values()))

    return min((t for t in range(VOCAB) if t not in held), key=off_the_half), plain


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("method", "shape"), SOME_SLOW)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_bad_token_ends_the_text(engine: str, method: str, shape: DraftShape | None, params: SamplingParams) -> None:
    """The text is the healthy model's up to the first token that the broken one cannot read. Drafts of that token that
    are not accepted change nothing, though they were computed beside the others."""
    rows = {i: [t % 23 for t in prompt] for i, prompt in healthy_rows().items()}
    token, plain = written_token(method, params, rows)
    found = run_rows(ENGINES[engine](method, shape, num_pages=256, spoil=nan_embedding(token)), rows, params)
    is_drawn = shape is CHAIN and method != "ngram" and params is SAMPLED
    if is_drawn:  # texts of their own: those of the host, where the method has no other reference
        plain = run_rows(tiny_engine(method, shape, num_pages=256, spoil=nan_embedding(token)), rows, params)
    reasons = set()
    for number, healthy in plain.items():
        text, reason = healthy.token_ids, healthy.finish_reason
        if not is_drawn and token in text[:-1]:
            text, reason = text[: text.index(token) + 1], FinishReason.ERROR
        assert (found[number].token_ids, found[number].finish_reason) == (text, reason)
        reasons.add(reason)
    assert is_drawn or reasons == {FinishReason.LENGTH, FinishReason.ERROR}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_ends_a_request_before_the_bad_logits_counts(engine: str) -> None:
    """The token that the model cannot read is the end of sequence, and drafts behind it were verified in vain."""
    rows = {i: [t % 23 for t in prompt] for i, prompt in healthy_rows().items()}
    for method, shape in METHODS:
        token, _ = written_token(method, GREEDY, rows)
        expected = run_rows(plain_engine(method, eos=(token,)), rows, GREEDY)
        assert FinishReason.STOP in {c.finish_reason for c in expected.values()}
        built = ENGINES[engine](method, shape, num_pages=256, eos=(token,), spoil=nan_embedding(token))
        found = run_rows(built, rows, GREEDY)
        for number, completion in expected.items():
            assert found[number].token_ids == completion.token_ids
            assert found[number].finish_reason == completion.finish_reason


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize("engine", ENGINES)
def test_infinities(engine: str, value: float) -> None:
    rows = {0: [1, 2, 3], 1: [1, IN_PROMPTS, 3]}
    found = run_rows(ENGINES[engine]("draft_model", TREE, spoil=nan_embedding(IN_PROMPTS, value=value)), rows, GREEDY)
    assert found[1].finish_reason is FinishReason.ERROR
    assert found[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("engine", ENGINES)
def test_overflow_of_float16(engine: str, params: SamplingParams) -> None:
    """Every logit is a number in float32; in float16 that of one of two tokens is +inf, and of the other -inf."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"][4] = 60000.0
        tensors["lm_head.weight"][5] = -60000.0

    rows = {0: [1, 2, 3], 1: [7, 8]}
    for dtype, reason in ((torch.float16, FinishReason.ERROR), (torch.float32, FinishReason.LENGTH)):
        found = run_rows(ENGINES[engine]("none", dtype=dtype, spoil=spoil), rows, params)
        assert {c.finish_reason for c in found.values()} == {reason}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("engine", ENGINES)
def test_masked_tokens_are_no_error(engine: str, params: SamplingParams) -> None:
    """Some logits -inf, as masks write them."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"].abs_()
        tensors["model.layers.0.input_layernorm.weight"].abs_()

    build = ENGINES[engine]
    engine_ = build("none", spoil=spoil)
    target = round_of(engine_)._target
    healthy = target.raw_logits

    def masked(hidden: Tensor) -> Tensor:
        logits = healthy(hidden)
        logits[:, 10:] = -math.inf
        return logits

    target.raw_logits = masked  # type: ignore[method-assign]
    found = run_rows(engine_, {0: [1, 2, 3], 1: [7, 8]}, params)
    assert {c.finish_reason for c in found.values()} == {FinishReason.LENGTH}
    assert all(max(c.token_ids) < 10 for c in found.values())


@pytest.mark.parametrize(("method", "shape"), [("none", None), ("eagle3", CHAIN), ("draft_model", TREE)])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_prefix_cache_keeps_nothing_of_a_failed_request(engine: str, method: str, shape: DraftShape | None) -> None:
    """Pages before the bad token that a healthy request computed stay; those of the failed one go, also where its
    prompt was computed in several chunks, and a request beside it had begun to share them."""
    shared = [t % 50 for t in random_prompts(1, seed=5, longest=1, shared=24)[0]]
    bad = [*shared, 1, IN_PROMPTS, *([2] * 30)]
    settings: dict[str, Any] = {"num_pages": 256, "prefill_chunk_tokens": 16, "spoil": nan_embedding(IN_PROMPTS)}
    params = SamplingParams(max_tokens=6)
    rows = {0: [*shared, 7], 1: [*shared, 1, 8]}
    expected = run_rows(plain_engine(method, spoil=nan_embedding(IN_PROMPTS)), rows, params)
    built = ENGINES[engine](method, shape, **settings)

    def cached(rows: dict[int, list[int]], failing: set[int]) -> int:
        before = built.stats.cached_prompt_tokens
        for number, completion in run_rows(built, rows, params).items():
            assert (completion.finish_reason is FinishReason.ERROR) == (number in failing)
            if number not in failing:
                assert completion.token_ids == expected[number].token_ids
        return built.stats.cached_prompt_tokens - before

    assert cached({5: bad}, failing={5}) == 0
    assert cached({6: bad}, failing={6}) == 0, "pages of a failed request were shared"
    cached({7: bad, 1: [*shared, 1, 8], 8: bad}, failing={7, 8})
    assert cached({0: [*shared, 7]}, failing=set()) in (0, 24), "only what a healthy request had computed"
    assert cached({1: [*shared, 1, 8]}, failing=set()) == 24
    assert cached({9: bad}, failing={9}) == 24
    assert cached({0: [*shared, 7], 9: bad}, failing={9}) == 48, "a failed request took others' pages away"


@pytest.mark.parametrize("engine", ENGINES)
def test_failed_requests_among_preempted_ones(engine: str) -> None:
    rows = {i: [t % 40 for t in prompt] for i, prompt in enumerate(random_prompts(8, seed=1, longest=30))}
    rows |= {i: [*rows[i], IN_PROMPTS] for i in (1, 4, 6)}
    params = SamplingParams(max_tokens=30)
    spoil = nan_embedding(IN_PROMPTS)
    expected = run_rows(plain_engine(spoil=spoil), rows, params)
    built = ENGINES[engine]("draft_model", TREE, num_pages=36, prefill_chunk_tokens=7, spoil=spoil)
    found = run_rows(built, rows, params)
    assert built.stats.preemptions > 0
    for number, completion in expected.items():
        assert (found[number].token_ids, found[number].finish_reason) == (
            completion.token_ids,
            completion.finish_reason,
        )
    assert {c.finish_reason for n, c in found.items() if n in (1, 4, 6)} == {FinishReason.ERROR}


def test_simulated_acceptance() -> None:
    rows = healthy_rows() | {10: [1, IN_PROMPTS]}
    for shape in (CHAIN, TREE):
        built = tiny_device_engine("eagle3", shape, num_pages=256, simulate=2.5, spoil=nan_embedding(IN_PROMPTS))
        found = run_rows(built, rows, GREEDY)
        assert found[10].finish_reason is FinishReason.ERROR
        assert FinishReason.LENGTH in {c.finish_reason for c in found.values()}


BROKEN_DRAFTS = {
    "draft_model": all_nan("lm_head.weight"),
    "eagle3": all_nan("lm_head.weight"),
    "eagle": all_nan("fc.weight"),
}


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("method", BROKEN_DRAFTS)
def test_a_broken_draft_costs_speed_alone(method: str, shape: DraftShape) -> None:
    """Greedy texts, and sampled ones of trees, are those of plain decoding; of chains both engines draw the same
    (from the target, see test_sampling_exact), and count what was not drawn from a draft."""
    rows = healthy_rows()
    settings: dict[str, Any] = {"num_pages": 256, "spoil_draft": BROKEN_DRAFTS[method]}
    for params in (GREEDY, SAMPLED):
        plain = run_rows(plain_engine(method), rows, params)
        engines = [build(method, shape, **settings) for build in WITH_ORACLE]
        oracle, *others = (run_rows(engine, rows, params) for engine in engines)
        is_drawn = shape is CHAIN and params is SAMPLED
        for number, completion in plain.items():
            assert oracle[number].finish_reason is FinishReason.LENGTH
            assert all(summary(other[number]) == summary(oracle[number]) for other in others)
            assert is_drawn or oracle[number].token_ids == completion.token_ids
        drafted = [engine.stats.speculation.drafted for engine in engines]
        assert [engine.stats.broken_drafts for engine in engines] == (drafted if is_drawn else [0] * len(engines))


def test_a_reduced_draft_vocabulary_that_is_broken() -> None:
    rows = healthy_rows()
    settings: dict[str, Any] = {"num_pages": 256, "draft_vocab": 30, "spoil_draft": BROKEN_DRAFTS["eagle3"]}
    oracle, *others = (run_rows(build("eagle3", CHAIN, **settings), rows, SAMPLED) for build in WITH_ORACLE)
    for number in rows:
        assert all(summary(other[number]) == summary(oracle[number]) for other in others)
        assert oracle[number].speculation.accepted == 0
