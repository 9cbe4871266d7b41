"""Records what a draft network would draft, token after token, along the target's own text.

Rounds draft a wide tree and a greedy chain and then verify the root alone: each commits one token, the text is that of
plain decoding, and every place where a round could begin is seen once. What any narrower shape would have gained is
read off the record (`specbatch.tune.replay`).

Shape suffixes: B rows, C candidates of the tree, S steps of the chain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specbatch.batch import Candidates, Field
from specbatch.cache.pages import KVCache
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft import DraftParts
from specbatch.draft.chain import ChainDraft
from specbatch.draft.method import DraftMethod, DraftTrees
from specbatch.draft.network import TargetOutput
from specbatch.draft.shape import DraftShape
from specbatch.draft.tree import TreeDraft
from specbatch.engine.sequence import Sequence
from specbatch.oracle.neural import NeuralProposer
from specbatch.oracle.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Drafted:
    """One round's record."""

    streams_B: np.ndarray  # int64, the requests' `noise.stream`
    roots_B: np.ndarray  # int64, where in its token list each request's root stands
    chain_BS: np.ndarray  # int32, tokens of the target's vocabulary
    tokens_BC: np.ndarray  # int32
    scores_BC: np.ndarray  # float32, log probabilities of whole paths
    parents_BC: np.ndarray  # int16, -1: the root


Record = Callable[[Drafted], None]


class TracingProposer:
    """Around a proposer of the widest shape."""

    def __init__(self, wide: NeuralProposer, record: Record) -> None:
        self._wide = wide
        self._record = record

    @property
    def num_lookahead(self) -> int:
        return self._wide.num_lookahead

    @property
    def prefix_lookahead(self) -> int:
        return self._wide.prefix_lookahead

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._wide.aux_layers

    @property
    def cache(self) -> KVCache | None:
        return self._wide.cache

    def start(self, seq: Sequence) -> None:
        self._wide.start(seq)

    def extend(self, sequences: list[Sequence], output: TargetOutput) -> None:
        self._wide.extend(sequences, output)

    def propose(self, sequences: list[Sequence]) -> DraftTree:
        candidates = self._wide.candidates(sequences)
        chains = self._wide.chain(sequences, greedy=True).tokens_BN
        streams = np.array([seq.request.rng.stream for seq in sequences])
        roots = np.array([len(seq.tokens) - 1 for seq in sequences])
        self._record(_drafted(streams, roots, chains, candidates))
        return DraftTree.chain([[seq.tokens[-1]] for seq in sequences])


class TracingDrafter(DraftMethod):
    """The same for the device engine, whose rounds may be graphs: they leave their record on the device, where the host
    reads it in front of the next round."""

    num_nodes = max_path = 1

    def __init__(self, wide: DraftShape, parts: DraftParts) -> None:
        assert parts.net is not None, "without a draft network nothing is traced"
        self._tree, self._chain = TreeDraft(parts.net, wide, parts.ops), ChainDraft(parts.net, wide, parts.ops)
        self._last: _OnDevice | None = None
        self.net = parts.net
        self.num_lookahead = self._tree.num_lookahead

    def draft(self, rows: BatchView, state: RequestTable, sampled: bool) -> DraftTrees:
        candidates = self._tree.candidates(rows, state)
        chains = self._chain.draft(rows, state, sampled=False).tokens_BN
        goes_on = rows.field(Field.DONE) == 0  # neither padding nor a row that ended in the round before
        parts = (goes_on, rows.field(Field.STREAM), rows.length_B, chains, *candidates)
        if self._last is None:  # where graphs of all sizes write
            self._last = _OnDevice(*(part.new_zeros(len(state.ints_SF), *part.shape[1:]) for part in parts))
        self._last.goes_on_B.zero_()
        for kept, part in zip(self._last, parts, strict=True):
            kept[: len(part)] = part
        return DraftTrees(rows.field(Field.ROOT)[:, None])

    def read(self) -> Drafted | None:
        """The record of the round that was launched last; waits for it. None: no row went on."""
        assert self._last is not None, "no round was launched"
        goes_on = self._last.goes_on_B.cpu()
        if not goes_on.any():
            return None
        _, streams, roots, chains, *candidates = (part.cpu()[goes_on] for part in self._last)
        return _drafted(streams.numpy(), roots.numpy(), chains, Candidates(*candidates))


class _OnDevice(NamedTuple):
    """A round's record, in buffers with a place for each slot."""

    goes_on_B: Tensor
    streams_B: Tensor
    roots_B: Tensor
    chains_BM: Tensor
    tokens_BC: Tensor
    scores_BC: Tensor
    parents_BC: Tensor


def _drafted(streams_B: np.ndarray, roots_B: np.ndarray, chains_BM: Tensor, candidates: Candidates) -> Drafted:
    return Drafted(
        streams_B.astype(np.int64),
        roots_B.astype(np.int64),
        chains_BM[:, 1:].int().cpu().numpy(),
        candidates.tokens_BC.int().cpu().numpy(),
        candidates.scores_BC.float().cpu().numpy(),
        candidates.parents_BC.short().cpu().numpy(),
    )
