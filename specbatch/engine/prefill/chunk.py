"""The input of `Round.prefill`. Shape suffixes: T packed tokens, R prompts that end, K tokens that are scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specbatch.batch import LogitsIndices, PagedBatch


class ChunkCut(NamedTuple):
    """The cut of a chunk into two lanes. The first lane has whole sequences and the first tokens of the next one."""

    num_sequences: int  # whole sequences in the first lane
    num_tokens: int
    in_next: int  # tokens of the next sequence; 0: none is cut
    num_selected: int  # prompts that end in the first lane


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Pieces of prompts, packed. R of them end in this chunk."""

    tokens_T: Tensor
    layout: PagedBatch
    ready_R: Tensor  # int64, slots of the prompts that end here
    logits_indices: LogitsIndices  # their last tokens
    lengths_R: Tensor  # int64, committed once this is done
    roots_R: Tensor  # int64, the root of a request that is computed again; -1: to be chosen
    draft_tokens_T: Tensor  # tokens that the draft network reads; the rows of roots yet to be chosen hold anything
    draft_layout: PagedBatch | None
    draft_selected: LogitsIndices | None
    # Of prompt tokens whose log-probabilities are wanted: the packed token before each, and itself. None: of none.
    scored_K2: Tensor | None = None  # int64
    scored_num_top: int = 0  # `num_top` (see `Round`) for the scored tokens
    cut: ChunkCut | None = None  # None: the target computes it as one lane
