"""Attention over a paged cache, in plain torch.

Shape suffixes as in `model.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.batch import PagedBatch, slots_of
from specbatch.kernels.torch.model import as_bytes


class Workspace:
    """What the Triton kernel of `attend` needs between launches. This one needs nothing."""

    def __init__(self, device: torch.device, rows: int, head_dim: int) -> None:
        pass


def attend(
    q_THD: Tensor,
    kv_2KSD: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    num_splits: int = 1,
    workspace: Workspace | None = None,
    listed: tuple[Tensor, Tensor] | None = None,
    v_scale: float = 1.0,
) -> Tensor:
    """Attention output (T, H, D) of new tokens over their sequences' pages; see `PagedBatch` for what is visible.

    `window`: a query at position p sees keys at positions > p - window; a key's position is its slot's index, which is
    wrong for nodes of a draft tree, all of which lie in the window of any real model.
    `v_scale`: of the values of an FP8 cache; that of its keys is in `scale`.
    `num_splits`, `workspace` and `listed` are for the Triton kernel.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = kv_2KSD.shape[1]
    tokens = torch.arange(num_tokens, device=q_THD.device)
    seq_T = torch.searchsorted(batch.query_starts[1:].contiguous(), tokens, right=True)
    seq_T = seq_T.clamp_(max=batch.starts_B.shape[0] - 1)
    start_T = batch.starts_B[seq_T].to(torch.int64)
    own_T = tokens - batch.query_starts[seq_T]
    keys_L = torch.arange(batch.page_table_BP.shape[1] * batch.page_size, device=q_THD.device)
    visible = keys_L[None] <= (start_T + own_T)[:, None]
    if batch.mask_TW is not None:
        assert batch.mask_starts_B is not None
        bit = keys_L[None] - batch.mask_starts_B[seq_T][:, None]  # (T, L)
        width = batch.mask_TW.shape[1] * 32
        word = batch.mask_TW.gather(1, (bit.clamp(0, width - 1) // 32))
        visible = (bit < 0) | ((bit < width) & ((word >> (bit % 32)) & 1).bool())
    if window is not None:
        visible &= keys_L[None] > (batch.positions_T - window)[:, None]
    slots = slots_of(batch.page_table_BP, batch.page_size, keys_L.expand(batch.starts_B.shape[0], -1))
    group = num_heads // num_kv_heads
    wide = q_THD.dtype if q_THD.dtype == torch.float64 else torch.float32
    k, v = (as_bytes(kv_2KSD[i])[:, slots].view(kv_2KSD.dtype).to(wide)[:, seq_T] for i in (0, 1))  # (K, T, L, D)
    q = q_THD.to(wide).view(num_tokens, num_kv_heads, group, head_dim).transpose(0, 1)
    scores = torch.einsum("ktgd,ktld->ktgl", q, k) * scale
    weights = torch.softmax(scores.masked_fill(~visible[None, :, None], -torch.inf), dim=-1)
    out = torch.einsum("ktgl,ktld->ktgd", weights, v) * v_scale
    return out.transpose(0, 1).reshape(num_tokens, num_heads, head_dim).to(q_THD.dtype)
