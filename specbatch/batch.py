"""Where the new tokens of a batch lie, as device tensors: what attention without host planning reads.

Shape suffixes: B sequences, T packed new tokens, P pages of a table, W words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NO_TOKEN = -1  # what a target chooses where its logits are not finite


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """T new tokens of B sequences, the same for every layer of a forward pass.

    Sequence b has new tokens [query_starts[b], query_starts[b + 1]) of the packed batch. They lie behind `starts[b]`
    slots of its pages, and token i sees slots [0, starts[b] + i]: the case without a mask. With a mask, slots in front
    of `mask_starts[b]` are visible and slot mask_starts[b] + j is where bit j % 32 of word j // 32 of the token's row
    is set. Nothing here is read by the host, so lengths may change under a captured graph.
    """

    slots_T: Tensor  # int64; where keys and values are written; -1: nowhere
    positions_T: Tensor  # int64, rotary positions
    page_table_BP: Tensor  # int32
    page_size: int
    starts_B: Tensor  # int32
    query_starts: Tensor  # (B + 1,) int32
    max_queries: int  # bound of the new tokens of one sequence
    mask_TW: Tensor | None = None  # int32 words
    mask_starts_B: Tensor | None = None  # int32
    # `query_starts` where the host knows them: of prompts. None: each sequence has `max_queries` new tokens.
    host_query_starts: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class LogitsIndices:
    """The R tokens of a batch whose hidden states are wanted. Of the others, a model's last layer computes keys and
    values only."""

    rows_R: Tensor  # int64, in the packed batch
    batch: PagedBatch  # the same tokens, each the one new token of a sequence

    @staticmethod
    def of(batch: PagedBatch, rows_R: Tensor, starts_R: Tensor, page_table_RP: Tensor) -> LogitsIndices:
        """`starts_R`: slots in front of each; `page_table_RP`: the pages of its sequence."""
        count = rows_R.shape[0] + 1
        alone = PagedBatch(
            batch.slots_T[rows_R],
            batch.positions_T[rows_R],
            page_table_RP,
            batch.page_size,
            starts_R.to(torch.int32),
            torch.arange(count, dtype=torch.int32, device=rows_R.device),
            max_queries=1,
            host_query_starts=None if batch.host_query_starts is None else np.arange(count, dtype=np.int32),
        )
        return LogitsIndices(rows_R, alone)


def slots_of(page_table_BP: Tensor, page_size: int, index_BQ: Tensor) -> Tensor:
    """Cache slots (B, Q) of positions `index_BQ` within each sequence's pages; positions past the table give its last
    page (a caller masks those)."""
    page_index = (index_BQ // page_size).clamp_(max=page_table_BP.shape[1] - 1)
    return page_table_BP.gather(1, page_index).to(torch.int64) * page_size + index_BQ % page_size


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """Where the fields that a commit reads and writes lie in a slot's row of integers."""

    length: int  # committed tokens
    root: int  # the last sampled token
    limit: int  # of tokens, the root counted
    done: int  # 0: the request goes on
    ignore_eos: int
    stop: int  # the first of `num_stops` stop tokens; -1: none
    num_stops: int


class Spans(NamedTuple):
    """The new tokens of a batch (see `PagedBatch`)."""

    slots_T: Tensor  # int64; -1: not written
    positions_T: Tensor  # int64
    starts_B: Tensor  # int32, slots in front of the new tokens
    mask_starts_B: Tensor  # int32
    query_starts: Tensor  # (B + 1,) int32


class Beam(NamedTuple):
    """The branches of a tree that is being drafted."""

    scores_BK: Tensor  # float32, cumulative log-probability
    tokens_BK: Tensor  # int64, of the target's vocabulary
    index_BK: Tensor  # int64, place among the candidates
    parent_BK: Tensor  # int64, the branch of the step before that each hangs on; of the first step: itself
    seen_BKW: Tensor  # int32: bit i * K + j of the words: it sees branch j of step i


class Candidates(NamedTuple):
    """All nodes that drafting scores, filled step by step; what `select_nodes` chooses from."""

    tokens_BC: Tensor  # int64
    scores_BC: Tensor  # float32
    parents_BC: Tensor  # int64, -1: the root


class Committed(NamedTuple):
    """What a round decided. Beyond the `num_path_B` first of M, paths and tokens are 0."""

    path_BM: Tensor  # int64, nodes from the root down
    num_path_B: Tensor  # int64, 1 .. M; as many tokens are new
    tokens_BM: Tensor  # int64, the accepted drafts and the target's own token
    # int32: number of new tokens (0: not live), drafts verified, depth of the tree, broken drafts, the tokens; of these
    # the last is NO_TOKEN where the target's logits are not finite.
    output_BZ: Tensor
    accept_index_T: Tensor  # int64, (B * M) packed rows of the path's nodes
    source_T: Tensor  # int64, (B * M) cache slots of the path's nodes ..
    target_T: Tensor  # int64, .. and where they belong; -1: they are there, or do not count
