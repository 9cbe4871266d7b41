"""The interface between a forward pass and an attention backend.

A forward pass computes T packed tokens of B sequences: see `batch.PagedBatch`. A round of plain decoding, a chunk of a
prompt, a tree to verify and one level of a draft tree are the same case.

Shape suffixes: T packed tokens, H query heads, D head dimension.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache


class AttentionBackend(Protocol):
    """An attention backend. An instance serves one model, because its numbers of heads are fixed."""

    def plan(self, batch: PagedBatch) -> Any:
        """Prepare one forward pass, and return a plan for `attend` of every layer."""
        ...

    def attend(
        self,
        plan: Any,
        q_THD: Tensor,
        cache: KVCache,
        layer: int,
        window: int | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention output (T, H, D). New keys and values are already in `layer` of the cache. `window`:
        the sliding window in tokens (a query at position p sees positions > p - window); None: full attention.
        `sinks_H`: a score of each head that has no value, see `kernels/torch/attention.py`; None: there are none."""
        ...
