"""Bit masks, in plain torch: tree masks as FlashInfer's kernels read them.

Shape suffixes: B sequences, T packed tokens (Q of each sequence), W words, Z bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_mask_bits(mask_TW: Tensor, mask_starts_B: Tensor, starts_B: Tensor, num_queries: int, max_keys: int) -> Tensor:
    """Return the mask of a `PagedBatch` in FlashInfer's format: a bit for each pair of query and key, (B, Z) uint8.

    Bit q * L + k of sequence b, from the least significant bit of its first byte, says whether query q sees slot k,
    where L = starts[b] + num_queries is the number of the sequence's keys, at most `max_keys`. Each sequence has Z =
    ceil(num_queries * max_keys / 8) bytes; the bits after its first num_queries * L can have any value.
    """
    batch, width = starts_B.shape[0], mask_TW.shape[1] * 32
    device = mask_TW.device
    index = torch.arange(-(-num_queries * max_keys // 8) * 8, device=device)
    keys_B1 = (starts_B + num_queries).to(torch.int64)[:, None]
    query = (index // keys_B1).clamp_(max=num_queries - 1)
    bit = index % keys_B1 - mask_starts_B[:, None]
    seq = torch.arange(batch, device=device)[:, None]
    word = mask_TW.view(batch, num_queries, -1)[seq, query, bit.clamp(0, width - 1) // 32]
    visible = (bit < 0) | ((bit < width) & ((word >> (bit % 32)) & 1).bool())
    bits = visible.view(batch, -1, 8).int() << torch.arange(8, dtype=torch.int32, device=device)
    return bits.sum(dim=2).to(torch.uint8)
