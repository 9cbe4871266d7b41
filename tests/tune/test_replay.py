"""Replay against obvious, slow versions of itself: a made-up draft model, every tree of which can be drawn anew."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from specbatch.draft.shape import DraftShape
from specbatch.errors import ConfigError, TuningError
from specbatch.tune.replay import Replay, Replayer
from specbatch.tune.trace import RowTrace, Trace
from tests.oracle.ngram import NgramIndex
from tests.tracing import replayed

VOCAB, TOPK, DEPTH = 7, 4, 4
SHAPES = [
    DraftShape(steps, topk, nodes)
    for topk, steps in itertools.product((2, 3, 4), (1, 2, 3, 4))
    for nodes in (2, 3, 5, 9, 14, 30)
    if nodes <= DraftShape(steps, topk, 2).num_candidates + 1
]
CHAINS = [DraftShape(steps, 1, steps + 1) for steps in range(1, DEPTH + 1)]
# A candidate of the slow version: tokens from the root to it, cumulative score, whether its children are known.
Node = tuple[tuple[int, ...], float]


class MadeUpDraft:
    """Children of any node at any position: all tokens with scores that depend on the place alone. With `grain`, scores
    are multiples of it, so that many are equal."""

    def __init__(self, seed: int, grain: float | None) -> None:
        self._seed, self._grain = seed, grain
        self._children: dict[tuple[int, ...], list[tuple[int, float]]] = {}

    def children(self, row: int, position: int, path: tuple[int, ...], k: int) -> list[tuple[int, float]]:
        place = (row, position, len(path), *path)
        if place not in self._children:
            self._children[place] = self._drawn(place)
        return self._children[place][:k]

    def _drawn(self, place: tuple[int, ...]) -> list[tuple[int, float]]:
        rng = np.random.default_rng([self._seed, *place])
        scores = -rng.exponential(0.4, VOCAB)
        if self._grain:
            scores = np.floor(scores / self._grain) * self._grain
        scores = scores.astype(np.float32)
        order = np.argsort(-scores, kind="stable")
        return [(int(token), float(scores[token])) for token in order]

    def steps(
        self, row: int, position: int, k: int, depth: int, known: dict[tuple[int, ...], bool] | None = None
    ) -> list[list[tuple[tuple[int, ...], float, tuple[int, ...]]]]:
        """Candidates by step: path, cumulative score, path of the parent. `known`: whose children there are."""
        beam: list[Node] = [((), 0.0)]
        steps = []
        for step in range(depth):
            step_candidates = []
            for path, score in beam:
                if step and known is not None and path not in known:
                    continue
                for token, more in self.children(row, position, path, k):
                    step_candidates.append(((*path, token), float(np.float32(score) + np.float32(more)), path))
            steps.append(step_candidates)
            beam = [(p, s) for p, s, _ in sorted(step_candidates, key=lambda c: -c[1])[:k]]
        return steps


def make_trace(draft: MadeUpDraft, seed: int, sizes: tuple[int, ...] = (13, 1, 2, 24)) -> Trace:
    rng, rows = np.random.default_rng(seed), []
    for r, size in enumerate(sizes):
        num_prompt = int(rng.integers(1, 5))
        text = [int(rng.integers(VOCAB))]
        for p in range(size - 1):  # often what the draft thinks likely
            likely = [token for token, _ in draft.children(r, p, (), VOCAB)]
            text.append(likely[min(int(rng.exponential(1.0)), VOCAB - 1)])
        chain = np.full((size, DEPTH), -1, np.int32)
        arrays = [
            np.full((size, DraftShape(DEPTH, TOPK, 2).num_candidates), -1, t) for t in (np.int32, np.float32, np.int16)
        ]
        for p in range(size - 1):
            path: tuple[int, ...] = ()
            for step in range(DEPTH):
                path = (*path, draft.children(r, p, path, 1)[0][0])
                chain[p, step] = path[-1]
            flat = [c for step in draft.steps(r, p, TOPK, DEPTH) for c in step]
            index = {c[0]: i for i, c in enumerate(flat)} | {(): -1}
            for i, (own, score, parent) in enumerate(flat):
                for array, value in zip(arrays, (own[-1], score, index[parent]), strict=True):
                    array[p, i] = value
        tokens = np.array([*rng.integers(VOCAB, size=num_prompt), *text], np.int32)
        rows.append(RowTrace(num_prompt, tokens, chain, *arrays))
    return Trace(tuple(rows), TOPK, DEPTH)


@cache
def made(seed: int, grain: float | None) -> tuple[Trace, Replayer]:
    trace = make_trace(draft_of(seed, grain), seed)
    return trace, Replayer(trace)


@cache
def draft_of(seed: int, grain: float | None) -> MadeUpDraft:
    return MadeUpDraft(seed, grain)


def slow_accepted(
    draft: MadeUpDraft, shape: DraftShape, row: int, position: int, behind: list[int], wide_only: bool
) -> int:
    """Drafts accepted of the tree that is drawn anew; `wide_only`: as if only the wide pass had been made."""
    known = None
    if wide_only:
        known = {c[2]: True for step in draft.steps(row, position, TOPK, DEPTH) for c in step}
    steps = draft.steps(row, position, shape.topk, shape.num_steps, known)
    candidates = [c for step in steps for c in step]
    tree = {c[0] for c in sorted(candidates, key=lambda c: -c[1])[: shape.num_draft_tokens - 1]}
    accepted = 0
    while accepted < len(behind) and tuple(behind[: accepted + 1]) in tree:
        accepted += 1
    return accepted


def positions_of(trace: Trace) -> list[tuple[int, int, list[int]]]:
    """Row, position and the tokens behind it, in the order of `Positions`."""
    return [
        (r, p, row.tokens[row.num_prompt + p + 1 :].tolist())
        for r, row in enumerate(trace.rows)
        for p in range(row.num_output)
    ]


@pytest.mark.parametrize("grain", [None, 0.2], ids=["scores", "equal-scores"])
@pytest.mark.parametrize("seed", [0, 1])
def test_trees_equal_the_slow_version_at_every_position(seed: int, grain: float | None) -> None:
    """As far as the wide pass goes; and where nothing is unknown, the tree that a narrow pass would have drafted."""
    trace, replayer = made(seed, grain)
    draft = draft_of(seed, grain)
    num_unknown = differing = 0
    for shape in SHAPES:
        accepted, unknown = replayer._accepted(shape)
        for i, (row, p, behind) in enumerate(positions_of(trace)):
            if not behind:
                continue
            assert accepted[i] == slow_accepted(draft, shape, row, p, behind, True), (shape, row, p)
            anew = slow_accepted(draft, shape, row, p, behind, False)
            assert unknown[i] or accepted[i] == anew, (shape, row, p)
            num_unknown += bool(unknown[i])
            differing += bool(accepted[i] != anew)
        if shape.topk == TOPK or shape.num_steps == 1:
            assert not any(unknown[i] for i, (_, _, behind) in enumerate(positions_of(trace)) if behind)
    assert num_unknown > 10 or grain, "nothing was unknown: the test shows less than it should"
    assert differing <= num_unknown


@pytest.mark.parametrize("shape", [*CHAINS, *SHAPES[::5]], ids=str)
def test_rounds_equal_a_walk_round_by_round(shape: DraftShape) -> None:
    trace, replayer = made(0, None)
    found = replayed(replayer, shape)
    accepted, unknown = replayer._accepted(shape)
    first, kept_at = 0, [0] * (shape.max_path - 1)
    for r, row in enumerate(trace.rows):
        text = row.tokens[row.num_prompt :].tolist()
        p = rounds = unknowns = tokens = 0
        while p < len(text) - 1:
            a = int(accepted[first + p])
            if shape.is_chain:
                assert row.chain_PS is not None
                right = [int(row.chain_PS[p, s]) for s in range(shape.num_steps)]
                assert a == next((i for i, t in enumerate(right) if [t] != text[p + 1 + i : p + 2 + i]), len(right))
            committed = min(a + 1, len(text) - 1 - p)
            for s in range(min(a, committed)):
                kept_at[s] += 1
            rounds, tokens, unknowns, p = (
                rounds + 1,
                tokens + committed,
                unknowns + bool(unknown[first + p]),
                p + committed,
            )
        first += len(text)
        assert (found.rounds_R[r], found.tokens_R[r], found.unknown_R[r]) == (rounds, tokens, unknowns)
    assert list(found.accepted_at) == kept_at
    assert found.tokens_per_round == found.tokens_R.sum() / found.rounds_R.sum()


def test_many_shapes_at_once_are_each_alone() -> None:
    trace, replayer = made(0, None)
    shapes = [*SHAPES, *CHAINS, DraftShape.ngram(4, 1, 3), *SHAPES]
    assert len(shapes) > 64, "more than are walked at once"
    for shape, found in zip(shapes, Replayer(trace).replay_all(shapes), strict=True):
        alone = replayed(replayer, shape)
        assert found.shape == shape
        assert found.rounds_R.tolist() == alone.rounds_R.tolist()
        assert found.accepted_at == alone.accepted_at


def test_larger_trees_never_take_more_rounds_in_all() -> None:
    _, replayer = made(1, None)
    for topk, steps in itertools.product((2, 3, 4), (2, 3, 4)):
        rounds = [replayed(replayer, s).rounds for s in SHAPES if (s.topk, s.num_steps) == (topk, steps)]
        assert rounds == sorted(rounds, reverse=True)


def test_positions_without_drafts_are_unknown_and_accept_nothing() -> None:
    trace, _ = made(0, None)
    row = trace.rows[0]
    arrays = [np.array(a) for a in (row.chain_PS, row.tokens_PC, row.scores_PC, row.parents_PC)]
    for array in arrays:
        array[5] = -1
    replayer = Replayer(Trace((RowTrace(row.num_prompt, row.tokens, *arrays),), TOPK, DEPTH))
    for shape in (DraftShape(3, 1, 4), DraftShape(3, 2, 6), DraftShape(4, 4, 30)):
        accepted, unknown = replayer._accepted(shape)
        assert (accepted[5], unknown[5]) == (0, True)


@pytest.mark.parametrize(("min_match", "max_match"), [(1, 1), (1, 3), (2, 5), (3, 4)])
def test_ngrams_equal_the_projects_lookup(min_match: int, max_match: int) -> None:
    rng = np.random.default_rng(min_match)
    rows = [RowTrace(1 + i % 4, (rng.random(2 + 9 * i) < 0.2 + 0.1 * (i % 3)).astype(np.int32)) for i in range(12)]
    replayer = Replayer(Trace(tuple(rows)))
    accepted, unknown = replayer._accepted(DraftShape.ngram(9, min_match, max_match))
    assert not unknown.any()
    expected = []
    for row in rows:
        text, index = row.tokens.tolist(), NgramIndex(min_match, max_match)
        for p in range(row.num_output):
            known = text[: row.num_prompt + p + 1]
            index.update(known)
            start, drafted = index.find(known), []
            if start is not None:
                for i in range(start, start + 8):
                    drafted.append(known[i] if i < len(known) else drafted[i - len(known)])
            behind = text[len(known) :]
            expected.append(next((i for i, t in enumerate(drafted) if behind[i : i + 1] != [t]), len(drafted)))
    assert accepted.tolist() == expected
    assert set(expected) >= {0, 1, 2, 3, 8}, "too little was found"


def test_intervals() -> None:
    _, replayer = made(0, None)
    found = replayed(replayer, CHAINS[2])
    low, high = found.interval
    assert low <= found.tokens_per_round <= high
    assert low < high
    assert replace(found).interval == (low, high), "the same seed gives the same samples"
    rates = found.rates()
    assert rates[1] == found.tokens_per_round, "a row without rounds has the rate of all"
    assert rates[0] == found.tokens_R[0] / found.rounds_R[0]


def test_drawn_drafts_that_are_worse_leave_rounds_with_a_token_each() -> None:
    """Where the target is surer than the draft network, drawn drafts are accepted less often than greedy ones."""
    trace, replayer = made(0, None)
    useless = Replayer(replace(trace, drawn=np.array([100, *[0] * trace.depth])))
    greedy, found = replayed(replayer, CHAINS[2]), replayed(useless, CHAINS[2])
    assert greedy.tokens_per_round > 1.1
    assert (found.rounds_R <= found.tokens_R).all()
    assert found.tokens_R.tolist() == greedy.tokens_R.tolist()


def test_a_trace_is_saved_and_read_back(tmp_path: Path) -> None:
    trace, _ = made(0, None)
    mixed = replace(trace, rows=(*trace.rows, RowTrace(1, np.array([3], np.int32))))
    path = tmp_path / "trace.npz"
    drawn = replace(trace, drawn=np.array([9, 7, 4, 1]))
    for kept in (Trace(topk=2, depth=3), mixed, drawn, trace):  # also over an older file
        kept.save(path)
        back = Trace.load(path)
        assert (back.topk, back.depth, back.sampled) == (kept.topk, kept.depth, kept.sampled)
        assert (back.drawn is None) == (kept.drawn is None)
        assert back.drawn is None or np.array_equal(back.drawn, drawn.drawn)
        assert len(back.rows) == len(kept.rows)
        for one, other in zip(back.rows, kept.rows, strict=True):
            for name in RowTrace.__slots__:
                a, b = getattr(one, name), getattr(other, name)
                assert (a is None) == (b is None), name
                assert a is None or (np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype), name
    assert [file.name for file in tmp_path.iterdir()] == ["trace.npz"]


@pytest.mark.parametrize("content", [b"", b"not a zip file", None])
def test_files_that_are_no_traces(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    if content is None:
        np.savez(path, header=np.array([99, 0, 0, 0, 0]))
    else:
        path.write_bytes(content)
    with pytest.raises(TuningError, match="cannot read the trace"):
        Trace.load(path)


@pytest.mark.parametrize(
    "shape", [DraftShape(5, 1, 6), DraftShape(2, 5, 8), DraftShape.ngram(1, 1, 2), DraftShape.ngram(3, 2, 1)]
)
def test_what_cannot_be_replayed(shape: DraftShape) -> None:
    with pytest.raises((AssertionError, ConfigError)):
        replayed(made(0, None)[1], shape)


def test_a_trace_without_rounds() -> None:
    short = RowTrace(2, np.array([1, 2, 3], np.int32))
    with pytest.raises(TuningError, match="continuation of two tokens"):
        Replayer(Trace((short,)))


@pytest.mark.parametrize("has_idle", [False, True])
def test_of_some_rows(has_idle: bool) -> None:
    columns = [np.arange(5.0) + 10 * i for i in range(4)]
    found = Replay(CHAINS[0], columns[0], columns[1].astype(np.int64), columns[2], (), columns[3] if has_idle else None)
    for rows in (slice(2), np.array([4, 0, 0])):
        part = found.of_rows(rows)
        assert part.shape == found.shape
        for name in ("rounds_R", "tokens_R", "unknown_R") + ("idle_R",) * has_idle:
            assert getattr(part, name).tolist() == getattr(found, name)[rows].tolist()
        assert (part.idle_R is not None) == has_idle
