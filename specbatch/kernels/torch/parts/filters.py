"""Sampling filters for one row at a time, on a CPU. A row gets the bits that `distribution` gives a batch of rows, but
only the filters that it needs are computed. (On a GPU all filters are computed for all rows, because shapes are fixed.)

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PART = 1 << 14


def filtered(logits_V: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Compute probabilities (V,), float64, for a positive temperature; see `distribution`. The logits are finite."""
    wide = logits_V.double()
    # The peak is taken off first: divided by a tiny temperature it would overflow.
    scaled = (wide - wide.max()) / temperature
    if 0 < top_k < scaled.shape[0]:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -torch.inf)
    p = torch.softmax(scaled, dim=-1)
    if top_p < 1:
        p = _most_likely(p, top_p)
        p /= total(p)
    if min_p > 0:
        p = p.masked_fill(p < min_p * p.max(), 0.0)
    return p / total(p)


def total(p_V: Tensor) -> Tensor:
    """Compute the sum in parts that are so short that one thread computes each. Torch divides longer sums among its
    threads, and then bits depend on the number of threads."""
    return torch.stack([part.sum() for part in p_V.split(_PART)]).sum()


def _most_likely(p_V: Tensor, top_p: float) -> Tensor:
    """Keep the tokens that reach `top_p`, in order of probability and then of id, and set the others to 0. Tokens below
    (1 - top_p) / V have less than 1 - top_p together, so the others reach `top_p`, and all tokens are rarely sorted."""
    likely = (p_V >= (1.0 - top_p) / p_V.shape[0]).nonzero()[:, 0]
    kept, reaches = _sorted_prefix(p_V, likely, top_p)
    if not reaches:  # because of a rounding
        kept, _ = _sorted_prefix(p_V, torch.arange(p_V.shape[0]), top_p)
    return torch.zeros_like(p_V).index_copy_(0, kept, p_V[kept])


def _sorted_prefix(p_V: Tensor, ids: Tensor, top_p: float) -> tuple[Tensor, bool]:
    """Return those of `ids` (ascending) that are needed to reach `top_p`, and whether they reach it."""
    ordered, index = torch.sort(p_V[ids], descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    count = int((before < top_p).sum())  # `before` never falls
    return ids[index[:count]], count < len(ids)
