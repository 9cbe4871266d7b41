"""Attention over a `PagedBatch` without planning on the host: lengths, page tables and masks are read on the device.

The backend `triton` is this with Triton's kernel. With the reference kernel it runs on a CPU, for tests.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache
from specbatch.kernels import ops_for

# Few splits leave multiprocessors idle, and many cost more to merge. The numbers were measured on an H200 by
# `scripts/bench/tune_attention.py`. They are constants, because results must not depend on the card.
_MAX_PROGRAMS = 512
# The limit for 17 to 32 rows. In bfloat16, 512 programs take 1.09 to 1.19 of the time
# (docs/bench/2026-11-26-h200-attention-32.json).
_MAX_PROGRAMS_32 = 256
# For heads of 256, half of both limits takes 0.84 to 0.91 of the time (log, 2026-11-27).
_MAX_SPLITS = 8
_MAX_SPLITS_SMALL, _SMALL_PROGRAMS = 16, 4
_MAX_ROWS = 64  # the most (new token, query head) pairs of one program
# In a batch without splits, sequences of at least this number of tokens are split, up to the size of the workspace.
# `scripts/bench/bench_long_rows.py` measured it on an H200: a layer of 255 rows of 1k tokens and one of 100k takes 0.44
# ms instead of 2.45. 256 rows of 1k take 0.2% longer (5% with 4 queries each), and not longer in runs without long
# rows.
LONG_TOKENS: int | None = 8192
WORKSPACE_ROWS = _MAX_PROGRAMS * _MAX_ROWS


# Parts of the tokens that a group shares. More parts keep more multiprocessors busy, but leave more sums to merge. The
# numbers are not measured yet; `scripts/bench/bench_cascade.py` compares them.
_MAX_PREFIX_PARTS, _PREFIX_ROWS, _PREFIX_PROGRAMS = 8, 128, 256


class _Plan(NamedTuple):
    batch: PagedBatch
    num_splits: int
    listed: tuple[Tensor, Tensor] | None  # see `long_sequences`
    prefix_parts: int  # 0: no prefix is read for several sequences


class PagedAttention:
    """The backend `triton`. `num_heads` is a multiple of `num_kv_heads`. The number of splits depends on the number of
    sequences, which is fixed in a captured graph, and not on their lengths. `scale` None: head_dim ** -0.5.
    `long_tokens`: the least tokens of a sequence that is split in a large batch, too; None: none is split there."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        long_tokens: int | None = LONG_TOKENS,
    ) -> None:
        ops = ops_for(device, dtype)
        self._attend, self._attend_prefixes = ops.attend, ops.attend_prefixes
        self._long_sequences, self._long_tokens = ops.long_sequences, long_tokens
        self._workspace = ops.Workspace(device, WORKSPACE_ROWS, head_dim)
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._group = num_heads // num_kv_heads
        self._scale = head_dim**-0.5 if scale is None else scale
        self._soft_cap = soft_cap

    def plan(self, layout: PagedBatch) -> _Plan:
        num_seqs, max_pages = layout.page_table_BP.shape
        num_rows = layout.max_queries * self._group
        splits = num_splits(num_seqs, self._num_kv_heads, num_rows, self._head_dim)
        parts = 0 if layout.groups is None else num_prefix_parts(num_seqs, self._num_kv_heads, num_rows)
        if splits > 1 or self._long_tokens is None or max_pages * layout.page_size < self._long_tokens:
            return _Plan(layout, splits, None, parts)
        count = num_long(num_seqs, self._num_kv_heads, num_rows)
        if not count:
            return _Plan(layout, splits, None, parts)
        listed = self._long_sequences(layout.starts_B, layout.query_starts, self._long_tokens, count)
        return _Plan(layout, _MAX_SPLITS, listed, parts)

    def attend(
        self,
        plan: _Plan,
        q_THD: Tensor,
        cache: KVCache,
        layer: int,
        window: int | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        batch, splits, listed, parts = plan
        kv, scales, prefix = cache.layer(layer), cache.scales(layer), None
        scale = self._scale * scales.k
        if parts and window is None:
            prefix = self._attend_prefixes(q_THD, kv, batch, scale, parts, self._soft_cap)
        out: Tensor = self._attend(
            q_THD, kv, batch, scale, window, splits, self._workspace, listed, scales.v, prefix, self._soft_cap, sinks_H
        )
        return out


def num_splits(num_seqs: int, num_kv_heads: int, num_rows: int, head_dim: int = 128) -> int:
    """Return the number of splits of each sequence's keys: a power of two, more for fewer sequences."""
    programs = num_seqs * num_kv_heads * -(-num_rows // _MAX_ROWS)
    max_programs = _MAX_PROGRAMS_32 if 16 < num_rows <= 32 else _MAX_PROGRAMS
    splits = 1
    max_splits = _MAX_SPLITS_SMALL if programs <= _SMALL_PROGRAMS else _MAX_SPLITS
    if head_dim > 128:
        max_programs, max_splits = max_programs // 2, max_splits // 2
    while splits < max_splits and splits * 2 * programs <= max_programs:
        splits *= 2
    return splits


def num_long(num_seqs: int, num_kv_heads: int, num_rows: int) -> int:
    """Return the number of sequences that can have the most splits in a batch whose other sequences are not split."""
    programs = num_kv_heads * -(-num_rows // _MAX_ROWS)
    return min(num_seqs, _MAX_PROGRAMS // (programs * _MAX_SPLITS))


def num_prefix_parts(num_seqs: int, num_kv_heads: int, num_rows: int) -> int:
    """Return the number of parts of the tokens that groups share: a power of two, more for fewer sequences and rows."""
    programs, parts = num_kv_heads * -(-num_seqs * num_rows // _PREFIX_ROWS), 1
    while parts < _MAX_PREFIX_PARTS and parts * 2 * programs <= _PREFIX_PROGRAMS:
        parts *= 2
    return parts
