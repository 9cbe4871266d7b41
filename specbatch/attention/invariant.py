"""Attention of a deterministic run on CUDA: a token's bits do not depend on what is computed with it.

`kernels/triton/invariant_attention.py` says how. Here is decided which programs compute a launch, which changes no bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache

if TYPE_CHECKING:
    from specbatch.kernels.triton.parts.attention_tile import Tile


class InvariantAttention:
    """`num_heads` is a multiple of `num_kv_heads`. `scale` None: head_dim ** -0.5. `tile`: for measurements; a run has
    one."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scale: float | None = None,
        tile: Tile | None = None,
    ) -> None:
        # Triton exists where CUDA does, and need not exist elsewhere.
        from specbatch.kernels import triton as ops
        from specbatch.kernels.triton import invariant_attention, tree_paths
        from specbatch.kernels.triton.parts import attention_splits
        from specbatch.kernels.triton.parts.shared_memory import shared_bytes

        self._long_sequences, self._tree_paths = ops.long_sequences, tree_paths.tree_paths
        self._attend, self._plan_splits = invariant_attention.attend, attention_splits.plan_splits
        self._workspace = ops.Workspace(device, attention_splits.WORKSPACE_ROWS, head_dim)
        self._bounds = torch.tensor(attention_splits.bounds(), dtype=torch.int32, device=device)
        self._long_tokens = attention_splits.LONG_TOKENS
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._scale = head_dim**-0.5 if scale is None else scale
        self._tile = tile or attention_splits.invariant_tile(head_dim, dtype.itemsize, shared_bytes(self._bounds))

    def plan(self, batch: PagedBatch) -> Any:
        num_seqs, max_pages = batch.page_table_BP.shape
        max_keys = max_pages * batch.page_size
        splits = self._plan_splits(num_seqs, self._num_kv_heads, batch.max_queries * self._group, max_keys, self._tile)
        listed = None
        if splits.num_seqs < num_seqs:
            listed = self._long_sequences(batch.starts_B, batch.query_starts, self._long_tokens, splits.num_seqs)
        paths = None if batch.mask_TW is None else self._tree_paths(batch)
        return batch, paths, splits, listed

    def attend(self, plan: Any, q_THD: Tensor, cache: KVCache, layer: int, window: int | None) -> Tensor:
        batch, paths, splits, listed = plan
        out: Tensor = self._attend(
            self._tile, q_THD, cache.layer(layer), batch, paths, splits, listed, self._bounds, self._workspace,
            self._scale, window,
        )  # fmt: skip
        return out
