"""Attention of a deterministic run on CUDA: a token's bits do not depend on the tokens that are computed with it.

`kernels/triton/invariant_attention.py` explains how. This module decides which programs compute a launch, which changes
no bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.cache.pages import KVCache, KVScales
from specbatch.kernels.card_checks import CardChecks, Pair

if TYPE_CHECKING:
    from specbatch.kernels.triton.parts.attention_tile import Tile


class InvariantAttention:
    """`num_heads` is a multiple of `num_kv_heads`. `scale` None: head_dim ** -0.5. `kv_dtype`: of the cache; None:
    `dtype`. `tile`: for measurements."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        tile: Tile | None = None,
    ) -> None:
        # Triton is imported here, because it need not be installed on hosts without CUDA.
        from specbatch.kernels import triton as ops
        from specbatch.kernels.triton import invariant_attention, tree_paths
        from specbatch.kernels.triton.parts import attention_splits
        from specbatch.kernels.triton.parts.shared_memory import shared_bytes

        self._long_sequences, self._tree_paths = ops.long_sequences, tree_paths.tree_paths
        self._attend, self._plan_splits = invariant_attention.attend, attention_splits.plan_splits
        self._workspace = ops.Workspace(device, attention_splits.WORKSPACE_ROWS, head_dim)
        self._bounds = torch.tensor(attention_splits.bounds(), dtype=torch.int32, device=device)
        self._long_tokens = attention_splits.LONG_TOKENS
        self._num_kv_heads, self._group, self._head_dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        self._dtype, self._kv_dtype = dtype, kv_dtype or dtype
        self._scale = head_dim**-0.5 if scale is None else scale
        self._soft_cap = soft_cap
        self._own_tile, self._tile_for, self._shared = tile, attention_splits.invariant_tile, shared_bytes(self._bounds)

    def plan(self, batch: PagedBatch) -> Any:
        num_seqs, max_pages = batch.page_table_BP.shape
        max_keys = max_pages * batch.page_size
        num_rows = batch.max_queries * self._group
        tile = self._own_tile or self._tile_for(num_rows, self._head_dim, self._dtype.itemsize, self._shared)
        splits = self._plan_splits(num_seqs, self._num_kv_heads, num_rows, max_keys, tile)
        listed = None
        if splits.num_seqs < num_seqs:
            listed = self._long_sequences(batch.starts_B, batch.query_starts, self._long_tokens, splits.num_seqs)
        paths = None if batch.mask_TW is None else self._tree_paths(batch)
        return batch, tile, paths, splits, listed

    def attend(
        self,
        plan: Any,
        q_THD: Tensor,
        cache: KVCache,
        layer: int,
        window: int | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        batch, tile, paths, splits, listed = plan
        scales = cache.scales(layer)
        out: Tensor = self._attend(
            tile, q_THD, cache.layer(layer), batch, paths, splits, listed, self._bounds, self._workspace,
            self._scale * scales.k, window, scales.v, self._soft_cap, sinks_H,
        )  # fmt: skip
        return out

    def check_later(self, checks: CardChecks) -> None:
        """Have `checks` compare tokens of launches of several kinds."""
        sizes = self._num_kv_heads, self._group, self._head_dim, self._dtype, self._kv_dtype, self._soft_cap
        checks.add(sizes, self._pairs)

    def _pairs(self) -> Iterator[Pair]:
        heads, kv_heads, total, page = self._num_kv_heads * self._group, self._num_kv_heads, 600, 64
        device = self._bounds.device
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(self._dtype)

        q_THD = random(total, heads, self._head_dim)
        cache = _Cache(random(2, kv_heads, 10 * page, self._head_dim).to(self._kv_dtype))
        pages = torch.arange(10, dtype=torch.int32, device=device)

        def attend(*starts: int, count: int, tree: bool = False) -> Tensor:
            """Compute `count` tokens from each of `starts` on. `tree`: they are the nodes of a path."""
            tokens = torch.cat([torch.arange(start, start + count, device=device) for start in starts])
            starts_B = torch.tensor(starts, dtype=torch.int32, device=device)
            ends = torch.arange(len(starts) + 1, dtype=torch.int32, device=device) * count
            table = pages.expand(len(starts), -1).contiguous()
            batch = PagedBatch(tokens, tokens, table, page, starts_B, ends, count)
            if tree:
                words = (2 << torch.arange(count, dtype=torch.int32, device=device)) - 1
                batch = replace(batch, mask_TW=words.repeat(len(starts))[:, None], mask_starts_B=starts_B)
            return self.attend(self.plan(batch), q_THD[tokens], cache, 0, None)  # type: ignore[arg-type]

        expected = attend(0, count=total)
        many = [255] * (1 + 512 // kv_heads)  # enough sequences that each has one program
        for name, starts, count, tree in (
            ("of one token", [599], 1, False),
            ("of many sequences", many, 1, False),
            ("of a chain", [255, 510], 5, False),
            ("of a tree", [255, 510], 5, True),
            ("of a prompt's end", [200], 400, False),
        ):
            tokens = torch.cat([torch.arange(start, start + count, device=device) for start in starts])
            differs = f"attention {name} differs from that of a whole prompt for {heads} heads of {self._head_dim}"
            yield Pair(attend(*starts, count=count, tree=tree), expected[tokens], differs)


@dataclass(frozen=True)
class _Cache:
    """Keys and values of one layer."""

    kv_2KSD: Tensor

    def layer(self, layer: int) -> Tensor:
        return self.kv_2KSD

    def scales(self, layer: int) -> KVScales:
        return KVScales()
