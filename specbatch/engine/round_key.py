"""The key of a captured round: everything that its graph depends on."""

from __future__ import annotations

from typing import NamedTuple

from specbatch.batch import Edits


class RoundKey(NamedTuple):
    size: int  # size of the batch, padding included
    item: int  # item of the schedule
    sampled: bool  # this and the next two: see `Round`
    num_top: int | None = None
    edits: Edits = Edits.NONE  # with NODE_MASK, the host takes part in the round
    lane: int = 0  # requests of the first lane, see `executor.PaddedSize`
    num_nodes: int | None = None  # nodes of each tree in batches with grammars: plain decoding may have room or not
