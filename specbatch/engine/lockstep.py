"""Steps of engines on ranks that have requests of their own.

The ranks exchange tokens in each forward pass of the target, so all of them run the same passes. Before a step they
agree on the host on what it is. If one of them has prompts to compute, all compute prompts. Otherwise all run a round,
of the size that the rank with the most requests needs. A rank without a prompt, or without a request, takes part in the
pass of the others (`Decoder.take_part`), or where shapes are fixed runs a batch that is all padding.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from specbatch.batch import Edits
from specbatch.engine.constrained.policy import has_grammars
from specbatch.engine.round import Wanted
from specbatch.engine.sequence import Sequence
from specbatch.parallel.group import Group


class NextRound(NamedTuple):
    """The round that a rank runs next, or the one that all ranks run. `num_requests`: those of the rank with the most.
    `has_lanes`: no rank needs it as one lane. `has_room`: see `Grammars.wants_room`."""

    num_requests: int
    wanted: Wanted
    has_grammars: bool
    has_room: bool
    has_lanes: bool

    @staticmethod
    def of(rows: Seq[Sequence], wanted: Wanted, *, has_room: bool, has_lanes: bool) -> NextRound:
        return NextRound(len(rows), wanted, has_grammars(rows), has_room, has_lanes)


class Lockstep:
    """The agreement of ranks. `group`: the ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def any_of(self, is_here: bool) -> bool:
        """Return whether something is so on any rank."""
        return any(value for (value,) in self._group.agree([int(is_here)]))

    def all_of(self, is_here: bool) -> bool:
        """Return whether something is so on all ranks."""
        return all(value for (value,) in self._group.agree([int(is_here)]))

    def round(self, mine: NextRound) -> NextRound:
        """Return the round that does for all ranks."""
        wanted = mine.wanted
        num_top = -1 if wanted.num_top is None else wanted.num_top
        of_ranks = self._group.agree(
            [
                mine.num_requests,
                int(wanted.sampled),
                num_top,
                int(wanted.edits),
                int(mine.has_grammars),
                int(mine.has_room),
                int(mine.has_lanes),
            ]
        )
        counts, sampled, num_tops, edits, grammars, rooms, lanes = zip(*of_ranks, strict=True)
        joined = Edits.NONE
        for kinds in edits:
            joined |= Edits(kinds)
        most = max(num_tops)
        return NextRound(
            max(counts),
            Wanted(any(sampled), None if most < 0 else most, joined),
            any(grammars),
            any(rooms),
            all(lanes),
        )
