"""What a round knows about the requests, in device memory: one row for each slot, and one more that padding uses.

The host writes a slot when a request is admitted and when its pages grow; from then on rounds read and advance it. So
nothing has to come back to the host between rounds.

Shape suffixes: S slots (the last is padding's), B rows of a batch, P pages of a table, L tokens, E hidden size, K stop
tokens, F fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from specbatch.kernels.paged import PagedBatch, slots_of

MAX_STOP_IDS = 6  # looked for on the device; of a request with more, the host finds the others a round later


class Field(IntEnum):
    """Columns of `SlotState.ints_SF`."""

    LENGTH = 0  # committed: tokens whose target KV is written
    ROOT = 1  # the last sampled token: node 0 of the next tree
    LIMIT = 2  # of tokens, the root counted
    DONE = 3
    IGNORE_EOS = 4
    TOP_K = 5
    SEED = 6
    STREAM = 7
    SAMPLE = 8
    STOP = 9  # .. 9 + MAX_STOP_IDS; -1: none


NUM_FIELDS = int(Field.STOP) + MAX_STOP_IDS


class SlotState:
    """The buffers. They are made once; captured graphs hold their addresses."""

    def __init__(
        self,
        num_slots: int,
        pages_per_slot: int,
        max_length: int,
        feature_size: int,
        keeps_tokens: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        rows = num_slots + 1
        self.ints_SF = torch.zeros(rows, NUM_FIELDS, dtype=torch.int64, device=device)
        self.ints_SF[:, Field.DONE] = 1
        self.floats_S3 = torch.ones(rows, 3, dtype=torch.float32, device=device)  # temperature, top_p, min_p
        self.page_table_SP = torch.zeros(rows, pages_per_slot, dtype=torch.int32, device=device)
        # The draft's hidden state at the root, from which drafting starts.
        self.features_SE = torch.zeros(rows, feature_size, dtype=dtype, device=device)
        # All tokens, for prompt lookup only.
        self.tokens_SL = torch.zeros(rows, max_length if keeps_tokens else 0, dtype=torch.int32, device=device)

    @property
    def padding(self) -> int:
        """The slot that stands for no request."""
        return self.ints_SF.shape[0] - 1


@dataclass(frozen=True, slots=True)
class Rows:
    """The slots of one batch, gathered at the start of a round."""

    rows_B: Tensor  # int64, slot numbers
    ints_BF: Tensor
    floats_B3: Tensor
    page_table_BP: Tensor
    page_size: int

    @staticmethod
    def gather(state: SlotState, rows_B: Tensor, page_size: int) -> Rows:
        return Rows(rows_B, state.ints_SF[rows_B], state.floats_S3[rows_B], state.page_table_SP[rows_B], page_size)

    def field(self, field: Field) -> Tensor:
        """(B,) int64"""
        return self.ints_BF[:, field]

    @property
    def length_B(self) -> Tensor:
        return self.field(Field.LENGTH)

    @property
    def live_B(self) -> Tensor:
        """Bool: rows of requests that go on. The others write nothing."""
        return self.field(Field.DONE) == 0

    @property
    def sampling(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """temperature, top_k, top_p, min_p, each (B,)."""
        return self.floats_B3[:, 0], self.field(Field.TOP_K), self.floats_B3[:, 1], self.floats_B3[:, 2]

    @property
    def noise(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.field(Field.SEED), self.field(Field.STREAM), self.field(Field.SAMPLE)

    def layout(
        self,
        starts_B: Tensor,
        num_queries: int,
        *,
        written_BQ: Tensor | None = None,
        positions_BQ: Tensor | None = None,
        mask_TW: Tensor | None = None,
        mask_starts_B: Tensor | None = None,
    ) -> PagedBatch:
        """`num_queries` new tokens of each row behind `starts_B` slots (int64). `written_BQ`: which of them are stored;
        None: those of live rows. `positions_BQ`: where they are not equal to the slots' numbers."""
        batch, device = starts_B.shape[0], starts_B.device
        index = starts_B[:, None] + torch.arange(num_queries, device=device)
        written = self.live_B[:, None] if written_BQ is None else written_BQ
        slots = torch.where(written, slots_of(self.page_table_BP, self.page_size, index), -1)
        return PagedBatch(
            slots.view(-1),
            (index if positions_BQ is None else positions_BQ).reshape(-1),
            self.page_table_BP,
            self.page_size,
            starts_B.int(),
            torch.arange(0, (batch + 1) * num_queries, num_queries, dtype=torch.int32, device=device),
            num_queries,
            mask_TW,
            None if mask_starts_B is None else mask_starts_B.int(),
        )
