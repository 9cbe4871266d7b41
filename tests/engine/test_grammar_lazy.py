"""Masks only where they are needed: the same texts as with all masks, and margins that do not depend on the method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from specbatch.engine.constrained.mask_table import NodeMasks
from specbatch.engine.engine import Engine
from specbatch.engine.round import Round
from specbatch.grammar.constraint import constraint_of
from specbatch.types import Completion, FinishReason, Request, RngKey, SamplingParams
from tests.engine import test_constrained
from tests.engine.graphs import Replays
from tests.engine.test_constrained import GRAMMARS, HOST_COMPILER, ROWS, SHAPES, TOKENIZER
from tests.grammar.tiny_tokenizer import END
from tests.tiny_models import random_prompts, run_requests, tiny_device_engine, tiny_engine, tiny_oracle

ENGINES: dict[str, Callable[..., Engine]] = {"cpu": tiny_engine, "fixed": tiny_device_engine}
# The bias keeps texts long; both penalties and it would show where they are applied twice.
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "logit_bias": {TOKENIZER.vocab["na"]: 2.0, TOKENIZER.vocab["1"]: 1.0},
}
requests = partial(test_constrained.requests, compiler=HOST_COMPILER)
METHODS = [case for case in SHAPES if case != "eagle3-tree"]  # its target has another number of layers: see below


def graphed(engine: Engine) -> Engine:
    engine.executor.mode, engine.executor.runner = "round", Replays(lambda key: False)  # type: ignore[assignment]
    return engine


def with_all_masks(engine: Engine) -> Engine:
    """What it would do if it looked at no choices."""
    engine._grammars._all_masks = True
    return engine


@cache
def by_oracle(has_penalties: bool = False, logprobs: int | None = None) -> list[Completion]:
    """Return the oracle's completions of the greedy requests, which depend on no method."""
    options = (PENALTIES if has_penalties else {}) | ({} if logprobs is None else {"logprobs": logprobs})
    return run_requests(tiny_oracle(eos=(END,)), requests((0.0,), **options))


def texts(completions: list[Completion]) -> list[Any]:
    return [(c.token_ids, c.finish_reason, c.no_token_left) for c in completions]


