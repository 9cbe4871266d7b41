"""Packs pieces of prompts for the device: host lists in, one `PromptChunk` out, in two copies.

Shape suffixes as in `round.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from specbatch.engine.round import PromptChunk
from specbatch.engine.scheduler import PrefillSpan
from specbatch.engine.transfers import Transfers
from specbatch.kernels.paged import PagedBatch
from specbatch.speculation.sequence import Sequence


class PromptPacker:
    """`lead` is that of the draft network; None without one."""

    def __init__(self, transfers: Transfers, page_size: int, lead: int | None) -> None:
        self._transfers = transfers
        self._page_size = page_size
        self._lead = lead

    def pack(self, spans: Seq[PrefillSpan], page_table_SP: Tensor) -> PromptChunk:
        """Where `page_table_SP` holds the pages of all slots. Moves each sequence's draft side (`Sequence.draft`: valid
        slots of the draft's cache) along."""
        target = _Packed(self._page_size)
        draft = _Packed(self._page_size)
        ready, lengths, roots = [], [], []
        for span in spans:
            seq = span.seq
            target.add(seq, span.start, span.end, seq.tokens[span.start : span.end])
            ends = span.end == seq.prefill_end
            if ends:
                ready.append(seq.slot)
                lengths.append(span.end)
                roots.append(seq.tokens[span.end] if span.end < len(seq.tokens) else -1)
                target.last_rows.append(len(target.tokens) - 1)
            if self._lead is not None:
                # Slot i of the draft's cache reads token i + shift; the one behind the prompt may not be known yet.
                end, shift = span.end + self._lead, 1 - self._lead
                tokens = seq.tokens[seq.draft + shift : end + shift]
                draft.add(seq, seq.draft, end, tokens + [0] * (end - seq.draft - len(tokens)))
                seq.draft = end
                if ends:
                    draft.last_rows.append(len(draft.tokens) - 1)
        longs = self._upload(
            [
                target.tokens, target.positions, target.slots, ready, target.last_rows, lengths, roots,
                draft.tokens, draft.positions, draft.slots, draft.last_rows, target.rows,
            ],
            np.dtype(np.int64),
        )  # fmt: skip
        ints = self._upload([target.starts, target.ends, draft.starts, draft.ends], np.dtype(np.int32))
        tables = page_table_SP[longs[11]]
        return PromptChunk(
            tokens_T=longs[0],
            layout=self._layout(target, longs[2], longs[1], tables, ints[0], ints[1]),
            ready_R=longs[3],
            last_rows_R=longs[4],
            lengths_R=longs[5],
            roots_R=longs[6],
            draft_tokens_T=longs[7],
            draft_layout=None
            if self._lead is None
            else self._layout(draft, longs[9], longs[8], tables, ints[2], ints[3]),
            draft_last_rows_R=longs[10],
        )

    def _layout(
        self, packed: _Packed, slots: Tensor, positions: Tensor, tables: Tensor, starts: Tensor, ends: Tensor
    ) -> PagedBatch:
        return PagedBatch(slots, positions, tables, self._page_size, starts, ends, packed.max_queries)

    def _upload(self, lists: list[list[int]], dtype: np.dtype) -> list[Tensor]:
        """All lists in one copy; views of it. Each begins at a multiple of 16 bytes: for an address that does not,
        Triton compiles its kernels anew."""
        aligned = 16 // dtype.itemsize
        sizes = [-(-len(values) // aligned) * aligned for values in lists]
        joined = np.zeros(sum(sizes), dtype=dtype)
        first = 0
        for values, size in zip(lists, sizes, strict=True):
            joined[first : first + len(values)] = values
            first += size
        views = torch.split(self._transfers.upload(joined), sizes)
        return [view[: len(values)] for view, values in zip(views, lists, strict=True)]


class _Packed:
    """New tokens of some sequences, one after the other."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.rows: list[int] = []  # the engine's slot of each sequence
        self.starts: list[int] = []
        self.ends: list[int] = [0]
        self.last_rows: list[int] = []
        self.max_queries = 1

    def add(self, seq: Sequence, start: int, end: int, tokens: list[int]) -> None:
        size, pages = self._page_size, seq.pages
        self.tokens += tokens
        self.positions += range(start, end)
        self.slots += [pages[i // size] * size + i % size for i in range(start, end)]
        self.rows.append(seq.slot)
        self.starts.append(start)
        self.ends.append(len(self.tokens))
        self.max_queries = max(self.max_queries, end - start)
