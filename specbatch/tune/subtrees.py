"""Drafts of smaller trees, taken from one wide pass.

A pass of a smaller topk k branches from the best k nodes of a step, and gives each only its first k children. Both are
among what the wide pass drafted, unless the smaller one branches from a node that had fallen out of the wide beam,
which has K places for K^2 candidates: the children of such a node are not known, and are taken as absent.

The verified tree is the N - 1 best candidates, of equals the earlier one. So all that has to be known of a node is its
rank among the candidates, and that is counted once for each k: a shallower tree has the same candidates, fewer steps of
them, and a smaller tree takes a smaller part of the same order.

Shape suffixes: P positions of all rows, S steps, C candidates of the wide pass, K = its topk, k = the smaller one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbatch.draft.shape import DraftShape
from specbatch.tune.trace import Trace, stacked

_NOWHERE = np.iinfo(np.uint16).max  # rank of a node that is not among the candidates
_ARRAYS = ("tokens", "scores", "parents")
_CHUNK = 4096  # positions at once, which bounds the memory


class WideTrees:
    """The wide trees of all positions, and where the true tokens lie in them."""

    def __init__(self, trace: Trace, true_PS: NDArray[np.int32]) -> None:
        self.topk, self.depth = trace.topk, trace.depth
        self._first = [0, *(self._columns(step) for step in range(1, self.depth))]
        columns = self._columns(self.depth)
        tokens_PC, scores_PC, parents_PC = (stacked(trace, f"{name}_PC", columns) for name in _ARRAYS)
        self._tokens_PC, self._scores_PC = tokens_PC, scores_PC
        self.not_drafted_P: NDArray[np.bool_] = np.asarray(tokens_PC[:, 0] == -1)
        # Which rank in the beam a candidate had when the wide pass branched from it; -1: it did not.
        self._place_PC = np.full(parents_PC.shape, -1, dtype=np.int8)
        for step in range(1, self.depth):
            first = self._first[step]
            for place in range(self.topk):
                node_P1 = parents_PC[:, first + place * self.topk][:, None].astype(np.int64)
                np.put_along_axis(self._place_PC, node_P1, np.int8(place), axis=1)
        self._place_PC[self.not_drafted_P] = -1
        self._path_PS = self._true_path(true_PS)

    def _columns(self, num_steps: int) -> int:
        return DraftShape(num_steps, self.topk, 2).num_candidates

    def _true_path(self, true_PS: NDArray[np.int32]) -> NDArray[np.int32]:
        """Find the candidate that holds the true token of each step after the true ones, (P, S); -1: there is none."""
        path_PS = np.full(true_PS.shape, -1, dtype=np.int32)
        rows = np.arange(len(true_PS))
        start_P = np.where(self.not_drafted_P, -1, 0)
        for step in range(self.depth):
            children_PK = np.maximum(start_P, 0)[:, None] + np.arange(self.topk)
            right_PK = np.take_along_axis(self._tokens_PC, children_PK, axis=1) == true_PS[:, step, None]
            right_PK &= start_P[:, None] >= 0
            node_P = children_PK[rows, right_PK.argmax(axis=1)]
            path_PS[:, step] = np.where(right_PK.any(axis=1), node_P, -1)
            if step + 1 < self.depth:
                place_P = np.where(path_PS[:, step] >= 0, self._place_PC[rows, np.maximum(path_PS[:, step], 0)], -1)
                start_P = np.where(place_P >= 0, self._first[step + 1] + place_P.astype(np.int64) * self.topk, -1)
        return path_PS

    def rank_shares(self, true_PS: NDArray[np.int32]) -> NDArray[np.float64]:
        """Compute (S, K + 1) shares of the positions whose true tokens up to a step are all among the drafts: the share
        whose next true token is the first, second ... child of that node. The last column is the share where it is no
        child, or where the wide pass did not branch from the node. Rows that no position reaches are 0."""
        shares_SK = np.zeros((self.depth, self.topk + 1))
        reached_P = ~self.not_drafted_P
        for step in range(self.depth):
            asked_P = reached_P & (true_PS[:, step] >= 0)
            node_P = self._path_PS[asked_P, step]
            rank_P = np.where(node_P >= 0, (node_P - self._first[step]) % self.topk, self.topk)
            shares_SK[step] = np.bincount(rank_P, minlength=self.topk + 1) / max(1, len(rank_P))
            reached_P = self._path_PS[:, step] >= 0
        return shares_SK

    def ranks(self, topk: int) -> Ranks:
        """Return the ranks of the true path and of the nodes of unknown children among the candidates of a pass of that
        width."""
        assert 1 < topk <= self.topk, (topk, self.topk)
        count = len(self._path_PS)
        true_PSS = np.empty((count, self.depth, self.depth), dtype=np.uint16)
        unknown_PSS = np.empty((count, self.depth, self.depth), dtype=np.uint16)
        for begin in range(0, count, _CHUNK):
            part = slice(begin, begin + _CHUNK)
            true_PSS[part], unknown_PSS[part] = self._ranks(topk, part)
        return Ranks(true_PSS, unknown_PSS, self.not_drafted_P)

    def _ranks(self, k: int, part: slice) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
        scores_PC, place_PC, path_PS = self._scores_PC[part], self._place_PC[part], self._path_PS[part]
        count = len(path_PS)
        # Of each step the candidates in their order: which one of the wide pass each is (-1: unknown), and its score.
        nodes = [np.broadcast_to(np.arange(k, dtype=np.int64), (count, k))]
        scores = [scores_PC[:, :k].astype(np.float32)]
        beam_Pk, beam_scores_Pk = nodes[0], scores[0]
        unknown: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []  # each step's first: its node and score
        for step in range(1, self.depth):
            known_Pk = beam_Pk >= 0
            place_Pk = np.take_along_axis(place_PC, np.maximum(beam_Pk, 0), axis=1)
            lost_Pk = known_Pk & (place_Pk < 0)
            unknown.append(_first_where(lost_Pk, beam_Pk, beam_scores_Pk))
            known_Pk &= place_Pk >= 0
            start_Pk = self._first[step] + place_Pk.astype(np.int64) * self.topk
            children = (start_Pk[:, :, None] + np.arange(k)).reshape(count, k * k)
            known = np.repeat(known_Pk, k, axis=1)
            children = np.where(known, children, -1)
            found = np.take_along_axis(scores_PC, np.maximum(children, 0), axis=1)
            nodes.append(children)
            scores.append(np.where(known, found, -np.inf).astype(np.float32))
            chosen = np.argsort(-scores[-1], axis=1, kind="stable")[:, :k]
            beam_Pk = np.take_along_axis(children, chosen, axis=1)
            beam_scores_Pk = np.take_along_axis(scores[-1], chosen, axis=1)
        unknown.append((np.full(count, -1, dtype=np.int64), np.full(count, -np.inf, dtype=np.float32)))
        true_PSS = np.empty((count, self.depth, self.depth), dtype=np.uint16)
        unknown_PSS = np.empty_like(true_PSS)
        rows = np.arange(count)
        for step in range(self.depth):
            node_P = path_PS[:, step].astype(np.int64)
            score_P = np.where(node_P >= 0, scores_PC[rows, np.maximum(node_P, 0)], np.float32(np.inf))
            true_PSS[:, step] = _rank(node_P, score_P, step, nodes, scores)
            unknown_PSS[:, step] = _rank(*unknown[step], step, nodes, scores)
        return true_PSS, unknown_PSS


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """[p, i, j]: how many candidates of steps 0 .. j come before a node of step i <= j of position p. The node: of the
    true path, or the first of step i that a pass branched from without its children being known."""

    true_PSS: NDArray[np.uint16]
    unknown_PSS: NDArray[np.uint16]
    not_drafted_P: NDArray[np.bool_]

    def accepted(self, num_steps: int, num_draft_tokens: int) -> NDArray[np.int16]:
        """Return the number of accepted drafts, (P,), of a tree with `num_steps` and `num_draft_tokens`. A parent comes
        before its children, so the path goes as far as its nodes are in the tree."""
        ranks_PS = self.true_PSS[:, :num_steps, num_steps - 1]
        return (ranks_PS < num_draft_tokens - 1).sum(axis=1).astype(np.int16)

    def unknown(self, num_steps: int, num_draft_tokens: int) -> NDArray[np.bool_]:
        """Return whether the tree may differ from the one drafted here, (P,). This needs a node in the tree whose
        children are not known. The descendants of a node that is not in the tree come after all its nodes, and so do
        the nodes that replace them."""
        ranks_PS = self.unknown_PSS[:, : num_steps - 1, num_steps - 1]
        return np.any(ranks_PS < num_draft_tokens - 1, axis=1) | self.not_drafted_P


def _first_where(
    wanted_Pk: NDArray[np.bool_], nodes_Pk: NDArray[np.int64], scores_Pk: NDArray[np.float32]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Node and score of the first of each position that is wanted; -1 and -inf where none is."""
    rows, first = np.arange(len(wanted_Pk)), wanted_Pk.argmax(axis=1)
    any_P = wanted_Pk.any(axis=1)
    return np.where(any_P, nodes_Pk[rows, first], -1), np.where(any_P, scores_Pk[rows, first], -np.inf)