def margins(completions: list[Completion]) -> list[tuple[str, int]]:
    return [(f"{c.margin.value:.5g}", c.margin.position) for c in completions]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Masks that were there at the end of each launch. Before the next one, the table allows everything."""
    found: list[int] = []
    clear = NodeMasks.clear

    def checked(self: NodeMasks) -> None:
        assert self.rules.node_masks_SNW is not None
        found.append(int((self.rules.node_masks_SNW != -1).any(2).sum()))
        clear(self)
        assert (self.rules.node_masks_SNW == -1).all()

    monkeypatch.setattr(NodeMasks, "clear", checked)
    return found


@pytest.mark.parametrize(
    ("methods", "options"),
    [
        pytest.param(METHODS, {}, marks=pytest.mark.wide, id="all"),
        pytest.param(METHODS, PENALTIES, marks=pytest.mark.wide, id="all-penalties"),
        pytest.param(["none", "ngram", "draft_model-tree"], PENALTIES, id="three-penalties"),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_texts_and_margins_of_methods(
    engine: str, methods: list[str], options: dict[str, Any], watched: list[int]
) -> None:
    """The methods have the same margins, and the texts of all masks and of the oracle. With random weights most choices
    are refused."""
    expected = texts(by_oracle(options == PENALTIES))
    first, num_refused = None, 0
    for case in methods:
        made = ENGINES[engine](*SHAPES[case], eos=(END,))
        found = run_requests(made, requests((0.0,), **options))
        first = first or margins(found)
        assert texts(found) == expected
        assert margins(found) == first
        complete = with_all_masks(ENGINES[engine](*SHAPES[case], eos=(END,)))
        assert texts(run_requests(complete, requests((0.0,), **options))) == expected
        counts, every = made.stats.grammar, complete.stats.grammar
        assert 0 < counts.refused >= counts.masks > 0
        assert counts.masks < every.masks
        assert every.refused == 0
        num_refused += counts.refused
    assert num_refused > 50
    assert max(watched) > 1


@pytest.mark.parametrize("case", ["none", "ngram", "draft_model-tree"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_is_never_refused_needs_no_mask(engine: str, case: str, watched: list[int]) -> None:
    """But for first tokens. Other options leave it only tokens that its grammar takes."""
    letters = tuple(TOKENIZER.vocab[text] for text in "abcdefilmnorstuy")
    params = SamplingParams(max_tokens=30, regex="[a-z]*", allowed_token_ids=letters)
    constraint = constraint_of(params)
    assert constraint is not None
    made = ENGINES[engine](*SHAPES[case], eos=(END,))
    rows = [
        Request(i, prompt, params, RngKey(7, i, 0), matcher=HOST_COMPILER.matcher(constraint))
        for i, prompt in enumerate(random_prompts(5, shared=9))
    ]
    found = run_requests(made, rows)
    assert all(len(one.token_ids) == 30 for one in found)
    assert (made.stats.grammar.masks, made.stats.grammar.refused) == (0, 0)
    assert 0 < sum(watched) <= 5


@pytest.mark.parametrize("case", ["none", "draft_model-tree", "draft_model-chain"])
@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_requests_among_sampled_ones(engine: str, case: str, watched: list[int]) -> None:
    """Rows of both kinds begin and end in turn, and take each other's lines: what is greedy has the texts and margins
    that it has among greedy ones, what is sampled those of all masks."""
    alone = run_requests(ENGINES[engine](*SHAPES[case], eos=(END,)), requests((0.0,)))
    made = ENGINES[engine](*SHAPES[case], eos=(END,))
    found = run_requests(made, requests((0.9, 0.0)))
    complete = with_all_masks(ENGINES[engine](*SHAPES[case], eos=(END,)))
    assert texts(found) == texts(run_requests(complete, requests((0.9, 0.0))))
    assert texts(found[1::2]) == texts(alone[1::2])
    assert margins(found[1::2]) == margins(alone[1::2])
    assert made.stats.grammar.refused > 0
    assert 0 < made.stats.grammar.masks < complete.stats.grammar.masks


@pytest.mark.parametrize("engine", ENGINES)
def test_a_line_after_a_refused_request(engine: str, watched: list[int]) -> None:
    """It goes to a request without a grammar that has other rules, in a batch with a grammar: there all rules are
    read."""
    prompts = random_prompts(6, shared=9)
    short = SamplingParams(max_tokens=3, regex="[0-9]*")
    other = SamplingParams(max_tokens=9, allowed_token_ids=tuple(range(1, 50)))
    long_one = SamplingParams(max_tokens=30, regex=GRAMMARS["regex"]["regex"])
    wanted = []
    for i, params in enumerate([long_one, short, other, short, other, short]):
        constraint = constraint_of(params)
        matcher = None if constraint is None else HOST_COMPILER.matcher(constraint)
        wanted.append(Request(i, prompts[i], params, RngKey(7, i, 0), matcher=matcher))
    made = ENGINES[engine](eos=(END,), max_batch_size=2)
    found = run_requests(made, wanted)
    matchers = [constraint_of(one.params) for one in wanted]
    again = [
        replace(one, matcher=None if constraint is None else HOST_COMPILER.matcher(constraint))
        for one, constraint in zip(wanted, matchers, strict=True)
    ]
    assert texts(found) == texts(run_requests(tiny_oracle(eos=(END,), max_batch_size=2), again))
    assert made.stats.grammar.refused > 3
    assert FinishReason.LENGTH in {one.finish_reason for one in found[:2]}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_tree_of_eagle3(engine: str, watched: list[int]) -> None:
    options = {"min_tokens": 5, **PENALTIES}
    made, complete = (ENGINES[engine](*SHAPES["eagle3-tree"], eos=(END,)) for _ in range(2))
    found = run_requests(made, requests((0.0,), **options))
    assert texts(found) == texts(run_requests(with_all_masks(complete), requests((0.0,), **options)))
    assert made.stats.grammar.refused > 3
    assert made.stats.grammar.masks < complete.stats.grammar.masks


@pytest.mark.parametrize("case", ["none", "draft_model-tree", "eagle-chain"])
@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["", "penalties"])
def test_as_three_graphs(case: str, penalties: dict[str, Any], watched: list[int]) -> None:
    """Graphs give the same texts. Log-probabilities are those of the raw logits, which no rule has changed."""
    options = {"logprobs": 1, **penalties}
    expected = run_requests(tiny_device_engine(*SHAPES[case], eos=(END,)), requests((0.0,), **options))
    found = run_requests(graphed(tiny_device_engine(*SHAPES[case], eos=(END,))), requests((0.0,), **options))
    oracle = by_oracle(penalties == PENALTIES, 1)
    assert texts(found) == texts(expected) == texts(oracle)
    assert margins(found) == margins(expected)
    for mine, theirs in zip(found, oracle, strict=True):
        values = [[one.logprob for one in c.logprobs or ()] for c in (mine, theirs)]
        assert values[0] == pytest.approx(values[1], abs=1e-5)


@pytest.mark.parametrize("cpu", [False, True])
def test_memory_runs_out_after_a_check(cpu: bool, watched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the states were ahead of is taken back, and the table allows everything again."""
    engine, num_calls = (tiny_engine if cpu else tiny_device_engine)(eos=(END,)), 0
    accept = Round.accept

    def fails(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (5, 21):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return accept(*args, **options)

    monkeypatch.setattr(Round, "accept", fails)
    assert texts(run_requests(engine, requests((0.0,)))) == texts(by_oracle())
    assert engine.stats.memory_shortages == 2


def test_logits_that_a_mask_makes_finite() -> None:
    """A logit of a forbidden token that is not finite: there is no choice without the mask."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][60] = torch.inf

    for case in ("none", "ngram"):
        for engine in ENGINES.values():
            found = run_requests(engine(*SHAPES[case], eos=(END,), spoil=spoil), requests((0.0,), ["regex", "choice"]))
            complete = with_all_masks(engine(*SHAPES[case], eos=(END,), spoil=spoil))
            assert texts(found) == texts(run_requests(complete, requests((0.0,), ["regex", "choice"])))
            assert all(one.finish_reason is not FinishReason.ERROR for one in found)


def test_simulated_acceptance_computes_all_masks() -> None:
    engine = tiny_device_engine(*SHAPES["draft_model-chain"], eos=(END,), simulate=2.0)
    found = run_requests(engine, requests((0.0,)))
    assert engine.stats.grammar.refused == 0 < engine.stats.grammar.masks
    assert len(found) == len(ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["none", "round"])
@pytest.mark.parametrize("options", [{}, PENALTIES], ids=["", "penalties"])
def test_texts_and_margins_on_a_gpu(graphs: Any, options: dict[str, Any]) -> None:
    """Each method is tested, alone and among sampled requests."""
    settings: dict[str, Any] = {"eos": (END,), "num_pages": 256, "device": torch.device("cuda"), "graphs": graphs}
    expected = texts(by_oracle(options == PENALTIES))
    first = None
    for case in METHODS:
        made = tiny_device_engine(*SHAPES[case], **settings)
        found = run_requests(made, requests((0.0,), **options))
        first = first or margins(found)
        assert texts(found) == expected
        assert margins(found) == first
        mixed = run_requests(tiny_device_engine(*SHAPES[case], **settings), requests((0.9, 0.0), **options))
        assert texts(mixed[1::2]) == expected[1::2]
        assert margins(mixed[1::2]) == first[1::2]
        assert 0 < made.stats.grammar.refused >= made.stats.grammar.masks > 0
