"""What a captured round depends on."""

from __future__ import annotations

from typing import NamedTuple

from specbatch.batch import Edits


class RoundKey(NamedTuple):
    size: int  # of the batch, padding included
    item: int  # of the schedule
    sampled: bool  # this and the next two: see `Round`
    num_top: int | None = None
    edits: Edits = Edits.NONE  # with NODE_MASK, the host takes part in the round
    lane: int = 0  # of the size, see `executor.PaddedSize`
    num_nodes: int | None = None  # of each tree, of batches with grammars: plain decoding may have room or not
