"""What a request gets: accepted paths, the cut at its end, log-probabilities, several samples, and honest counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

import pytest
import torch

from specbatch.counts import SpeculationCounts
from specbatch.draft.shape import DraftShape
from specbatch.engine.sequence import Sequence
from specbatch.types import Completion, FinishReason, Request, RngKey, SamplingParams, StopCheck
from tests.coins import plain_logits
from tests.oracle.engine import OracleEngine
from tests.oracle.tree import DraftTree
from tests.oracle.verify import Accepted, verify
from tests.tiny_models import random_prompts, tiny_oracle

METHODS: dict[str, tuple[str, DraftShape | None]] = {
    "none": ("none", None),
    "ngram": ("ngram", DraftShape(4, 1, 5)),
    "draft_model-chain": ("draft_model", DraftShape(5, 1, 6)),
    "draft_model-tree": ("draft_model", DraftShape(4, 3, 10)),
    "eagle-tree": ("eagle", DraftShape(3, 2, 6)),
}
PROMPT = [5, 6, 7, 8, 9] * 3
SHAPE = DraftShape(5, 1, 6)
LENGTH = 24


def new_sequence() -> Sequence:
    return Sequence(Request(0, [1, 2], SamplingParams(), RngKey(0, 0, 0)), [1, 2, 3], 100, num_computed_tokens=2)


def one_hot(tokens: list[int], vocab: int = 10) -> torch.Tensor:
    """Logits (N, V) whose argmax are `tokens`."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).double()


@pytest.mark.parametrize(
    ("drafts", "best", "expected"),
    [
        ([4, 5, 6], [4, 5, 6, 7], Accepted([0, 1, 2, 3], 7)),
        ([4, 5, 6], [4, 9, 6, 7], Accepted([0, 1], 9)),
        ([4, 5, 6], [9, 5, 6, 7], Accepted([0], 9)),
        ([], [4], Accepted([0], 4)),
    ],
)
def test_greedy_chain(drafts: list[int], best: list[int], expected: Accepted) -> None:
    assert verify([new_sequence()], DraftTree.chain([[3, *drafts]]), one_hot(best)) == [expected]


def test_greedy_tree() -> None:
    """0 -> 1(a=4), 2(5); 1 -> 3(6); 2 -> 4(6), 5(7); 5 -> 6(8)."""
    tokens, parents = [3, 4, 5, 6, 6, 7, 8], [-1, 0, 0, 1, 2, 2, 5]
    tree = DraftTree(torch.tensor([tokens]), torch.tensor([parents]), [7], False, [None])
    for best, expected in (
        ([5, 0, 7, 0, 0, 8, 1], Accepted([0, 2, 5, 6], 1)),
        ([4, 7, 7, 0, 0, 8, 1], Accepted([0, 1], 7)),  # 7 is a child of the other branch
        ([5, 0, 6, 0, 9, 8, 1], Accepted([0, 2, 4], 9)),
        ([6, 6, 6, 6, 6, 6, 6], Accepted([0], 6)),
    ):
        assert verify([new_sequence()], tree, one_hot(best)) == [expected]


def perfect_engine(shape: DraftShape, **options: object) -> OracleEngine:
    """A target that drafts for itself: chains are accepted whole."""
    engine = tiny_oracle("draft_model", shape, num_pages=256, **options)  # type: ignore[arg-type]
    net = engine._proposer._net  # type: ignore[attr-defined]
    net._model = engine._target
    net.cache = engine._target.new_cache(256 * 4, torch.float64)
    return engine


def complete(
    engine: OracleEngine,
    params: SamplingParams,
    prompt: list[int] = PROMPT,
    check: StopCheck | None = None,
    sample: int = 0,
) -> Completion:
    engine.submit(Request(0, prompt, params, RngKey(params.seed or 0, 0, sample), check))
    while True:
        for completion in engine.step():
            engine.check_integrity()
            assert engine.num_running == engine.num_waiting == 0
            return completion


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """The greedy continuation of PROMPT."""
    return complete(tiny_oracle("none"), SamplingParams(max_tokens=LENGTH)).token_ids


def engines(eos: tuple[int, ...] = ()) -> dict[str, OracleEngine]:
    return {name: tiny_oracle(m, s, num_pages=256, eos=eos) for name, (m, s) in METHODS.items()} | {
        "perfect": perfect_engine(SHAPE, eos=eos)
    }


def first_index(plain: list[int], low: int) -> int:
    """An index of at least `low` at which a token comes for the first time."""
    return next(i for i in range(low, LENGTH) if plain[i] not in plain[:i])


