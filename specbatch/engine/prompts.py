"""Packs pieces of prompts for the device: host lists in, one `PromptChunk` out, in two copies.

Shape suffixes as in `round.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbatch.batch import LogitsIndices, PagedBatch
from specbatch.engine.round import PromptChunk
from specbatch.engine.scheduler import PrefillSpan
from specbatch.engine.sequence import Sequence

Ints = list[int] | np.ndarray


class ChunkShape(NamedTuple):
    """Room for so many tokens, of so many prompts, of at most so many tokens each."""

    tokens: int
    rows: int
    queries: int


@dataclass(frozen=True, slots=True)
class HostArrays:
    """A packed chunk's lists, joined in two arrays to be uploaded. Each list begins at a multiple of 16 bytes: for an
    address that does not, Triton compiles its kernels anew."""

    longs: np.ndarray  # int64
    ints: np.ndarray  # int32
    long_sizes: tuple[int, ...]  # of the lists
    int_sizes: tuple[int, ...]
    # Of the target's and the draft network's tokens, for attention that plans on the host; None: not to be counted on.
    query_starts: tuple[np.ndarray, np.ndarray] | None = None

    def views(self, longs: Tensor, ints: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The lists, in copies of the arrays."""
        return _split(longs, self.long_sizes), _split(ints, self.int_sizes)


class PackedPrompts:
    """Pieces of some prompts, as lists."""

    def __init__(self, page_size: int) -> None:
        self.target = _Packed(page_size)
        self.draft = _Packed(page_size)  # empty without a draft network
        self.ready: list[int] = []  # slots of the prompts that end here
        self.rows: list[int] = []  # those among the pieces
        self.lengths: list[int] = []
        self.roots: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Of the target or of the draft network, whichever has more."""
        return max(len(self.target.tokens), len(self.draft.tokens))

    @property
    def max_queries(self) -> int:
        return max(self.target.max_queries, self.draft.max_queries)

    @property
    def all_end(self) -> bool:
        return len(self.rows) == len(self.target.rows)

    def arrays(self) -> HostArrays:
        rows, ready = len(self.target.rows), len(self.ready)
        longs = [n for one in (self.target, self.draft) for n in (*[len(one.tokens)] * 3, len(one.logits_indices))]
        longs += [rows, ready, ready, ready, ready]
        ints = [len(part) for part in self._ints]
        starts = np.array(self.target.ends, dtype=np.int32), np.array(self.draft.ends, dtype=np.int32)
        return self._arrays(longs, ints, [0] * len(longs), [0] * len(ints), starts)

    def padded(self, shape: ChunkShape, padding: int) -> HostArrays:
        """With prompts of no tokens in the slot `padding`, and tokens of no prompt; all prompts must end. Of the latter
        there is one at least: what is read behind a padded prompt."""
        assert self.all_end, "a prompt goes on in another chunk"
        assert self.num_tokens < shape.tokens, "no token is left to pad with"
        tokens, rows, _ = shape
        packed, fills = [tokens, tokens, tokens, rows], [0, 0, -1, tokens - 1]
        longs = [*packed, *packed, rows, rows, rows, rows, rows]
        long_fills = [*fills, *fills, padding, padding, len(self.rows), 1, 0]
        int_fills = [0, self.target.ends[-1], 0, self.draft.ends[-1]]
        return self._arrays(longs, [rows, rows + 1, rows, rows + 1], long_fills, int_fills, None)

    def _arrays(
        self,
        long_sizes: list[int],
        int_sizes: list[int],
        long_fills: list[int],
        int_fills: list[int],
        starts: tuple[np.ndarray, np.ndarray] | None,
    ) -> HostArrays:
        longs = _joined(self._longs, long_sizes, long_fills, np.dtype(np.int64))
        ints = _joined(self._ints, int_sizes, int_fills, np.dtype(np.int32))
        return HostArrays(longs, ints, tuple(long_sizes), tuple(int_sizes), starts)

    @property
    def _longs(self) -> list[Ints]:
        target, draft = self.target, self.draft
        return [*target.longs, *draft.longs, target.rows, self.ready, self.rows, self.lengths, self.roots]

    @property
    def _ints(self) -> list[Ints]:
        return [self.target.starts, self.target.ends, self.draft.starts, self.draft.ends]


class PromptPacker:
    """`lead` is that of the draft network; None without one."""

    def __init__(self, page_size: int, draft_kv_offset: int | None) -> None:
        self._page_size = page_size
        self._lead = draft_kv_offset

    def pack(self, spans: Seq[PrefillSpan]) -> PackedPrompts:
        """Moves each sequence's `num_draft_computed` along."""
        packed = PackedPrompts(self._page_size)
        target, draft = packed.target, packed.draft
        for span in spans:
            seq = span.seq
            target.add(seq, span.start, span.end, seq.tokens[span.start : span.end])
            ends = span.end == seq.num_prefill_tokens
            if ends:
                packed.ready.append(seq.req_idx)
                packed.rows.append(len(target.rows) - 1)
                packed.lengths.append(span.end)
                packed.roots.append(seq.tokens[span.end] if span.end < len(seq.tokens) else -1)
                target.select_last()
            if self._lead is not None:
                # Slot i of the draft's cache reads token i + shift; the one behind the prompt may not be known yet.
                end, shift = span.end + self._lead, 1 - self._lead
                tokens = seq.tokens[seq.num_draft_computed + shift : end + shift]
                draft.add(seq, seq.num_draft_computed, end, tokens + [0] * (end - seq.num_draft_computed - len(tokens)))
                seq.num_draft_computed = end
                if ends:
                    draft.select_last()
        return packed

    def chunk(
        self, arrays: HostArrays, longs: Tensor, ints: Tensor, page_table_SP: Tensor, queries: int
    ) -> PromptChunk:
        """What `arrays` are on the device, where `page_table_SP` holds the pages of all slots. No prompt has more than
        `queries` tokens."""
        parts, starts = arrays.views(longs, ints)
        slots_B, ready_R, rows_R, lengths_R, roots_R = parts[8:]
        tables_BP = page_table_SP[slots_B]
        tables_RP = tables_BP[rows_R]
        host_starts = arrays.query_starts

        def layout(i: int, last_R: Tensor) -> tuple[PagedBatch, LogitsIndices]:
            """`last_R`: the slot of each prompt's last token."""
            _, positions, slots, logits_indices = parts[4 * i : 4 * i + 4]
            batch = PagedBatch(
                slots, positions, tables_BP, self._page_size, starts[2 * i], starts[2 * i + 1], queries,
                host_query_starts=None if host_starts is None else host_starts[i],
            )  # fmt: skip
            return batch, LogitsIndices.of(batch, logits_indices, last_R, tables_RP)

        target, logits_indices = layout(0, lengths_R - 1)
        draft = draft_selected = None
        if self._lead is not None:
            draft, draft_selected = layout(1, lengths_R - 1 + self._lead)
        return PromptChunk(
            parts[0], target, ready_R, logits_indices, lengths_R, roots_R, parts[4], draft, draft_selected
        )


