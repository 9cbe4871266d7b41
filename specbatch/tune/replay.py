"""How many rounds each traced row would take with a draft shape: its drafts at every position are known, so the rounds
are walked as the engine would walk them.

A round at position p that accepts a drafts commits a + 1 tokens: those and the target's own; at the row's end what is
past it is cut. The prefill drew the first token. That is what `types.SpeculationCounts` counts in a run: rounds, tokens
committed, and drafts kept by depth.

Exact for greedy text with chains and n-grams, for sampled text with trees and n-grams (whose acceptance draws the
numbers that plain sampling draws), and for smaller trees but for the rounds counted in `num_unknown` (see `subtrees`).
For sampled text with chains it is an estimate, from greedy chains instead of sampled ones.

Shape suffixes: R rows, P positions of all rows, S draft steps, Q draft shapes, T tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from specbatch.draft.ngram import NgramIndex
from specbatch.draft.shape import DraftShape
from specbatch.errors import TuningError
from specbatch.tune.subtrees import Ranks, WideTrees
from specbatch.tune.trace import Positions, Trace, leading, stacked, true_tokens

MAX_NGRAM_DRAFTS = 127  # of a round
_CHUNK = 64  # shapes walked at once, which bounds the memory


@dataclass(frozen=True, slots=True, eq=False)
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
        """Of all rows together: tokens / rounds. A row of few tokens a round counts with its many rounds, as it does in
        a running batch."""
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
        """Of the rounds."""
        return self.num_unknown / self.rounds

    def of_rows(self, rows: slice | NDArray[np.intp]) -> Replay:
        """Of these traced rows alone; `accepted_at` stays that of all."""
        return replace(
            self,
            rounds_R=self.rounds_R[rows],
            tokens_R=self.tokens_R[rows],
            unknown_R=self.unknown_R[rows],
            idle_R=None if self.idle_R is None else self.idle_R[rows],
        )

    def rates(self) -> NDArray[np.float64]:
        """(R,) each row's own tokens per round; that of all for a row without rounds."""
        has = self.rounds_R > 0
        return np.where(has, self.tokens_R / np.where(has, self.rounds_R, 1.0), self.tokens_per_round)

    def interval(self, level: float = 0.9, num_samples: int = 1000, seed: int = 0) -> tuple[float, float]:
        """Bootstrap interval of `tokens_per_round`: percentiles over samples of the rows, drawn with replacement
        (Efron 1979)."""
        rows = self.rounds_R > 0
        count = int(rows.sum())
        draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=num_samples)
        ratios = (draws @ self.tokens_R[rows]) / (draws @ self.rounds_R[rows])
        low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
        return float(low), float(high)


@dataclass(slots=True)
class _Prepared:
    """What shapes share, made for the first that needs it."""

    chain_P: NDArray[np.int16] | None = None
    no_chain_P: NDArray[np.bool_] | None = None
    trees: WideTrees | None = None
    ranks: dict[int, Ranks] = field(default_factory=dict)
    ngrams: NgramMatches | None = None


