"""Packs pieces of prompts for the device: host lists in, one `PromptChunk` out, in one copy.

Shape suffixes: B sequences, T packed tokens, R prompts that end in the chunk, K tokens that are scored, S request
indices, P pages of a table.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from specbatch.batch import LogitsIndices, PagedBatch, StateSpans
from specbatch.engine.scheduler import PrefillSpan
from specbatch.engine.sequence import Sequence

Ints = list[int] | np.ndarray
F = TypeVar("F")


class TokenFields(NamedTuple, Generic[F]):
    """Something for each array of the new tokens that one network computes."""

    tokens_T: F
    positions_T: F
    slots_T: F
    starts_B: F  # slots before each sequence's new tokens; int32, the others int64
    query_starts: F  # (B + 1), int32
    logits_indices_R: F  # the last tokens of prompts that end here


class ChunkFields(NamedTuple, Generic[F]):
    """Something for each array of a chunk: its values, its size, what pads it."""

    target: TokenFields[F]
    draft: TokenFields[F]  # empty arrays without a draft network
    req_idx_B: F
    ready_R: F  # request indices of the prompts that end here
    ready_index_R: F  # index of each among the B sequences
    lengths_R: F  # number of tokens of each prompt once the chunk is computed
    roots_R: F  # the root of a request that is computed again; -1: to be chosen
    checkpoint_at_B: F  # tokens after which the state is copied to a checkpoint; -1: there is none
    checkpoint_line_B: F  # the line of the checkpoint

    def flat(self) -> tuple[F, ...]:
        return (*self.target, *self.draft, *self[2:])

    @staticmethod
    def of(flat: Seq[F]) -> ChunkFields[F]:
        target, draft = (
            TokenFields(*part) for part in (flat[:_NUM_TOKEN_FIELDS], flat[_NUM_TOKEN_FIELDS:_NUM_IN_BOTH])
        )
        return ChunkFields(target, draft, *flat[_NUM_IN_BOTH:])


_NUM_TOKEN_FIELDS = len(TokenFields._fields)
_NUM_IN_BOTH = 2 * _NUM_TOKEN_FIELDS
_IS_INT32 = tuple(name in ("starts_B", "query_starts") for name in TokenFields._fields) * 2 + (False,) * 7
_ALIGNMENT = 16  # bytes, of each array: for an address at less, Triton compiles its kernels anew
_WORD = 8  # bytes of an int64


class ChunkShape(NamedTuple):
    """Room for a padded chunk."""

    num_tokens: int
    num_sequences: int
    max_queries: int  # new tokens of one sequence


@dataclass(frozen=True, slots=True)
class ChunkArrays:
    """All arrays of a chunk, one after the other in one buffer, to be uploaded."""

    buffer: np.ndarray  # int64
    sizes: tuple[int, ...]  # sizes of the arrays
    # Of the target's and the draft network's tokens, for attention that plans on the host. None: the chunk is padded,
    # and a graph may hold it.
    query_starts: tuple[np.ndarray, np.ndarray] | None

    def views(self, buffer: Tensor) -> ChunkFields[Tensor]:
        """The arrays, in a copy of the buffer."""
        parts = torch.split(buffer, [_num_words(*array) for array in zip(self.sizes, _IS_INT32, strict=True)])
        return ChunkFields.of(
            [
                (part.view(torch.int32) if is_int32 else part)[:size]
                for part, size, is_int32 in zip(parts, self.sizes, _IS_INT32, strict=True)
            ]
        )


class ScoredToken(NamedTuple):
    """A prompt token whose log-probability is wanted."""

    seq: Sequence
    position: int  # index of the token in the sequence
    row: int  # index in the chunk of the token before it


class ChunkCut(NamedTuple):
    """The cut of a chunk into two lanes. The first lane has whole sequences and the first tokens of the next one."""

    num_sequences: int  # whole sequences in the first lane
    num_tokens: int
    in_next: int  # tokens of the next sequence; 0: none is cut
    num_selected: int  # prompts that end in the first lane


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """The input of `Round.prefill`: pieces of prompts, packed. R of them end in this chunk."""

    tokens_T: Tensor
    layout: PagedBatch
    ready_R: Tensor  # int64, request indices of the prompts that end here
    logits_indices: LogitsIndices  # their last tokens
    lengths_R: Tensor  # int64, committed once this is done
    roots_R: Tensor  # int64, the root of a request that is computed again; -1: to be chosen
    draft_tokens_T: Tensor  # tokens that the draft network reads; the rows of roots yet to be chosen hold anything
    draft_layout: PagedBatch | None
    draft_selected: LogitsIndices | None
    # Prompt tokens whose log-probabilities are wanted: the packed token before each, and itself. None: there are none.
    scored_K2: Tensor | None = None  # int64
    scored_num_top: int = 0  # `num_top` (see `Wanted`) for the scored tokens
    cut: ChunkCut | None = None  # None: the target computes it as one lane


class PackedPrompts:
    """Pieces of some prompts, as lists."""

    def __init__(self, page_size: int) -> None:
        self.target = PackedTokens(page_size)
        self.draft = PackedTokens(page_size)  # empty without a draft network
        self.req_idx: list[int] = []
        self.ready: list[int] = []  # these and the next three: see `ChunkFields`
        self.ready_index: list[int] = []
        self.lengths: list[int] = []
        self.roots: list[int] = []
        self.checkpoint_at: list[int] = []
        self.checkpoint_lines: list[int] = []
        self.scored: list[ScoredToken] = []

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the target or of the draft network, whichever has more."""
        return max(len(self.target.tokens), len(self.draft.tokens))

    @property
    def max_queries(self) -> int:
        return max(self.target.max_queries, self.draft.max_queries)

    @property
    def all_end(self) -> bool:
        return len(self.ready) == len(self.req_idx)

    def cut(self, min_lane: int) -> ChunkCut | None:
        """Cut the chunk in the middle of the target's tokens. None: a lane would have less than `min_lane` of them."""
        num_tokens, starts = len(self.target.tokens) // 2, self.target.query_starts
        if num_tokens < min_lane:
            return None
        whole = bisect_right(starts, num_tokens) - 1
        num_selected = bisect_left(self.target.logits_indices, num_tokens)
        return ChunkCut(whole, num_tokens, num_tokens - starts[whole], num_selected)

    def fields(self) -> ChunkFields[Ints]:
        target, draft = self.target.fields(), self.draft.fields()
        of_requests = self.req_idx, self.ready, self.ready_index, self.lengths, self.roots
        return ChunkFields(target, draft, *of_requests, self.checkpoint_at, self.checkpoint_lines)

    def arrays(self) -> ChunkArrays:
        fields = self.fields().flat()
        starts = np.array(self.target.query_starts, np.int32), np.array(self.draft.query_starts, np.int32)
        sizes = tuple(map(len, fields))
        return ChunkArrays(_joined(fields, sizes, sizes), sizes, starts)

    def padded(self, shape: ChunkShape, padding: int) -> ChunkArrays:
        """Pad the chunk with prompts of no tokens at the request index `padding`, and with tokens of no prompt. All
        prompts must end. If there are prompts of no tokens, there is at least one such token, which is read as their
        last one."""
        assert self.all_end, "a prompt goes on in another chunk"
        has_padding = shape.num_sequences > len(self.req_idx)
        assert self.num_tokens + has_padding <= shape.num_tokens, "no token is left to pad with"
        tokens, count = shape.num_tokens, shape.num_sequences
        of_tokens = TokenFields(tokens, tokens, tokens, count, count + 1, count)
        sizes = ChunkFields(of_tokens, of_tokens, *(count,) * 7).flat()

        def fill(tokens: PackedTokens) -> TokenFields[int]:
            return TokenFields(0, 0, -1, 0, tokens.query_starts[-1], shape.num_tokens - 1)

        of_requests = padding, padding, len(self.req_idx), 1, 0
        fills = ChunkFields(fill(self.target), fill(self.draft), *of_requests, -1, padding).flat()
        return ChunkArrays(_joined(self.fields().flat(), sizes, fills), sizes, None)


