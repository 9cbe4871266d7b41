"""A file to be predicted, what bounds its rounds, and the prediction.

Shape suffixes: R traced rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specbatch.draft.none import MAX_ROOM
from specbatch.draft.schedule import Schedule
from specbatch.draft.shape import DraftShape, num_lookahead
from specbatch.engine.prefill.admission_batching import ChunkCost
from specbatch.errors import TuningError
from specbatch.tune.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class FileProfile:
    """The file's lengths. Row i of it has prompt i, in a cycle if only a sample was measured. Each row is
    modelled by a traced row. All traced rows are used equally often, in a new random order for each pass.
    `in_order`: row i is modelled by traced row i, in a cycle, as in a run of the traced rows."""

    prompt_tokens: NDArray[np.int64]  # prompt tokens of the file's first rows, or of all rows
    output_tokens_R: NDArray[np.int64]  # output tokens of the traced rows
    num_rows: int
    max_tokens: int  # largest number of tokens of a row's output
    shared_prefix: int = 0  # tokens that all prompts begin with, computed and kept once
    in_order: bool = False

    def __post_init__(self) -> None:
        if not len(self.prompt_tokens) or not len(self.output_tokens_R) or self.num_rows < 1:
            raise TuningError("the file has no rows to predict anything for")
        assert self.shared_prefix < self.prompt_tokens.min(), "the last token of a prompt is its own"

    @staticmethod
    def of(
        trace: Trace,
        max_tokens: int,
        prompt_tokens: NDArray[np.int64] | None = None,
        num_rows: int = 0,
        shared_prefix: int = 0,
    ) -> FileProfile:
        """Make a profile with the outputs of the traced rows, and also with their prompts if `prompt_tokens` is None.
        `num_rows` 0: one row for each prompt."""
        prompts = np.array([row.num_prompt for row in trace.rows]) if prompt_tokens is None else prompt_tokens
        outputs = np.array([row.num_output for row in trace.rows], dtype=np.int64)
        return FileProfile(prompts.astype(np.int64), outputs, num_rows or len(prompts), max_tokens, shared_prefix)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the running requests."""

    max_running: int  # requests
    kv_tokens: int  # slots of the cache
    prefill_chunk: int  # prompt tokens computed at once
    page_size: int = 1  # slots
    draft_kv_offset: int | None = None  # offset of the draft network's cache; None: there is no draft network
    max_verify_tokens: int | None = None  # requests x nodes of a round; None: no limit
    async_depth: int = 0  # rounds for which a request that has ended keeps its index: the host reads that much later
    chunk_cost: ChunkCost | None = None  # costs that decide whether short prompts are held; None: they are not held
    block_size: int = 0  # slots that a block drafter writes in a round; 0: there is none

    def lookahead(self, schedule: Schedule) -> int:
        """Slots past the committed ones that a round may write, whatever the batch: the scheduler has one figure."""
        if all(shape is None for shape in schedule.items):
            return MAX_ROOM
        return max(map(self.lookahead_of, schedule.items))

    def lookahead_of(self, shape: DraftShape | None) -> int:
        """Return the slots past the committed ones that a round of this shape may write."""
        # The branches of a block drafter's trees have no slots in its cache.
        offset = None if self.block_size else self.draft_kv_offset
        return max(num_lookahead(shape, offset), 0 if shape is None else self.block_size)


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Seconds of the file, loading and writing not counted."""

    prefill_seconds: float
    steady_seconds: float  # rounds while rows are waiting
    drain_seconds: float  # rounds after the last admission
    steady_tokens: float  # committed up to the last admission
    output_tokens: float
    rounds: float
    num_rows: int
    num_simulated: int  # the others are extrapolated from the middle of these
    preemptions: float
    tokens_by_batch: NDArray[np.float64]  # [b]: tokens that rounds of b requests committed

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.steady_seconds + self.drain_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else math.inf

    @property
    def mean_batch(self) -> float:
        """Running requests of a round, by the tokens they made."""
        total = self.tokens_by_batch.sum()
        return float(self.tokens_by_batch @ np.arange(len(self.tokens_by_batch)) / total) if total else 0.0
