"""Two-batch overlap: which requests of a batch run in which of two lanes.

The target computes both lanes at the same time (`models/stages.py`); all else of a round is of the whole batch. Lanes
are balanced by their numbers of requests, which have equally many new tokens, and by the keys and values that they
read. A request keeps its lane until the two no longer fit the size that equal lanes would have; then all are divided
anew. A short batch is one lane.

A prompt chunk is divided by tokens (`PackedPrompts.cut`), so that a sequence may be in both lanes.

A request's tokens do not depend on its lane, but for rounding on CUDA, as with another batch size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from specbatch.engine.sequence import Sequence
from specbatch.graphs.runner import ladder

MIN_LANE = 8  # requests of a lane
MIN_PROMPT_LANE = {"cpu": 128, "cuda": 1024}  # tokens of a lane of a prompt chunk, which should fill the GPU
NEVER = sys.maxsize  # tokens of a chunk that nobody has


class LaneLimits(NamedTuple):
    """The sizes from which there are two lanes. `requests`: the least number of requests in each lane of a round; None:
    rounds have one lane. `prompt_tokens`: the least number of tokens in each lane of a prompt chunk."""

    requests: int | None
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """Requests of a lane, its padding included, ascending. `single`: sizes at which one lane is faster."""

    sizes: tuple[int, ...]
    single: frozenset[int] = frozenset()

    @staticmethod
    def up_to(max_batch_size: int, min_lane: int = MIN_LANE) -> LaneSizes:
        # A multiple of 8: kernels are compiled anew for addresses that are not multiples of 16 bytes.
        largest = -(-max_batch_size // 16) * 8
        return LaneSizes(tuple(size for size in ladder(largest) if size >= min_lane))

    def of(self, num_requests: int) -> int:
        """The size of each of two lanes; 0: one lane runs."""
        if not self.sizes or num_requests < 2 * self.sizes[0]:
            return 0
        size = next(size for size in self.sizes if 2 * size >= num_requests)
        return 0 if size in self.single else size


class Batch(NamedTuple):
    """The requests of a round in the order of its rows. `lane`: rows of the first of two lanes; 0: there is one."""

    sequences: Seq[Sequence | None]  # None: padding
    lane: int = 0


class Lanes:
    """Divides batches. `pads`: the first lane is filled up to its size."""

    def __init__(self, sizes: LaneSizes, *, pads: bool) -> None:
        self._sizes, self._pads = sizes, pads
        self._lanes: tuple[list[Sequence], list[Sequence]] = ([], [])

    def divides(self, num_requests: int) -> bool:
        """Return whether a batch has two lanes."""
        return self._sizes.of(num_requests) > 0

    def divide(self, sequences: Seq[Sequence], count: int | None = None) -> Batch:
        """Divide a batch. `count`: the number of requests for which the lanes are made; None: those of the batch."""
        size = self._sizes.of(len(sequences) if count is None else count)
        if not size:
            self._lanes = ([], [])
            return Batch(sequences)
        running = set(sequences)
        kept = [[seq for seq in lane if seq in running] for lane in self._lanes]
        if all(0 < len(lane) <= size for lane in kept):
            placed = {seq for lane in kept for seq in lane}
            self._lanes = _filled((kept[0], kept[1]), [seq for seq in sequences if seq not in placed], size)
        else:
            self._lanes = _filled(([], []), sorted(sequences, key=_num_keys, reverse=True), size)
        first, second = self._lanes
        padding = [None] * (size - len(first)) if self._pads else []
        return Batch([*first, *padding, *second], len(first) + len(padding))


def _filled(
    lanes: tuple[list[Sequence], list[Sequence]], more: Iterable[Sequence], size: int
) -> tuple[list[Sequence], list[Sequence]]:
    """Add each of `more` to the lane that reads fewer keys, if that lane is not full."""
    loads = [sum(map(_num_keys, lane)) for lane in lanes]
    for seq in more:
        lane = int(loads[1] < loads[0])
        if len(lanes[lane]) >= size:
            lane = 1 - lane
        lanes[lane].append(seq)
        loads[lane] += _num_keys(seq)
    return lanes


def _num_keys(seq: Sequence) -> int:
    """Return the number of keys that the attention of a round reads."""
    return len(seq.tokens)