class PromptPacker:
    """`draft_kv_offset` is that of the draft network; None without one."""

    def __init__(self, page_size: int, draft_kv_offset: int | None) -> None:
        self._page_size = page_size
        self._draft_kv_offset = draft_kv_offset

    def pack(self, spans: Seq[PrefillSpan]) -> PackedPrompts:
        """Moves each sequence's `num_draft_computed` along."""
        packed = PackedPrompts(self._page_size)
        target, draft, offset = packed.target, packed.draft, self._draft_kv_offset
        for span in spans:
            seq = span.seq
            packed.req_idx.append(seq.req_idx)
            at, line = (-1, -1) if span.checkpoint is None else span.checkpoint
            packed.checkpoint_at.append(at)
            packed.checkpoint_lines.append(line)
            row = len(target.tokens) - span.start - 1
            wanted = range(max(span.start + 1, seq.scored_tokens.start), min(span.end + 1, seq.scored_tokens.stop))
            packed.scored += [ScoredToken(seq, i, row + i) for i in wanted if i not in seq.prompt_logprobs]
            target.add(seq, span.start, span.end, seq.tokens[span.start : span.end])
            ends = span.end == seq.num_prefill_tokens
            if ends:
                packed.ready.append(seq.req_idx)
                packed.ready_index.append(len(packed.req_idx) - 1)
                packed.lengths.append(span.end)
                packed.roots.append(seq.tokens[span.end] if span.end < len(seq.tokens) else -1)
                target.select_last()
            if offset is not None:
                # Slot i of the draft's cache reads token i + shift; the one after the prompt may not be chosen yet.
                end, shift = span.end + offset, 1 - offset
                tokens = seq.tokens[seq.num_draft_computed + shift : end + shift]
                draft.add(seq, seq.num_draft_computed, end, tokens + [0] * (end - seq.num_draft_computed - len(tokens)))
                seq.num_draft_computed = end
                if ends:
                    draft.select_last()
        return packed

    def chunk(self, arrays: ChunkArrays, buffer: Tensor, page_table_SP: Tensor, max_queries: int) -> PromptChunk:
        """Make the prompt chunk from the arrays, which `buffer` holds on the device. `page_table_SP` holds the pages of
        all request indices. No sequence has more than `max_queries` tokens."""
        fields = arrays.views(buffer)
        tables_BP = page_table_SP[fields.req_idx_B]
        tables_RP = tables_BP[fields.ready_index_R]
        of_target, of_draft = arrays.query_starts or (None, None)

        def layout(
            of: TokenFields[Tensor], last_R: Tensor, host_query_starts: np.ndarray | None
        ) -> tuple[PagedBatch, LogitsIndices]:
            """`last_R`: the slot of each prompt's last token, counted from the sequence's first."""
            batch = PagedBatch(
                of.slots_T, of.positions_T, tables_BP, self._page_size, of.starts_B, of.query_starts, max_queries,
                host_query_starts=host_query_starts,
            )  # fmt: skip
            return batch, LogitsIndices.of(batch, of.logits_indices_R, last_R, tables_RP)

        target, logits_indices = layout(fields.target, fields.lengths_R - 1, of_target)
        checkpoints = fields.checkpoint_at_B, fields.checkpoint_line_B
        target = replace(target, states=StateSpans(fields.req_idx_B, True, *checkpoints))
        draft = draft_selected = None
        if self._draft_kv_offset is not None:
            last_R = fields.lengths_R - 1 + self._draft_kv_offset
            draft, draft_selected = layout(fields.draft, last_R, of_draft)
        return PromptChunk(
            fields.target.tokens_T, target, fields.ready_R, logits_indices, fields.lengths_R, fields.roots_R,
            fields.draft.tokens_T, draft, draft_selected,
        )  # fmt: skip


