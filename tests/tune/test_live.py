"""Replay against the engine: rounds, tokens and accepted drafts of runs that were really made."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from specbatch.draft.ngram import HostNgramDraft
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.tune.replay import Replay, Replayer
from specbatch.tune.trace import Trace
from specbatch.types import Completion, SamplingParams
from tests.tiny_models import random_prompts, run, tiny_engine
from tests.tracing import replayed, trace_rows

TOPK, DEPTH = 5, 4
GREEDY = SamplingParams(max_tokens=18)
SAMPLED = SamplingParams(max_tokens=18, temperature=0.7, top_p=0.95, seed=3)
CHAINS = [DraftShape(steps, 1, steps + 1) for steps in range(1, DEPTH + 1)]
WIDE = [DraftShape(DEPTH, TOPK, nodes) for nodes in (2, 9, 40)]
SHALLOW = [DraftShape(1, TOPK, 6), DraftShape(2, TOPK, 8), DraftShape(3, TOPK, 30)]
NARROW = [DraftShape(4, 2, 5), DraftShape(4, 2, 15), DraftShape(3, 3, 8), DraftShape(4, 3, 31), DraftShape(2, 4, 12)]
METHODS = {
    "draft_model": {},
    "eagle": {"draft_vocab": 30},
}
# A token that ends some of the rows early.
EOS = (13, 52)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, [*random_prompts(4, shared=9), *random_prompts(2, seed=4), [5, 6, 7, 8] * 4]))


def as_lists() -> list[list[int]]:
    return [list(prompt) for prompt in prompts()]


@cache
def traced(method: str, sampled: bool = False) -> Trace:
    return trace_rows(
        method,
        as_lists(),
        SAMPLED if sampled else GREEDY,
        TOPK,
        DEPTH,
        eos=EOS,
        **METHODS[method],  # type: ignore[arg-type]
    )


@cache
def replayer(method: str, sampled: bool = False) -> Replayer:
    return Replayer(traced(method, sampled))


def live(method: str, shape: DraftShape, sampled: bool = False) -> list[Completion]:
    engine = tiny_engine(method, shape, num_pages=512, max_batch_size=8, eos=EOS, **METHODS[method])  # type: ignore[arg-type]
    return run(engine, as_lists(), SAMPLED if sampled else GREEDY)


def assert_equal(replay: Replay, completions: list[Completion], rows: np.ndarray | None = None) -> None:
    counts = [completion.speculation for completion in completions]
    rows = np.ones(len(counts), dtype=bool) if rows is None else rows
    assert replay.rounds_R[rows].tolist() == np.array([c.rounds for c in counts])[rows].tolist()
    assert replay.tokens_R[rows].tolist() == np.array([c.committed for c in counts])[rows].tolist()
    if rows.all():
        deepest = len(replay.accepted_at)
        sums = [sum(c.accepted_at[i] for c in counts if i < len(c.accepted_at)) for i in range(deepest)]
        assert list(replay.accepted_at) == sums


def test_the_trace_is_the_text() -> None:
    trace = traced("draft_model")
    completions = run(tiny_engine("none", num_pages=256, eos=EOS), as_lists(), GREEDY)
    assert [row.tokens[row.num_prompt :].tolist() for row in trace.rows] == [c.token_ids for c in completions]
    assert len({row.num_output for row in trace.rows}) > 2, "the rows should end in different ways"


CASES = [("draft_model", shape) for shape in (CHAINS[0], CHAINS[3], *WIDE, *SHALLOW)]
CASES += [("eagle", shape) for shape in (CHAINS[1], WIDE[1], SHALLOW[2])]


@pytest.mark.parametrize(("method", "shape"), CASES, ids=str)
def test_chains_and_trees_of_the_traced_width_are_exact(method: str, shape: DraftShape) -> None:
    replay = replayed(replayer(method), shape)
    assert replay.num_unknown == 0
    assert_equal(replay, live(method, shape))
    if method == "draft_model" and shape.num_draft_tokens > 4:
        assert replay.tokens_per_round > 1.25, "too little was accepted for this to show anything"


@pytest.mark.parametrize(
    ("method", "shape"), [*(("draft_model", shape) for shape in NARROW), ("eagle", NARROW[3])], ids=str
)
def test_narrower_trees_are_exact_where_nothing_is_unknown(method: str, shape: DraftShape) -> None:
    replay = replayed(replayer(method), shape)
    known = replay.unknown_R == 0
    completions = live(method, shape)
    assert_equal(replay, completions, known)
    live_rounds = sum(c.speculation.rounds for c in completions)
    assert abs(live_rounds - replay.rounds) <= 0.02 * live_rounds + replay.num_unknown


def test_some_narrower_trees_are_known_and_some_are_not() -> None:
    """What makes the test above show something."""
    replays = [replayed(replayer("draft_model"), shape) for shape in NARROW]
    assert any(replay.num_unknown > 0 for replay in replays)
    assert sum(int((replay.unknown_R == 0).sum()) for replay in replays) > 20


@pytest.mark.parametrize("shape", [WIDE[2], SHALLOW[1]], ids=str)
def test_trees_on_sampled_text_are_exact(shape: DraftShape) -> None:
    assert_equal(replayed(replayer("draft_model", sampled=True), shape), live("draft_model", shape, sampled=True))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "shape", [DraftShape.ngram(2, 1, 3), DraftShape.ngram(6, 2, 2), DraftShape.ngram(9, 2, 5)], ids=str
)
def test_ngrams_are_exact(shape: DraftShape, params: SamplingParams) -> None:
    """Whatever the text: a trace for n-grams holds no drafts."""
    sampled = params.temperature > 0
    rows = traced("draft_model", sampled).rows
    trace = Trace(tuple(type(row)(row.num_prompt, row.tokens) for row in rows), sampled=sampled)
    engine = tiny_engine("ngram", DraftShape(8, 1, 9), num_pages=256, eos=EOS)
    engine.set_methods(ByBatch.always(HostNgramDraft(shape, *(shape.ngram_match or ()))), "none")
    replay, completions = replayed(Replayer(trace), shape), run(engine, as_lists(), params)
    assert_equal(replay, completions)
    # Rounds that find nothing draft nothing; those at a row's end draft no further than it.
    drafted, most = sum(c.speculation.drafted for c in completions), shape.num_draft_tokens - 1
    cut = len(completions) * most * (most + 1) / 2
    assert drafted - 1e-6 <= (replay.nodes_per_round - 1) * replay.rounds <= drafted + cut
    assert 1 < replay.nodes_per_round < shape.num_draft_tokens