@pytest.mark.wide
def test_stop_tokens_at_every_place_of_a_draft(plain: list[int]) -> None:
    """End-of-sequence and stop tokens end the text wherever in a draft they are; they are kept as its last token."""
    indices = [i for i, token in enumerate(plain[:14]) if token not in plain[:i]]
    assert len(indices) > 6
    for index in indices:
        token, expected = plain[index], plain[: index + 1]
        some = engines(eos=(token,)) if index in indices[::5] else {"perfect": perfect_engine(SHAPE, eos=(token,))}
        for name, engine in some.items():
            done = complete(engine, SamplingParams(max_tokens=LENGTH))
            assert (done.token_ids, done.finish_reason) == (expected, FinishReason.STOP), name
            going_on = complete(engine, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
            assert (going_on.token_ids, going_on.finish_reason) == (plain, FinishReason.LENGTH), name
            check_counts(done)
    engine = perfect_engine(SHAPE)
    for index in indices:
        # ignore_eos does not lift stop tokens that the request named itself
        for ignore in (False, True):
            params = SamplingParams(max_tokens=LENGTH, stop_token_ids=(60, plain[index]), ignore_eos=ignore)
            done = complete(engine, params)
            assert (done.token_ids, done.finish_reason) == (plain[: index + 1], FinishReason.STOP)


@pytest.mark.parametrize("length", range(1, 16))
def test_max_tokens_at_every_place_of_a_draft(length: int, plain: list[int]) -> None:
    engine = perfect_engine(SHAPE)
    done = complete(engine, SamplingParams(max_tokens=length, logprobs=1))
    assert (done.token_ids, done.finish_reason) == (plain[:length], FinishReason.LENGTH)
    assert done.logprobs is not None
    assert [x.token_id for x in done.logprobs] == plain[:length]
    check_counts(done)
    full, rest = divmod(length - 1, 6)
    assert done.speculation.accepted == 5 * full + rest


def test_a_stop_at_the_last_token_counts_as_a_stop(plain: list[int]) -> None:
    index = first_index(plain, 5)
    for name, engine in engines(eos=(plain[index],)).items():
        done = complete(engine, SamplingParams(max_tokens=index + 1))
        assert (len(done.token_ids), done.finish_reason) == (index + 1, FinishReason.STOP), name
        done = complete(engine, SamplingParams(max_tokens=index))
        assert (len(done.token_ids), done.finish_reason) == (index, FinishReason.LENGTH), name


class StopAt:
    """Stops once `keep` tokens are there, and checks what it is given as new."""

    def __init__(self, keep: int) -> None:
        self._keep, self._seen = keep, 0

    def __call__(self, tokens: Seq[int], start: int, num_new: int) -> int | None:
        assert num_new >= 1
        tokens = tokens[start:]
        assert len(tokens) - num_new == self._seen, "tokens were passed over or shown twice"
        self._seen = len(tokens)
        return self._keep if len(tokens) >= self._keep else None


@pytest.mark.parametrize("keep", range(1, 15))
def test_stop_strings_cut_within_a_draft(keep: int, plain: list[int]) -> None:
    for name, engine in (engines() if keep % 5 == 1 else {"perfect": perfect_engine(SHAPE)}).items():
        done = complete(engine, SamplingParams(max_tokens=LENGTH, logprobs=0), check=StopAt(keep))
        assert (done.token_ids, done.finish_reason) == (plain[:keep], FinishReason.STOP), name
        assert done.logprobs is not None
        assert len(done.logprobs) == keep
        check_counts(done)


def test_stop_string_before_the_end_of_sequence(plain: list[int]) -> None:
    """A stop string comes first in the text, so it decides where the text ends; later it is not asked."""
    index = first_index(plain, 8)
    engine = perfect_engine(DraftShape(7, 1, 8), eos=(plain[index],))
    done = complete(engine, SamplingParams(max_tokens=LENGTH), check=StopAt(index - 1))
    assert (done.token_ids, done.finish_reason) == (plain[: index - 1], FinishReason.STOP)
    done = complete(engine, SamplingParams(max_tokens=LENGTH), check=StopAt(index + 3))
    assert (done.token_ids, done.finish_reason) == (plain[: index + 1], FinishReason.STOP)
    done = complete(engine, SamplingParams(max_tokens=index - 1), check=StopAt(index - 1))
    assert done.finish_reason == FinishReason.STOP, "a stop string in the last token counts as a stop"


@pytest.mark.parametrize("name", METHODS)
def test_the_end_of_the_context(name: str) -> None:
    """A request that asks for more than fits ends with `length`, exactly at the limit, and the next one still runs."""
    method, shape = METHODS[name]
    engine = tiny_oracle(method, shape, num_pages=12)
    limit = engine.limits.max_prompt_tokens + 1
    done = complete(engine, SamplingParams(max_tokens=10_000))
    assert (len(PROMPT) + len(done.token_ids), done.finish_reason) == (limit, FinishReason.LENGTH)
    long = (PROMPT * 4)[: engine.limits.max_prompt_tokens]
    done = complete(engine, SamplingParams(max_tokens=10_000), prompt=long)
    assert (len(done.token_ids), done.finish_reason) == (1, FinishReason.LENGTH)
    for prompt in ([*long, 1], [], [61], [-1]):
        with pytest.raises(ValueError):
            complete(engine, SamplingParams(), prompt=prompt)
    assert len(complete(engine, SamplingParams(max_tokens=3)).token_ids) == 3


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", METHODS)
def test_logprobs_are_those_of_a_plain_forward_pass(name: str, temperature: float) -> None:
    """Natural logs of the untempered, unfiltered distribution, whatever was drawn from."""
    method, shape = METHODS[name]
    engine = tiny_oracle(method, shape, num_pages=256)
    done = complete(
        engine,
        SamplingParams(max_tokens=15, logprobs=4, temperature=temperature, top_k=3 if temperature else 0, seed=2),
    )
    logits = plain_logits(engine._target, [*PROMPT, *done.token_ids])[len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits, -1)
    assert done.logprobs is not None
    assert len(done.logprobs) == len(done.token_ids) == 15
    for row, token, found in zip(expected, done.token_ids, done.logprobs, strict=True):
        assert found.token_id == token
        assert found.logprob == pytest.approx(float(row[token]), abs=1e-9)
        values, ids = row.topk(4)
        assert [i for i, _ in found.top] == ids.tolist()
        assert [x for _, x in found.top] == pytest.approx(values.tolist(), abs=1e-9)
    without = complete(engine, SamplingParams(max_tokens=5))
    assert without.logprobs is None
    chosen = complete(engine, SamplingParams(max_tokens=5, logprobs=0)).logprobs
    assert chosen is not None
    assert all(x.top == () for x in chosen)


@pytest.mark.parametrize("name", METHODS)
def test_samples_differ_and_repeat(name: str) -> None:
    method, shape = METHODS[name]
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=4)
    rounds = [
        [tuple(complete(tiny_oracle(method, shape, num_pages=256), params, sample=n).token_ids) for n in range(3)]
        for _ in range(2)
    ]
    assert rounds[0] == rounds[1]
    assert len(set(rounds[0])) == 3
    together = tiny_oracle(method, shape, num_pages=256)
    for n in range(3):
        together.submit(Request(n, PROMPT, params, RngKey(4, 0, n)))
    done: dict[int, tuple[int, ...]] = {}
    while len(done) < 3:
        done |= {c.request_id: tuple(c.token_ids) for c in together.step()}
    assert [done[n] for n in range(3)] == rounds[0]


