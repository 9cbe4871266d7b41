"""What a forward pass gives an attention backend, and what a backend does with it.

A forward pass processes T packed tokens of B sequences: see `batch.PagedBatch`. A decode step, a chunk of a
prompt, a tree to verify and one level of a draft tree are one case.

Shape suffixes: T packed tokens, H query heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache


class AttentionBackend(Protocol):
    """One backend instance serves one model (its head counts are fixed)."""

    def plan(self, batch: PagedBatch) -> Any:
        """Prepare one forward pass. The result is passed to `attend` for every layer."""
        ...

    def attend(self, plan: Any, q_THD: Tensor, cache: KVCache, layer: int, window: int | None) -> Tensor:
        """Attention output (T, H, D). New keys and values are in `layer` of the cache already. `window`: sliding window
        in tokens (a query at position p sees positions > p - window), None for full attention."""
        ...