class _Packed:
    """New tokens of some sequences, one after the other."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.tokens: list[int] = []
        self._pages: list[int] = []  # that the tokens lie in
        self._first_pages: list[int] = []  # where those of each sequence begin, less what lies in front of its start
        self.rows: list[int] = []  # the engine's slot of each sequence
        self.starts: list[int] = []
        self.ends: list[int] = [0]
        self.logits_indices: list[int] = []  # the last tokens of prompts that end here
        self.max_queries = 1

    def add(self, seq: Sequence, start: int, end: int, tokens: list[int]) -> None:
        size = self._page_size
        assert end <= len(seq.pages) * size, "tokens without a page would be written to the next sequence's"
        self._first_pages.append(len(self._pages) - start // size)
        self._pages += seq.pages[start // size : -(-end // size)]
        self.tokens += tokens
        self.rows.append(seq.req_idx)
        self.starts.append(start)
        self.ends.append(len(self.tokens))
        self.max_queries = max(self.max_queries, end - start)

    def select_last(self) -> None:
        self.logits_indices.append(len(self.tokens) - 1)

    @property
    def longs(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Tokens, positions and cache slots of each token; the selected ones."""
        ends = np.array(self.ends)
        counts = np.diff(ends)
        positions = np.arange(len(self.tokens)) + np.repeat(np.array(self.starts, dtype=np.int64) - ends[:-1], counts)
        pages = np.array(self._pages, dtype=np.int64)
        page = pages[positions // self._page_size + np.repeat(np.array(self._first_pages, dtype=np.int64), counts)]
        return self.tokens, positions, page * self._page_size + positions % self._page_size, self.logits_indices


def _joined(lists: Seq[Ints], sizes: Seq[int], fills: Seq[int], dtype: np.dtype) -> np.ndarray:
    aligned = [_aligned(size, dtype.itemsize) for size in sizes]
    joined = np.zeros(sum(aligned), dtype=dtype)
    first = 0
    for values, size, fill, room in zip(lists, sizes, fills, aligned, strict=True):
        assert len(values) <= size, "it would go on in the next list"
        joined[first : first + len(values)] = values
        joined[first + len(values) : first + size] = fill
        first += room
    return joined


def _split(joined: Tensor, sizes: Seq[int]) -> list[Tensor]:
    views = torch.split(joined, [_aligned(size, joined.element_size()) for size in sizes])
    return [view[:size] for view, size in zip(views, sizes, strict=True)]


def _aligned(size: int, itemsize: int) -> int:
    step = 16 // itemsize
    return -(-size // step) * step
