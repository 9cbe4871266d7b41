"""Attention of groups of sequences over the first pages that they share, in plain torch.

Shape suffixes as in `model.py`; G groups, P parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.batch import PagedBatch, PrefixGroups, PrefixParts
from specbatch.kernels.torch.attention import keys_and_values, sequence_of_tokens


def attend_prefixes(
    q_THD: Tensor,
    kv_2KSD: Tensor,
    batch: PagedBatch,
    scale: float,
    num_parts: int = 1,
    soft_cap: float | None = None,
) -> PrefixParts:
    """Compute attention of each query of a group to the tokens that its group shares, in `num_parts` parts that
    `attend` merges. The keys are found by the pages of the group's first sequence. Here the first part has all of
    them."""
    num_tokens, num_heads, head_dim = q_THD.shape
    assert batch.groups is not None
    group = num_heads // kv_2KSD.shape[1]
    first_B, tokens_B = _firsts(batch.groups)
    seq_T = sequence_of_tokens(batch, num_tokens)
    k, v = keys_and_values(kv_2KSD, batch, first_B[seq_T], q_THD.dtype)
    visible_TL = torch.arange(k.shape[2], device=q_THD.device) < tokens_B[seq_T][:, None]
    q = q_THD.to(k.dtype).view(num_tokens, -1, group, head_dim).transpose(0, 1)
    scores = torch.einsum("ktgd,ktld->ktgl", q, k) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    scores = scores.masked_fill(~visible_TL[None, :, None], -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(peak == -torch.inf, 0.0, peak))
    sums = q.new_zeros((num_parts, num_tokens, num_heads, head_dim))
    sums[0] = torch.einsum("ktgl,ktld->ktgd", weights, v).transpose(0, 1).reshape(num_tokens, num_heads, head_dim)
    found = q.new_zeros((num_parts, num_tokens, num_heads, 2))
    found[..., 0] = -torch.inf
    found[0] = torch.cat((peak, weights.sum(-1, keepdim=True)), -1).transpose(0, 1).reshape(num_tokens, num_heads, 2)
    return PrefixParts(sums, found)


def _firsts(groups: PrefixGroups) -> tuple[Tensor, Tensor]:
    """Return for each sequence the first sequence of its group (any, if it is in no group), and the number of shared
    tokens."""
    ends_G = groups.sizes_G.cumsum(0)
    index_B = torch.arange(len(groups.members_B), device=ends_G.device)
    group_B = torch.searchsorted(ends_G, index_B, right=True).clamp(max=len(ends_G) - 1)
    # Values that belong to no member are written to one additional line.
    member_B = torch.where(index_B < ends_G[-1], groups.members_B, len(index_B)).long()
    first_B = groups.members_B[groups.firsts_G[group_B].clamp(max=len(index_B) - 1)].long()
    zeros = torch.zeros(len(index_B) + 1, dtype=torch.int64, device=ends_G.device)
    found_B = zeros.index_copy(0, member_B, first_B)[:-1]
    return found_B, zeros.index_copy(0, member_B, groups.tokens_G[group_B].long())[:-1]
