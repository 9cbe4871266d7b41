"""The proposers of a schedule."""

from __future__ import annotations

from collections.abc import Callable

from specbatch.cache.pages import KVCache
from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.engine.sequence import Sequence
from tests.oracle.ngram import NoProposer
from tests.oracle.proposer import Proposer, TargetOutput
from tests.oracle.tree import DraftTree


class ScheduledProposer:
    """A proposer that calls one of several by the number of running requests. They share their draft network and the
    sequences' draft states. `leader` follows the committed tokens, also after rounds that did not draft, because the
    next ones may."""

    def __init__(self, proposers: ByBatch[Proposer], leader: Proposer) -> None:
        self._proposers = proposers
        self._leader = leader

    @property
    def num_lookahead(self) -> int:
        return max(p.num_lookahead for p in (self._leader, *self._proposers.items))

    @property
    def prefix_lookahead(self) -> int:
        return self._leader.prefix_lookahead

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._leader.aux_layers

    @property
    def cache(self) -> KVCache | None:
        return self._leader.cache

    def start(self, seq: Sequence) -> None:
        self._leader.start(seq)

    def extend(self, sequences: list[Sequence], output: TargetOutput) -> None:
        self._leader.extend(sequences, output)

    def propose(self, sequences: list[Sequence]) -> DraftTree:
        return self._proposers.at(len(sequences)).propose(sequences)


def scheduled(schedule: Schedule, proposer_of: Callable[[DraftShape], Proposer]) -> Proposer:
    """Make the proposer of a schedule from the proposers that `proposer_of` makes."""
    drafting = {shape: proposer_of(shape) for shape in schedule.items if shape is not None}
    if not drafting:
        return NoProposer()
    leader = next(iter(drafting.values()))
    proposers = schedule.map(lambda shape: NoProposer() if shape is None else drafting[shape])
    return leader if len(proposers.items) == 1 else ScheduledProposer(proposers, leader)
