"""What a forward pass tells an attention backend, and what a backend does with it.

A forward pass processes T packed tokens of B sequences. Sequence b writes its new tokens at consecutive slots
[start, start + num_tokens) of its own pages and attends to its slots [0, start + num_tokens): to those in front of the
*window of the mask* without restriction, and to the last M slots as the mask says. Without a mask, new tokens are
causal. So a decode step, a chunk of a prompt, a tree to verify and one level of a draft tree are one case.

Shape suffixes: B sequences, T packed tokens, Q new tokens of one sequence, M masked slots, H query heads, K key/value
heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specbatch.cache.pages import KVCache


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens of one sequence."""

    pages: Sequence[int]  # the sequence's page table
    start: int  # slots in the cache before the new tokens
    num_tokens: int  # new tokens, written at slots [start, start + num_tokens)
    positions: Sequence[int] | None = None  # rotary positions; None: equal to the slots
    mask: Tensor | None = None  # (Q, M) bool, True = visible, over the last M slots; None: causal


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """B spans, packed: the same for every layer of a forward pass."""

    spans: Sequence[Span]
    page_size: int
    slots_T: Tensor  # where the new keys and values go, int64
    positions_T: Tensor  # int64

    @staticmethod
    def build(spans: Sequence[Span], page_size: int, device: torch.device) -> BatchLayout:
        slots: list[int] = []
        positions: list[int] = []
        for span in spans:
            end = span.start + span.num_tokens
            assert end <= len(span.pages) * page_size, f"slots up to {end} in {len(span.pages)} pages of {page_size}"
            slots += [span.pages[i // page_size] * page_size + i % page_size for i in range(span.start, end)]
            positions += range(span.start, end) if span.positions is None else span.positions
        assert len(slots) == len(positions), f"{len(slots)} slots, {len(positions)} positions"
        return BatchLayout(spans, page_size, torch.tensor(slots, device=device), torch.tensor(positions, device=device))


class AttentionBackend(Protocol):
    """One backend instance serves one model (its head counts are fixed)."""

    def plan(self, layout: Any) -> Any:
        """Prepare one forward pass: a `BatchLayout`, or a `PagedBatch` for backends that read the device's own
        lengths. The result is passed to `attend` for every layer."""
        ...

    def attend(self, plan: Any, q_THD: Tensor, cache: KVCache, layer: int, window: int | None) -> Tensor:
        """Attention output (T, H, D). New keys and values are in `layer` of the cache already. `window`: sliding window
        in tokens (a query at position p sees positions > p - window), None for full attention."""
        ...