class PackedTokens:
    """New tokens of some sequences, one after the other."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.tokens: list[int] = []
        self._pages: list[int] = []  # pages that hold the tokens
        self._first_pages: list[int] = []  # index there of each sequence's page 0, which may be before the list's start
        self._starts: list[int] = []
        self.query_starts: list[int] = [0]
        self.logits_indices: list[int] = []  # the last tokens of prompts that end here
        self.max_queries = 1

    def add(self, seq: Sequence, start: int, end: int, tokens: list[int]) -> None:
        size = self._page_size
        assert end <= len(seq.pages) * size, "tokens without a page would be written to the next sequence's"
        self._first_pages.append(len(self._pages) - start // size)
        self._pages += seq.pages[start // size : -(-end // size)]
        self.tokens += tokens
        self._starts.append(start)
        self.query_starts.append(len(self.tokens))
        self.max_queries = max(self.max_queries, end - start)

    def select_last(self) -> None:
        self.logits_indices.append(len(self.tokens) - 1)

    def fields(self) -> TokenFields[Ints]:
        ends = np.array(self.query_starts)
        counts = np.diff(ends)
        starts = np.array(self._starts, dtype=np.int64)
        positions = np.arange(len(self.tokens)) + np.repeat(starts - ends[:-1], counts)
        pages = np.array(self._pages, dtype=np.int64)
        page = pages[positions // self._page_size + np.repeat(np.array(self._first_pages, dtype=np.int64), counts)]
        slots = page * self._page_size + positions % self._page_size
        return TokenFields(self.tokens, positions, slots, starts, ends, self.logits_indices)


def _joined(arrays: Iterable[Ints], sizes: Seq[int], fills: Iterable[int]) -> np.ndarray:
    """(words,) int64: arrays of these sizes, padded with their `fills`."""
    words = [_num_words(*array) for array in zip(sizes, _IS_INT32, strict=True)]
    buffer = np.zeros(sum(words), dtype=np.int64)
    first = 0
    for values, size, fill, count, is_int32 in zip(arrays, sizes, fills, words, _IS_INT32, strict=True):
        assert len(values) <= size, "it would go on in the next array"
        part = buffer[first : first + count]
        part = part.view(np.int32) if is_int32 else part
        part[: len(values)] = values
        part[len(values) : size] = fill
        first += count
    return buffer


def _num_words(size: int, is_int32: bool) -> int:
    """Return the number of words that an array takes in the buffer."""
    num_bytes = size * (4 if is_int32 else _WORD)
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT // _WORD
