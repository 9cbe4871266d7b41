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
from specbatch.kernels.paged import PagedBatch, Selected
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
        ready, rows, lengths, roots = [], [], [], []
        for span in spans:
            seq = span.seq
            target.add(seq, span.start, span.end, seq.tokens[span.start : span.end])
            ends = span.end == seq.prefill_end
            if ends:
                ready.append(seq.slot)
                rows.append(len(target.rows) - 1)
                lengths.append(span.end)
                roots.append(seq.tokens[span.end] if span.end < len(seq.tokens) else -1)
                target.select_last()
            if self._lead is not None:
                # Slot i of the draft's cache reads token i + shift; the one behind the prompt may not be known yet.
                end, shift = span.end + self._lead, 1 - self._lead
                tokens = seq.tokens[seq.draft + shift : end + shift]
                draft.add(seq, seq.draft, end, tokens + [0] * (end - seq.draft - len(tokens)))
                seq.draft = end
                if ends:
                    draft.select_last()
        longs = self._upload(
            [*target.longs, *draft.longs, target.rows, ready, rows, lengths, roots], np.dtype(np.int64)
        )
        ints = self._upload([target.starts, target.ends, draft.starts, draft.ends], np.dtype(np.int32))
        slots_B, ready_R, rows_R, lengths_R, roots_R = longs[8:]
        tables_BP = page_table_SP[slots_B]
        tables_RP = tables_BP[rows_R]
        layout, selected = self._layout(target, longs[:4], ints[:2], tables_BP, tables_RP, lengths_R - 1)
        draft_layout = draft_selected = None
        if self._lead is not None:
            last_R = lengths_R - 1 + self._lead
            draft_layout, draft_selected = self._layout(draft, longs[4:8], ints[2:], tables_BP, tables_RP, last_R)
        return PromptChunk(
            longs[0], layout, ready_R, selected, lengths_R, roots_R, longs[4], draft_layout, draft_selected
        )

    def _layout(
        self,
        packed: _Packed,
        longs: list[Tensor],
        ints: list[Tensor],
        tables_BP: Tensor,
        tables_RP: Tensor,
        last_R: Tensor,
    ) -> tuple[PagedBatch, Selected]:
        """`longs`, `ints`: what became of the lists of `packed`; `last_R`: the slot of each prompt's last token."""
        _, positions, slots, selected = longs
        batch = PagedBatch(
            slots, positions, tables_BP, self._page_size, ints[0], ints[1], packed.max_queries,
            host_query_starts=np.array(packed.ends, dtype=np.int32),
        )  # fmt: skip
        return batch, Selected.of(batch, selected, last_R, tables_RP)

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
        self.selected: list[int] = []  # the last tokens of prompts that end here
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

    def select_last(self) -> None:
        self.selected.append(len(self.tokens) - 1)

    @property
    def longs(self) -> tuple[list[int], list[int], list[int], list[int]]:
        return self.tokens, self.positions, self.slots, self.selected
