"""Attention without host planning, over a `PagedBatch`: lengths, page tables and masks are read on the device.

Backend `triton` is this with Triton's kernel. With the reference kernel it runs on a CPU, for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.kernels import ops_for

# Few splits leave multiprocessors idle, many cost more to merge. Measured on an H200 by
# `scripts/bench/tune_attention.py`. Constants: results must not depend on the card.
MAX_PROGRAMS = 512
_MAX_SPLITS = 8
_MAX_SPLITS_SMALL, _SMALL_PROGRAMS = 16, 4
_MAX_ROWS = 64  # (new token, query head) pairs of one program
WORKSPACE_ROWS = MAX_PROGRAMS * _MAX_ROWS


class PagedAttention:
    """`num_heads` is a multiple of `num_kv_heads`. Splits follow the number of sequences, which is fixed in a captured
    graph, never their lengths. `scale` None: head_dim ** -0.5."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scale: float | None = None,
    ) -> None:
        ops = ops_for(device, dtype)
        self._attend = ops.attend
        self._workspace = ops.Workspace(device, WORKSPACE_ROWS, head_dim)
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._scale = head_dim**-0.5 if scale is None else scale

    def plan(self, layout: PagedBatch) -> tuple[PagedBatch, int]:
        return layout, num_splits(layout.starts_B.shape[0], self._num_kv_heads, layout.max_queries * self._group)

    def attend(self, plan: Any, q_THD: Tensor, cache: KVCache, layer: int, window: int | None) -> Tensor:
        batch, splits = plan
        out: Tensor = self._attend(q_THD, cache.layer(layer), batch, self._scale, window, splits, self._workspace)
        return out


def num_splits(num_seqs: int, num_kv_heads: int, num_rows: int) -> int:
    """Splits of each sequence's keys: a power of two, more for fewer sequences and fewer rows."""
    programs = num_seqs * num_kv_heads * -(-num_rows // _MAX_ROWS)
    splits = 1
    max_splits = _MAX_SPLITS_SMALL if programs <= _SMALL_PROGRAMS else _MAX_SPLITS
    while splits < max_splits and splits * 2 * programs <= MAX_PROGRAMS:
        splits *= 2
    return splits
