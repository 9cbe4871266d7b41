"""The batches of forward passes from lists: the oracle and tests give spans, which become a `PagedBatch`.

Sequence b writes its new tokens at consecutive slots [start, start + num_tokens) of its own pages and attends to its
slots [0, start + num_tokens): to those before the *window of the mask* without restriction, and to the last M slots as
the mask says. Without a mask, new tokens are causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one sequence."""

    pages: Sequence[int]  # the sequence's page table
    start: int  # the number of slots in the cache before the new tokens
    num_tokens: int  # the number of new tokens, which are written at slots [start, start + num_tokens)
    positions: Sequence[int] | None = None  # rotary positions; None: equal to the slots
    mask: Tensor | None = None  # (Q, M) bool, True = visible, over the last M slots; None: causal


def batch_of(spans: Sequence[Span], page_size: int, device: torch.device) -> PagedBatch:
    """Pack the spans to a batch."""
    slots: list[int] = []
    positions: list[int] = []
    ends = [0]
    for span in spans:
        end = span.start + span.num_tokens
        assert end <= len(span.pages) * page_size, f"slots up to {end} in {len(span.pages)} pages of {page_size}"
        slots += [span.pages[i // page_size] * page_size + i % page_size for i in range(span.start, end)]
        positions += range(span.start, end) if span.positions is None else span.positions
        ends.append(len(slots))
    assert len(slots) == len(positions), f"{len(slots)} slots, {len(positions)} positions"
    width = max(len(span.pages) for span in spans)
    table = torch.tensor([[*span.pages, *[0] * (width - len(span.pages))] for span in spans], dtype=torch.int32)
    words, mask_starts = _words(spans)
    return PagedBatch(
        torch.tensor(slots, device=device),
        torch.tensor(positions, device=device),
        table.to(device),
        page_size,
        torch.tensor([span.start for span in spans], dtype=torch.int32, device=device),
        torch.tensor(ends, dtype=torch.int32, device=device),
        max(span.num_tokens for span in spans),
        None if words is None else words.to(device),
        None if words is None else torch.tensor(mask_starts, dtype=torch.int32, device=device),
    )


def _words(spans: Sequence[Span]) -> tuple[Tensor | None, list[int]]:
    """Return the masks' words, a row for each token, and the slots at which they begin. The words are None if no span
    has a mask."""
    if all(span.mask is None for span in spans):
        return None, []
    masks = [
        torch.ones(span.num_tokens, span.num_tokens).tril().bool() if span.mask is None else span.mask.cpu()
        for span in spans
    ]
    num_words = -(-max(mask.shape[1] for mask in masks) // 32)
    bits = torch.cat([torch.nn.functional.pad(mask, (0, 32 * num_words - mask.shape[1])) for mask in masks])
    words = (bits.view(-1, num_words, 32).long() << torch.arange(32)).sum(2)
    words = torch.where(words >= 2**31, words - 2**32, words).int()  # bit 31 is the sign
    return words, [s.start + s.num_tokens - mask.shape[1] for s, mask in zip(spans, masks, strict=True)]


def piecewise_logits(decoder: Decoder, tokens: list[int], pieces: list[int], dtype: torch.dtype) -> Tensor:
    """Logits (T, V), computed piece by piece over a paged cache whose pages lie out of order."""
    page_size, num_pages = 8, -(-len(tokens) // 8)
    cache = decoder.new_cache(num_pages * page_size, dtype)
    pages = list(range(num_pages))[::-1]
    out, start = [], 0
    for size in pieces:
        layout = batch_of([Span(pages, start, size)], page_size, torch.device("cpu"))
        hidden, _ = decoder.forward(torch.tensor(tokens[start : start + size]), layout, cache)
        out.append(decoder.logits(hidden))
        start += size
    assert start == len(tokens)
    return torch.cat(out)