class Replayer:
    """Replays draft shapes of one trace. Keeps what they share: one instance for all of them is the fastest."""

    def __init__(self, trace: Trace) -> None:
        """Raises TuningError for a trace without a single round."""
        self._trace = trace
        self._positions = Positions.of(trace)
        self._true_PS = true_tokens(trace, self._positions, trace.depth)
        self._prepared = _Prepared()

    def replay(self, shape: DraftShape) -> Replay:
        """Raises ConfigError for an illegal shape, TuningError for one that is wider or deeper than the trace."""
        return self.replay_all([shape])[0]

    def replay_all(self, shapes: Sequence[DraftShape]) -> list[Replay]:
        """`replay` for each of many, faster."""
        replays: list[Replay] = []
        for begin in range(0, len(shapes), _CHUNK):
            part = shapes[begin : begin + _CHUNK]
            found = [self._accepted(shape) for shape in part]
            visits_QP = self._walk(np.stack([accepted_P for accepted_P, _ in found]))
            replays += [self._counted(*one) for one in zip(part, found, visits_QP, strict=True)]
        return replays

    def rank_shares(self) -> NDArray[np.float64] | None:
        """(S, topk + 1): how often the true token of a step is the draft's first, second ... choice after the true
        ones, and in the last column none of its choices; None for a trace without drafts. Of a trace of chains, which
        know first choices only, the two columns are right and wrong."""
        if self._trace.topk > 1:
            return self._wide_trees().rank_shares(self._true_PS)
        if self._trace.topk == 0 or self._trace.depth == 0:
            return None
        right_P, no_chain_P = self._chain(self._trace.depth)
        shares_SK = np.zeros((self._trace.depth, 2))
        for step in range(self._trace.depth):
            asked_P = (self._true_PS[:, step] >= 0) & ~no_chain_P & (right_P >= step)
            right = float((right_P[asked_P] > step).mean()) if asked_P.any() else 0.0
            shares_SK[step] = right, (1.0 - right) if asked_P.any() else 0.0
        return shares_SK

    def _check(self, shape: DraftShape) -> None:
        shape.check()
        trace = self._trace
        if shape.ngram_match is not None:
            if shape.num_draft_tokens > MAX_NGRAM_DRAFTS + 1:
                raise TuningError(
                    f"num_draft_tokens is {shape.num_draft_tokens}: at most {MAX_NGRAM_DRAFTS + 1} are replayed"
                )
        elif shape.num_steps > trace.depth or shape.topk > trace.topk:
            raise TuningError(
                f"{shape} is deeper or wider than the trace of {trace.depth} steps and topk {trace.topk}",
                hint="trace deeper and wider",
            )

    def _accepted(self, shape: DraftShape) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
        """(P,) drafts that a round at each position accepts, and whether that is not certain."""
        self._check(shape)
        if shape.ngram_match is not None:
            right_P, _ = self._ngrams(shape.ngram_match)
            return np.minimum(right_P, np.int16(shape.num_steps)), np.zeros(len(right_P), dtype=np.bool_)
        if shape.is_chain:
            return self._chain(shape.num_steps)
        ranks, size = self._ranks(shape.topk), (shape.num_steps, shape.num_draft_tokens)
        return ranks.accepted(*size), ranks.unknown(*size)

    def _ngrams(self, match: tuple[int, int]) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
        if self._prepared.ngrams is None:
            self._prepared.ngrams = NgramMatches(self._trace, self._positions)
        return self._prepared.ngrams.accepted(*match)

    def _chain(self, steps: int) -> tuple[NDArray[np.int16], NDArray[np.bool_]]:
        if self._prepared.chain_P is None:
            chain_PS = stacked(self._trace, "chain_PS", self._trace.depth)
            if chain_PS is None:
                raise TuningError("the trace has no chains of drafts")
            self._prepared.chain_P = leading(chain_PS == self._true_PS)
            self._prepared.no_chain_P = chain_PS[:, 0] == -1
        assert self._prepared.no_chain_P is not None
        return np.minimum(self._prepared.chain_P, np.int16(steps)), self._prepared.no_chain_P

    def _wide_trees(self) -> WideTrees:
        if self._prepared.trees is None:
            self._prepared.trees = WideTrees(self._trace, self._true_PS)
        return self._prepared.trees

    def _ranks(self, topk: int) -> Ranks:
        trees = self._wide_trees()
        if topk not in self._prepared.ranks:
            self._prepared.ranks[topk] = trees.ranks(topk)
        return self._prepared.ranks[topk]

    def _walk(self, accepted_QP: NDArray[np.int16]) -> NDArray[np.bool_]:
        """(Q, P) the positions at which rounds begin, all rows of all shapes at once."""
        visited_QP = np.zeros(accepted_QP.shape, dtype=np.bool_)
        here = np.broadcast_to(self._positions.first_R, (len(accepted_QP), len(self._positions.first_R))).ravel()
        last = np.broadcast_to(self._positions.last_R, (len(accepted_QP), len(self._positions.first_R))).ravel()
        queue = np.repeat(np.arange(len(accepted_QP)), len(self._positions.first_R))
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
        depths = np.bincount(accepted_P, weights=visits_P, minlength=shape.max_path)
        at_least = depths[::-1].cumsum()[::-1]
        idle_R = None
        if shape.ngram_match is not None:
            _, drafts_P = self._ngrams(shape.ngram_match)
            idle_R = self._by_row(visits_P & ~drafts_P)
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
    """What n-gram drafts would be at each position: `draft.ngram.NgramIndex` over the texts."""

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
        """(P,) drafts accepted of a round that drafts MAX_NGRAM_DRAFTS tokens (of one that drafts fewer, at most
        those), and (P,) whether the text has a match, without which nothing is drafted."""
        match = min_match, max_match
        if match not in self._accepted:
            found_P = np.full(len(self._next_P), -1, dtype=np.int64)
            for size in range(max_match, min_match - 1, -1):
                found_P = np.where(found_P >= 0, found_P, self._after_match(size))
            self._accepted[match] = self._common(found_P), found_P >= 0
        return self._accepted[match]

    def _after_match(self, size: int) -> NDArray[np.int64]:
        """(P,) the token of T after the last earlier occurrence of the `size` tokens that end with the root; -1: there
        is none."""
        if size not in self._found:
            found: list[int] = []
            for row in self._trace.rows:
                index, tokens = NgramIndex(size, size), row.tokens.tolist()
                text = tokens[: row.num_prompt]
                for token in tokens[row.num_prompt :]:
                    text.append(token)
                    index.update(text)
                    start = index.find(text)
                    found.append(-1 if start is None else start)
            found_P = np.array(found, dtype=np.int64)
            self._found[size] = np.where(found_P >= 0, found_P + self._first_P, -1)
        return self._found[size]

    def _common(self, found_P: NDArray[np.int64]) -> NDArray[np.int16]:
        """(P,) how many tokens after the occurrence equal those after the root. A draft that reaches the root goes on
        with itself: as long as it is right, that is the text."""
        count_P = np.zeros(len(found_P), dtype=np.int16)
        going = np.flatnonzero((found_P >= 0) & (self._left_P > 0))
        for step in range(MAX_NGRAM_DRAFTS):
            going = going[self._tokens_T[found_P[going] + step] == self._tokens_T[self._next_P[going] + step]]
            count_P[going] += 1
            going = going[self._left_P[going] > step + 1]
        return count_P


def replay(trace: Trace, shape: DraftShape) -> Replay:
    """One shape of a trace; see `Replayer.replay`."""
    return Replayer(trace).replay(shape)
