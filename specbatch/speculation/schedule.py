"""What a round drafts may depend on how many rows are running: few rows leave room for deep drafts, many do not."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from specbatch.cache.pages import KVCache
from specbatch.speculation.ngram import NoProposer
from specbatch.speculation.proposer import Proposer, TargetOutput
from specbatch.speculation.sequence import Sequence
from specbatch.speculation.tree import DraftShape, DraftTree

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class ByBatch(Generic[T]):
    """`items[i]` is for more than `bounds[i - 1]` and at most `bounds[i]` running rows, the last item also for more."""

    bounds: tuple[int, ...]  # ascending
    items: tuple[T, ...]

    @staticmethod
    def always(item: T) -> ByBatch[T]:
        return ByBatch((1,), (item,))

    def index(self, batch_size: int) -> int:
        return min(bisect_left(self.bounds, batch_size), len(self.items) - 1)

    def at(self, batch_size: int) -> T:
        return self.items[self.index(batch_size)]

    def map(self, function: Callable[[T], U]) -> ByBatch[U]:
        return ByBatch(self.bounds, tuple(function(item) for item in self.items))

    def batches(self, index: int, largest: int) -> range:
        """The numbers of rows that item `index` is for, up to `largest`."""
        first = self.bounds[index - 1] + 1 if index else 1
        last = largest if index == len(self.items) - 1 else min(self.bounds[index], largest)
        return range(first, last + 1)


# None: plain decoding.
Schedule = ByBatch[DraftShape | None]


class ScheduledProposer:
    """One of several proposers, which share their draft network and the sequences' draft side, by the number of running
    rows. `leader` follows what is committed, also behind rounds that did not draft: the next ones may."""

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
    def capture(self) -> tuple[int, ...]:
        return self._leader.capture

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
    """The proposer of a schedule, whose parts `proposer_of` makes."""
    drafting = {shape: proposer_of(shape) for shape in schedule.items if shape is not None}
    if not drafting:
        return NoProposer()
    leader = next(iter(drafting.values()))
    proposers = schedule.map(lambda shape: NoProposer() if shape is None else drafting[shape])
    return leader if len(proposers.items) == 1 else ScheduledProposer(proposers, leader)
