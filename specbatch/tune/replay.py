"""Replay of the traced rows with a draft shape, which gives the number of rounds of each row. The drafts at every
position are known, so the rounds are walked as the engine would walk them.

A round at position p that accepts a drafts commits a + 1 tokens: those and the target's own; at the row's end what is
past it is cut. The prefill drew the first token. That is what `counts.SpeculationCounts` counts in a run: rounds,
tokens committed, and drafts kept by depth.

Exact for greedy text with chains and n-grams, for sampled text with trees, n-grams and coupled chains (whose acceptance
draws the numbers that plain sampling draws), and for smaller trees but for the rounds counted in `num_unknown` (see
`subtrees`).
For sampled text with other chains it is an estimate, from greedy chains instead of sampled ones. A run that drew its
drafts corrects it, if there was one (`Trace.drawn`): where a model is not sure, drawn drafts are accepted more often.

Shape suffixes: R rows, P positions of all rows, S draft steps, Q draft shapes, T tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specbatch.draft.ngram import NgramIndex
from specbatch.draft.shape import DraftShape
from specbatch.tune.subtrees import Ranks, WideTrees
from specbatch.tune.trace import Positions, Trace, leading, stacked, true_tokens

MAX_NGRAM_DRAFTS = 127  # tokens that a round drafts
_NUM_SAMPLES = 1000  # samples of a bootstrap
_CHUNK = 64  # shapes walked at once, which bounds the memory


@dataclass(frozen=True, eq=False)
class Replay:
    """A draft shape on the traced rows."""

    shape: DraftShape
    rounds_R: NDArray[np.float64]  # verify passes after the prefill
    tokens_R: NDArray[np.int64]  # tokens that those committed
    unknown_R: NDArray[np.float64]  # rounds whose drafts the trace does not hold for certain
    accepted_at: tuple[float, ...]  # [s]: rounds of all rows that kept a draft of step s
    idle_R: NDArray[np.float64] | None = None  # n-grams: rounds that find nothing, and so draft nothing

    @property
    def rounds(self) -> float:
        return float(self.rounds_R.sum())

    @property
    def tokens_per_round(self) -> float:
        """Return the tokens per round of all rows together. A row of few tokens a round counts with its many rounds, as
        it does in a running batch."""
        return float(self.tokens_R.sum()) / self.rounds

    @property
    def nodes_per_round(self) -> float:
        """Verified in a row's round on average, where rounds that draft nothing verify the root alone."""
        idle = 0.0 if self.idle_R is None else float(self.idle_R.sum())
        return 1.0 + (self.shape.num_draft_tokens - 1) * (1.0 - idle / self.rounds)

    @property
    def num_unknown(self) -> float:
        return float(self.unknown_R.sum())

    @property
    def unknown_share(self) -> float:
        """Return the share of the rounds whose drafts the trace does not hold for certain."""
        return self.num_unknown / self.rounds

    def of_rows(self, rows: slice | NDArray[np.intp]) -> Replay:
        """Return the replay of these traced rows alone; `accepted_at` stays that of all."""
        return replace(
            self,
            rounds_R=self.rounds_R[rows],
            tokens_R=self.tokens_R[rows],
            unknown_R=self.unknown_R[rows],
            idle_R=None if self.idle_R is None else self.idle_R[rows],
        )

    def rates(self) -> NDArray[np.float64]:
        """The tokens per round of each row, (R,). A row without rounds has the value of all rows."""
        has = self.rounds_R > 0
        return np.where(has, self.tokens_R / np.where(has, self.rounds_R, 1.0), self.tokens_per_round)

    @cached_property
    def interval(self) -> tuple[float, float]:
        """90% bootstrap interval of `tokens_per_round`: percentiles over samples of the rows, drawn with replacement
        (Efron 1979)."""
        rows = self.rounds_R > 0
        count = int(rows.sum())
        draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=_NUM_SAMPLES)
        ratios = (draws @ self.tokens_R[rows]) / (draws @ self.rounds_R[rows])
        low, high = np.quantile(ratios, [0.05, 0.95])
        return float(low), float(high)


