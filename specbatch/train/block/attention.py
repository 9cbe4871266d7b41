"""Attention of many blocks over a shared context, in one pass.

Keys are those of the context, T positions, and then those of all blocks. A position of a block sees the context from
`starts_N` to `ends_N` of its block, and all positions of its own block.

On CUDA this is FlexAttention (Dong et al. 2024), which computes only tiles that some query sees. Elsewhere it is a
plain attention with a mask over the whole context.

Shape suffixes: N blocks, K positions of a block, Q = N * K queries, T context, S = T + Q keys, H query heads, G
key/value heads, D head dimension, X tiles of queries, Y tiles of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from specbatch.train.block.batch import BlockBatch

TILE = 128  # positions of a tile of FlexAttention
# Given queries (H, Q, D), keys and values (G, S, D) and the scale of logits
# (None: that of the head dimension), return (H, Q, D).
Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


def masked_attention(batch: BlockBatch) -> Attend:
    """Return plain attention for the blocks of a batch. It computes Q * (T + K) logits of each head."""
    num_blocks, size = batch.tokens_NK.shape
    num_context = batch.num_context
    context_T = torch.arange(num_context, device=batch.starts_N.device)
    sees_NT = (batch.starts_N[:, None] <= context_T) & (context_T < batch.ends_N[:, None])
    hidden_QT = ~sees_NT.repeat_interleave(size, dim=0)

    def attend(q_HQD: Tensor, k_GSD: Tensor, v_GSD: Tensor, scale: float | None) -> Tensor:
        q_HQD = q_HQD * (q_HQD.shape[-1] ** -0.5 if scale is None else scale)
        k_HSD, v_HSD = (_repeated(x, len(q_HQD))[0] for x in (k_GSD, v_GSD))
        k_HNKD, v_HNKD = (x[:, num_context:].unflatten(1, (num_blocks, size)) for x in (k_HSD, v_HSD))
        of_context = (q_HQD @ k_HSD[:, :num_context].mT).masked_fill(hidden_QT, -torch.inf)
        of_block = (q_HQD.unflatten(1, (num_blocks, size)) @ k_HNKD.mT).flatten(1, 2)
        shares = torch.cat((of_context, of_block), dim=-1).softmax(dim=-1, dtype=of_block.dtype)
        in_block_HNKK = shares[..., num_context:].unflatten(1, (num_blocks, size))
        return shares[..., :num_context] @ v_HSD[:, :num_context] + (in_block_HNKK @ v_HNKD).flatten(1, 2)

    return attend


def flex_attention_of(batch: BlockBatch, *, compiled: bool = True) -> Attend:
    """Return FlexAttention for the blocks of a batch, whose context and queries must fill whole tiles. It is compiled
    for their sizes, so all batches must have the same."""
    mask = tile_mask(batch)

    def attend(q_HQD: Tensor, k_GSD: Tensor, v_GSD: Tensor, scale: float | None) -> Tensor:
        function = _compiled() if compiled else cast(Callable[..., Any], flex_attention)
        k, v = (_repeated(x, len(q_HQD)) for x in (k_GSD, v_GSD))
        out: Tensor = function(q_HQD[None], k, v, block_mask=mask, scale=scale)
        return out[0]

    return attend


def _repeated(x_GSD: Tensor, num_heads: int) -> Tensor:
    """Return keys or values (1, H, S, D), one for each query head."""
    return x_GSD.repeat_interleave(num_heads // len(x_GSD), dim=0)[None]


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def tile_mask(batch: BlockBatch) -> BlockMask:
    """Return the mask of a batch for FlexAttention. Tiles follow from the contexts of the blocks, so that no mask of
    all queries and keys is made."""
    starts_N, ends_N, num_context = batch.starts_N, batch.ends_N, batch.num_context
    num_blocks, size = batch.tokens_NK.shape
    num_queries = num_blocks * size
    assert num_context % TILE == 0, num_context
    assert num_queries % TILE == 0, num_queries
    device = starts_N.device

    # A tile of the context is seen by a block if the two overlap, and wholly seen if the block's context covers it.
    first_Y = torch.arange(0, num_context, TILE, device=device)
    starts, ends = starts_N[:, None], ends_N[:, None]
    seen_NY = torch.maximum(starts, first_Y) < torch.minimum(ends, first_Y + TILE)
    whole_NY = (starts <= first_Y) & (ends >= first_Y + TILE)
    block_Q = torch.arange(num_queries, device=device) // size
    seen_XY, whole_XY = (x[block_Q].unflatten(0, (-1, TILE)) for x in (seen_NY, whole_NY))
    seen_XY, whole_XY = seen_XY.any(dim=1), whole_XY.all(dim=1)

    # The blocks of a tile of queries: all their positions are keys, whose tiles lie around that of the queries.
    tile_X = torch.arange(num_queries // TILE, device=device)
    first_X = tile_X * TILE // size * size
    end_X = ((tile_X + 1) * TILE - 1) // size * size + size
    own_XX = (first_X[:, None] < (tile_X + 1) * TILE) & (tile_X * TILE < end_X[:, None])
    part_XY = torch.cat((seen_XY & ~whole_XY, own_XX), dim=1)
    whole_XY = torch.cat((whole_XY, torch.zeros_like(own_XX)), dim=1)

    def sees(batch_index: Tensor, head: Tensor, q: Tensor, key: Tensor) -> Tensor:
        block = q // size
        in_context = (starts_N[block] <= key) & (key < ends_N[block])  # contexts end before the keys of blocks begin
        return in_context | ((key - num_context) // size == block) & (key >= num_context)

    return BlockMask.from_kv_blocks(
        *_indices(part_XY),
        *_indices(whole_XY),
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(num_queries, num_context + num_queries),
    )


def _indices(tiles_XY: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of tiles of each row, and their indices before those of all others, as FlexAttention reads
    them."""
    counts_X = tiles_XY.sum(dim=1, dtype=torch.int32)
    order_XY = tiles_XY.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    return counts_X[None, None], order_XY[None, None].contiguous()
