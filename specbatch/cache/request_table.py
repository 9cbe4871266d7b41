"""The state of running requests in device memory: a line for each request index, and one more for padding.

The host writes a request's line when the request is admitted and when it gets more pages. Rounds read the line and
advance it. So nothing has to come back to the host between rounds.

Shape suffixes: S request indices (the last is for padding), B requests of a batch, P pages of a request, L tokens, E
hidden size, F fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from specbatch.batch import NUM_FIELDS, Field, PagedBatch, PrefixGroups, StateSpans
from specbatch.cache.grammar_table import GrammarTable
from specbatch.cache.prefix_groups import GroupLimits, GroupTable
from specbatch.cache.rule_table import RuleTable

# The most tokens of a predicted output that are searched, so that the buffer for them is small.
MAX_PREDICTED = 8192


class RequestTable:
    """The buffers. They are made once; captured graphs hold their addresses."""

    def __init__(
        self,
        num_requests: int,
        pages_per_request: int,
        max_length: int,
        feature_size: int,
        keeps_tokens: bool,
        dtype: torch.dtype,
        device: torch.device,
        num_host_columns: int = 0,
        cascade: GroupLimits | None = None,
    ) -> None:
        """`num_requests`: the number of request indices. `pages_per_request`: the most pages of a request.
        `num_host_columns`: the columns of draft trees that the host uploads, see `draft.host`. `cascade`: the limits
        for groups of requests whose shared pages are read once; None: there are no groups."""
        rows = num_requests + 1
        self.ints_SF = torch.zeros(rows, NUM_FIELDS, dtype=torch.int64, device=device)
        self.ints_SF[:, Field.DONE] = 1
        # temperature, top_p, min_p. They have float64 where no kernel needs float32.
        floats = torch.float64 if device.type == "cpu" else torch.float32
        self.floats_S3 = torch.ones(rows, 3, dtype=floats, device=device)
        self.page_table_SP = torch.zeros(rows, pages_per_request, dtype=torch.int32, device=device)
        # The draft's hidden state at the root, from which drafting starts.
        self.features_SE = torch.zeros(rows, feature_size, dtype=dtype, device=device)
        # All tokens of each request, for n-gram drafts on the device and for rules.
        self.tokens_SL = torch.zeros(rows, max_length if keeps_tokens else 0, dtype=torch.int32, device=device)
        # Predicted outputs, for n-gram drafts on the device.
        num_predicted = min(max_length, MAX_PREDICTED) if keeps_tokens else 0
        self.predicted_SL = torch.zeros(rows, num_predicted, dtype=torch.int32, device=device)
        self.host_trees_SZ = torch.zeros(rows, num_host_columns, dtype=torch.int32, device=device)
        # The drafts of the last round and their source, for draft methods that count these.
        self.drafted_S3 = torch.zeros(rows, 3, dtype=torch.int64, device=device)
        # The groups of the next round's batch.
        self.groups = None if cascade is None else GroupTable(num_requests, cascade, device)
        self.rules: RuleTable | None = None
        self.grammars: GrammarTable | None = None
        self._max_length, self._keeps_tokens = max_length, keeps_tokens

    @property
    def padding(self) -> int:
        """The request index that padding has. It belongs to no request."""
        return self.ints_SF.shape[0] - 1

    def add_rules(self, vocab_size: int) -> RuleTable:
        """Return the table of rules, which the first call makes. From then on the tokens of requests that start later
        are kept. Graphs that were captured before do not write them."""
        if self.rules is None:
            lines, device = self.ints_SF.shape[0], self.ints_SF.device
            if not self.tokens_SL.shape[1]:
                self.tokens_SL = torch.zeros(lines, self._max_length, dtype=torch.int32, device=device)
            self.rules = RuleTable(lines, vocab_size, self.floats_S3.dtype, device)
        return self.rules

    def add_grammars(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> GrammarTable:
        """Return the table of grammars, which the first call makes."""
        if self.grammars is None:
            lines, device = self.ints_SF.shape[0], self.ints_SF.device
            self.grammars = GrammarTable(lines, vocab_size, eos_token_ids, device)
        return self.grammars

    def remove_rules(self) -> None:
        """Undo `add_rules` and `add_grammars`. No request with rules may run, and no graph with edits may be
        replayed."""
        if self.rules is not None and not self._keeps_tokens:
            self.tokens_SL = self.tokens_SL[:, :0].clone()
        self.rules = self.grammars = None

    @property
    def rule_bytes(self) -> int:
        """The bytes that `add_rules` and `add_grammars` have allocated."""
        of_grammars = 0 if self.grammars is None else self.grammars.num_bytes
        if self.rules is None:
            return of_grammars
        return of_grammars + self.rules.num_bytes + (0 if self._keeps_tokens else self.tokens_SL.nbytes)

    def saved(self) -> Callable[[], None]:
        """Save the state of all requests, and return a function that restores it. That function allocates nothing."""
        ints, features = self.ints_SF.clone(), self.features_SE.clone()
        states = None if self.grammars is None else self.grammars.states_S.clone()

        def restore() -> None:
            self.ints_SF.copy_(ints)
            self.features_SE.copy_(features)
            if self.grammars is not None and states is not None:
                self.grammars.states_S.copy_(states)

        return restore


@dataclass(frozen=True, slots=True)
class BatchView:
    """The requests of one batch, gathered at the start of a round."""

    req_idx_B: Tensor  # int64
    ints_BF: Tensor
    floats_B3: Tensor
    page_table_BP: Tensor
    page_size: int
    ops: ModuleType
    groups: PrefixGroups | None

    @staticmethod
    def gather(state: RequestTable, req_idx_B: Tensor, page_size: int, ops: ModuleType) -> BatchView:
        return BatchView(
            req_idx_B,
            state.ints_SF[req_idx_B],
            state.floats_S3[req_idx_B],
            state.page_table_SP[req_idx_B],
            page_size,
            ops,
            None if state.groups is None else state.groups.of_batch(len(req_idx_B)),
        )

    def field(self, field: Field) -> Tensor:
        """Return a field of all requests, (B,) int64."""
        return self.ints_BF[:, field]

    @property
    def length_B(self) -> Tensor:
        return self.field(Field.LENGTH)

    @property
    def sampling(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """temperature, top_k, top_p, min_p, each (B,)."""
        return self.floats_B3[:, 0], self.field(Field.TOP_K), self.floats_B3[:, 1], self.floats_B3[:, 2]

    @property
    def rng(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.field(Field.SEED), self.field(Field.STREAM), self.field(Field.SAMPLE)

    def layout(
        self,
        num_queries: int,
        *,
        start: int = 0,
        position: int = 0,
        position_stride: int = 1,
        depths_BQ: Tensor | None = None,
        num_written_B: Tensor | None = None,
        mask_TW: Tensor | None = None,
        mask_start: int = 0,
    ) -> PagedBatch:
        """Lay out `num_queries` new tokens of each request; see `span_layout` of the kernels."""
        spans = self.ops.span_layout(
            self.page_table_BP,
            self.page_size,
            self.length_B,
            self.field(Field.DONE),
            num_queries,
            start=start,
            position=position,
            position_stride=position_stride,
            depths_BQ=depths_BQ,
            num_written_B=num_written_B,
            mask_start=mask_start,
        )
        return PagedBatch(
            spans.slots_T,
            spans.positions_T,
            self.page_table_BP,
            self.page_size,
            spans.starts_B,
            spans.query_starts,
            num_queries,
            mask_TW,
            None if mask_TW is None else spans.mask_starts_B,
            groups=self.groups,
            states=StateSpans(self.req_idx_B, is_prompt=False),
        )