class Replayer:
    """Replays draft shapes of one trace. Keeps what they share: one instance for all of them is the fastest."""

    def __init__(self, trace: Trace) -> None:
        """Raises TuningError for a trace without a single round."""
        self._trace = trace
        self._positions = Positions.of(trace)
        self._true_PS = true_tokens(trace, self._positions, trace.depth)
        self._ranks: dict[int, Ranks] = {}  # ranks by topk

    @cached_property
    def _chains(self) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
        """The number of right drafts of the longest chain, (P,), and whether nothing was drafted, (P,)."""
        chain_PS = stacked(self._trace, "chain_PS", self._trace.depth)
        return leading(chain_PS == self._true_PS), np.asarray(chain_PS[:, 0] == -1)

    @cached_property
    def _trees(self) -> WideTrees:
        return WideTrees(self._trace, self._true_PS)

    @cached_property
    def _ngrams(self) -> NgramMatches:
        return NgramMatches(self._trace, self._positions)

    def replay_all(self, shapes: Sequence[DraftShape]) -> list[Replay]:
        """Each of these shapes, which the trace is deep and wide enough for; many at once are faster."""
        replays: list[Replay] = []
        for begin in range(0, len(shapes), _CHUNK):
            part = shapes[begin : begin + _CHUNK]
            found = [self._accepted(shape) for shape in part]
            visits_QP = self._walk(np.stack([accepted_P for accepted_P, _ in found]))
            replays += [self._counted(*one) for one in zip(part, found, visits_QP, strict=True)]
        return [self._as_drawn(replay) for replay in replays]

    def rank_shares(self) -> NDArray[np.float64] | None:
        """See `WideTrees.rank_shares`; None for a trace without trees."""
        return self._trees.rank_shares(self._true_PS) if self._trace.topk > 1 else None

    def _as_drawn(self, replay: Replay) -> Replay:
        """Return the replay of a chain as if its drafts had been drawn: with as many more tokens per round as the run
        of the longest chain had within these steps."""
        shape, drawn = replay.shape, self._trace.drawn
        if drawn is None or not drawn[0] or not shape.is_chain or shape.ngram_match is not None:
            return replay
        shares = drawn[1 : 1 + shape.num_steps] / drawn[0]
        gain = (1 + shares.sum()) / (1 + self._greedy_shares[: shape.num_steps].sum())
        tokens_R = replay.tokens_R  # a round commits 1 to `max_path` of them
        rounds_R = np.clip(replay.rounds_R / gain, tokens_R / shape.max_path, tokens_R)
        accepted_at = tuple((shares * rounds_R.sum()).tolist())
        return replace(replay, rounds_R=rounds_R, unknown_R=replay.unknown_R / gain, accepted_at=accepted_at)

    @cached_property
    def _greedy_shares(self) -> NDArray[np.float64]:
        """Compute the share of the rounds of the longest chain that accept a draft of each step, (S,)."""
        depth = self._trace.depth
        found = self._accepted(DraftShape(depth, 1, depth + 1))
        replay = self._counted(DraftShape(depth, 1, depth + 1), found, self._walk(found[0][None])[0])
        return np.array(replay.accepted_at) / replay.rounds

    def _accepted(self, shape: DraftShape) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
        """Return the number of drafts that a round at each position accepts, (P,), and whether it is uncertain,
        (P,)."""
        shape.check()
        if shape.ngram_match is not None:
            assert shape.num_steps <= MAX_NGRAM_DRAFTS, shape
            right_P, _ = self._ngrams.accepted(*shape.ngram_match)
            return np.minimum(right_P, np.int16(shape.num_steps)), np.zeros(len(right_P), dtype=np.bool_)
        assert shape.num_steps <= self._trace.depth, f"{shape} is deeper than the trace"
        assert shape.topk <= self._trace.topk, f"{shape} is wider than the trace"
        if shape.is_chain:
            right_P, none_P = self._chains
            return np.minimum(right_P, np.int16(shape.num_steps)), none_P
        if shape.topk not in self._ranks:
            self._ranks[shape.topk] = self._trees.ranks(shape.topk)
        ranks, size = self._ranks[shape.topk], (shape.num_steps, shape.num_draft_tokens)
        return ranks.accepted(*size), ranks.unknown(*size)

    def _walk(self, accepted_QP: NDArray[np.int16]) -> NDArray[np.bool_]:
        """Find the positions at which rounds begin, (Q, P), for all rows and all shapes at once."""
        visited_QP = np.zeros(accepted_QP.shape, dtype=np.bool_)
        count = len(accepted_QP)
        here, last = np.tile(self._positions.first_R, count), np.tile(self._positions.last_R, count)
        queue = np.repeat(np.arange(count), len(self._positions.first_R))
        while True:
            going = here < last
            if not going.all():
                here, last, queue = here[going], last[going], queue[going]
            if not len(here):
                return visited_QP
            visited_QP[queue, here] = True
            here = here + accepted_QP[queue, here] + 1

    def _counted(
        self,
        shape: DraftShape,
        accepted: tuple[NDArray[np.int16], NDArray[np.bool_]],
        visits_P: NDArray[np.bool_],
    ) -> Replay:
        accepted_P, unknown_P = accepted
        at_least = np.bincount(accepted_P, weights=visits_P, minlength=shape.max_path)[::-1].cumsum()[::-1]
        idle_R = None
        if shape.ngram_match is not None:
            idle_R = self._by_row(visits_P & ~self._ngrams.accepted(*shape.ngram_match)[1])
        return Replay(
            shape,
            self._by_row(visits_P),
            self._positions.num_committed_R,
            self._by_row(visits_P & unknown_P),
            tuple(float(value) for value in at_least[1:]),
            idle_R,
        )

    def _by_row(self, values_P: NDArray[np.bool_]) -> NDArray[np.float64]:
        row_P = np.repeat(np.arange(len(self._positions.first_R)), self._positions.num_outputs_R)
        return np.bincount(row_P[values_P], minlength=len(self._positions.first_R)).astype(np.float64)


