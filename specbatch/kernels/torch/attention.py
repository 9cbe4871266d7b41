"""Attention over a paged cache, in plain torch.

Shape suffixes as in `model.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.batch import PagedBatch, PrefixParts, slots_of
from specbatch.kernels.torch.model import as_bytes
from specbatch.kernels.torch.workspace import Workspace


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
    prefix: PrefixParts | None = None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Compute the attention output (T, H, D) of new tokens over their sequences' pages. `PagedBatch` says which keys a
    token sees.

    `window`: a query at position p sees keys at positions > p - window; a key's position is its slot's index, which is
    wrong for nodes of a draft tree, all of which lie in the window of any real model.
    `v_scale`: the scale of the values of an FP8 cache; the scale of its keys is in `scale`.
    `prefix`: the result of `attend_prefixes` for the same queries; None: there are no groups. It needs full attention.
    `soft_cap`: scores become cap * tanh(score / cap), as in Gemma 2; None: they stay as they are.
    `sinks_H`: a score of each query head that takes part in the softmax and has no value (attention sinks, as in
    gpt-oss), so that the weights of the keys add up to less than 1. It is neither scaled nor capped. In float32 at
    least; None: there are none.
    `num_splits`, `workspace` and `listed` are for the Triton kernel.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_kv_heads = kv_2KSD.shape[1]
    tokens = torch.arange(num_tokens, device=q_THD.device)
    seq_T = sequence_of_tokens(batch, num_tokens)
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
    if prefix is not None:
        assert batch.groups is not None, "parts of no group"
        assert window is None, "a prefix is read as a whole"
        visible &= keys_L[None] >= batch.groups.tokens_B[seq_T][:, None]
    group = num_heads // num_kv_heads
    k, v = keys_and_values(kv_2KSD, batch, seq_T, q_THD.dtype)
    q = q_THD.to(k.dtype).view(num_tokens, num_kv_heads, group, head_dim).transpose(0, 1)
    scores = torch.einsum("ktgd,ktld->ktgl", q, k) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores.masked_fill(~visible[None, :, None], -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.to(scores.dtype).view(num_kv_heads, 1, group, 1).expand(-1, num_tokens, -1, -1)
        scores, v = torch.cat((scores, sinks), dim=-1), F.pad(v, (0, 0, 0, 1))
    out = torch.einsum("ktgl,ktld->ktgd", torch.softmax(scores, dim=-1), v)
    out = out.transpose(0, 1).reshape(num_tokens, num_heads, head_dim)
    if prefix is not None:
        own_TH = torch.logsumexp(scores, -1).transpose(0, 1).reshape(num_tokens, num_heads)
        out = _merged(out, own_TH, prefix)
    return (out * v_scale).to(q_THD.dtype)


def _merged(own_THD: Tensor, lse_TH: Tensor, prefix: PrefixParts) -> Tensor:
    """Merge attention over a sequence's own keys, with the logarithms of its sums of exponentials, and over its
    prefix."""
    peaks_PTH, totals_PTH = prefix.weights_PTH2.unbind(-1)
    peak_TH = torch.maximum(lse_TH, peaks_PTH.amax(0))
    own_TH, shares_PTH = torch.exp(lse_TH - peak_TH), torch.exp(peaks_PTH - peak_TH)
    sums_THD = own_THD * own_TH[..., None] + (prefix.sums_PTHD * shares_PTH[..., None]).sum(0)
    return sums_THD / (own_TH + (totals_PTH * shares_PTH).sum(0))[..., None]


def sequence_of_tokens(batch: PagedBatch, num_tokens: int) -> Tensor:
    """Return the sequence of each new token, (T,) int64."""
    tokens = torch.arange(num_tokens, device=batch.query_starts.device)
    seq_T = torch.searchsorted(batch.query_starts[1:].contiguous(), tokens, right=True)
    return seq_T.clamp_(max=batch.starts_B.shape[0] - 1)


def keys_and_values(kv_2KSD: Tensor, batch: PagedBatch, seq_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return keys and values, (K, T, L, D) each, for queries of `dtype`: for each token those in all pages of sequence
    `seq_T`, in float32 at least."""
    num_seqs, max_pages = batch.page_table_BP.shape
    keys_L = torch.arange(max_pages * batch.page_size, device=seq_T.device)
    slots = slots_of(batch.page_table_BP, batch.page_size, keys_L.expand(num_seqs, -1))
    wide = dtype if dtype == torch.float64 else torch.float32
    k, v = (as_bytes(kv_2KSD[i])[:, slots].view(kv_2KSD.dtype).to(wide)[:, seq_T] for i in (0, 1))
    return k, v