def _rank(
    node_P: NDArray[np.int64],
    score_P: NDArray[np.float32],
    step: int,
    nodes: list[NDArray[np.int64]],
    scores: list[NDArray[np.float32]],
) -> NDArray[np.uint16]:
    """Count the candidates of steps 0 .. j before a node of `step`, (P, S). It is _NOWHERE where j < step, and for a
    node that is not among the candidates."""
    is_it_Pc = nodes[step] == node_P[:, None]
    there_P = is_it_Pc.any(axis=1) & (node_P >= 0)
    place_P = is_it_Pc.argmax(axis=1)
    ranks_PS = np.empty((len(node_P), len(nodes)), dtype=np.int64)
    before_P = np.zeros(len(node_P), dtype=np.int64)
    for j, scores_Pc in enumerate(scores):
        better = scores_Pc > score_P[:, None]
        if j < step:  # The earlier one of equal candidates comes first.
            better = scores_Pc >= score_P[:, None]
        elif j == step:
            earlier = np.arange(scores_Pc.shape[1]) < place_P[:, None]
            better |= (scores_Pc == score_P[:, None]) & earlier
        before_P = before_P + better.sum(axis=1)
        ranks_PS[:, j] = np.where(there_P & (j >= step), before_P, _NOWHERE)
    return ranks_PS.astype(np.uint16)