class NgramMatches:
    """N-gram drafts at each position: `draft.ngram.NgramIndex` over the texts."""

    def __init__(self, trace: Trace, positions: Positions) -> None:
        self._trace = trace
        self._tokens_T = np.concatenate([row.tokens for row in trace.rows])
        first_token_R = np.cumsum([0, *(len(row.tokens) for row in trace.rows[:-1])])
        within_P = np.arange(positions.count) - np.repeat(positions.first_R, positions.num_outputs_R)
        num_prompt_R = np.array([row.num_prompt for row in trace.rows])
        self._first_P = np.repeat(first_token_R, positions.num_outputs_R)
        # The token after each root, and how many there are.
        self._next_P = within_P + 1 + np.repeat(first_token_R + num_prompt_R, positions.num_outputs_R)
        self._left_P = np.repeat(positions.num_outputs_R, positions.num_outputs_R) - 1 - within_P
        self._found: dict[int, NDArray[np.int64]] = {}
        self._accepted: dict[tuple[int, int], tuple[NDArray[np.int16], NDArray[np.bool_]]] = {}

    def accepted(self, min_match: int, max_match: int) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
        """Return the number of accepted drafts of a round that drafts MAX_NGRAM_DRAFTS tokens, (P,); a round with fewer
        drafts accepts at most these. Also return whether the text has a match, (P,), without which nothing is
        drafted."""
        match = min_match, max_match
        if match not in self._accepted:
            found_P = np.full(len(self._next_P), -1, dtype=np.int64)
            for size in range(max_match, min_match - 1, -1):
                found_P = np.where(found_P >= 0, found_P, self._after_match(size))
            self._accepted[match] = self._common(found_P), found_P >= 0
        return self._accepted[match]

    def _after_match(self, size: int) -> NDArray[np.int64]:
        """Find the token of T after the last earlier occurrence of the `size` tokens that end with the root, (P,); -1:
        there is none."""
        if size not in self._found:
            found: list[int] = []
            for row in self._trace.rows:
                index, tokens = NgramIndex(size, size), row.tokens.tolist()
                text = tokens[: row.num_prompt]
                for token in tokens[row.num_prompt :]:
                    text.append(token)
                    index.update(text)
                    match = index.find(text)
                    found.append(-1 if match is None else match[1])
            found_P = np.array(found, dtype=np.int64)
            self._found[size] = np.where(found_P >= 0, found_P + self._first_P, -1)
        return self._found[size]

    def _common(self, found_P: NDArray[np.int64]) -> NDArray[np.int16]:
        """Count the tokens after the occurrence that equal those after the root, (P,). A draft that reaches the root
        goes on with itself, which is the text as long as it is right."""
        count_P = np.zeros(len(found_P), dtype=np.int16)
        going = np.flatnonzero((found_P >= 0) & (self._left_P > 0))
        for step in range(MAX_NGRAM_DRAFTS):
            going = going[self._tokens_T[found_P[going] + step] == self._tokens_T[self._next_P[going] + step]]
            count_P[going] += 1
            going = going[self._left_P[going] > step + 1]
        return count_P