def check_counts(done: Completion) -> None:
    c = done.speculation
    assert sum(c.histogram) == c.rounds
    assert c.accepted == sum(a * rounds for a, rounds in enumerate(c.histogram))
    assert c.committed == len(done.token_ids) - 1, "one token comes from the prefill, the others from rounds"
    assert c.rounds <= c.committed <= c.accepted + c.rounds
    assert c.accepted <= min(c.drafted, c.committed), "drafts after the cut are not kept"
    assert sum(c.accepted_at) == c.accepted
    assert c.accepted_at == [sum(c.histogram[i + 1 :]) for i in range(len(c.accepted_at))]
    assert len(c.accepted_at) <= len(c.proposed_at)
    assert all(a <= p for a, p in zip(c.accepted_at, c.proposed_at, strict=False))
    assert all(a >= b for a, b in itertools.pairwise(c.proposed_at))
    assert sum(c.proposed_at) <= c.drafted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", METHODS)
def test_counts(name: str, temperature: float) -> None:
    method, shape = METHODS[name]
    engine = tiny_oracle(method, shape, num_pages=256, draft_seed=4 if method == "eagle" else 0)
    total = SpeculationCounts()
    for i, prompt in enumerate([*random_prompts(1), PROMPT]):
        done = complete(engine, SamplingParams(max_tokens=LENGTH - i, temperature=temperature, seed=i), prompt)
        check_counts(done)
        total.add(done.speculation)
        c = done.speculation
        if method == "none":
            assert (c.drafted, c.accepted, c.rounds) == (0, 0, len(done.token_ids) - 1)
        elif method != "ngram":
            assert shape is not None
            assert c.drafted == c.rounds * (shape.num_draft_tokens - 1)
            assert c.proposed_at[0] == c.rounds
            if shape.is_chain:
                assert c.proposed_at == [c.rounds] * shape.num_steps
    assert engine.stats.speculation == total
    assert engine.stats.generated_tokens == total.committed + 2
    assert engine.stats.rounds == total.rounds, "one request at a time: a round of the engine is a round of a request"
    if method != "none" and not (method == "ngram" and temperature):  # sampled text repeats too little
        assert total.accepted > 0


def test_a_perfect_chain_commits_all_it_drafts() -> None:
    done = complete(perfect_engine(SHAPE), SamplingParams(max_tokens=1 + 3 * 6))
    assert done.speculation.histogram == [0, 0, 0, 0, 0, 3]
    assert done.speculation.acceptance_length == 6.0
