"""Sampling: from logits to a distribution, and to a token.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.kernels.torch.sampling import finite_peak
from specbatch.logprobs import TokenLogprob
from specbatch.types import Margin, SamplingParams

_PART = 1 << 14


def distribution(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Compute probabilities (V,), float64, after temperature, top-k, top-p and min-p, in this order (each on the
    distribution that the one before it left, as in transformers). `params.temperature` is positive.

    Top-k keeps all tokens that tie with the k-th. Top-p keeps the smallest set that reaches p; of equal tokens the
    lower id comes first.

    All probabilities are NaN if the logits are not finite.
    """
    wide = logits_V.double()
    peak = wide.max()
    if not finite_peak(peak):
        return torch.full_like(wide, torch.nan)
    # The peak is taken off first: divided by a tiny temperature it would overflow.
    scaled = (wide - peak) / params.temperature
    if 0 < params.top_k < scaled.shape[0]:
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -torch.inf)
    p = torch.softmax(scaled, dim=-1)
    if params.top_p < 1:
        ordered, index = torch.sort(p, descending=True, stable=True)
        beyond = ordered.cumsum(0) - ordered >= params.top_p
        p[index[beyond]] = 0.0
        p /= _total(p)
    if params.min_p > 0:
        p = p.masked_fill(p < params.min_p * p.max(), 0.0)
    return p / _total(p)


def _total(p_V: Tensor) -> Tensor:
    """Compute the sum in parts that are so short that one thread computes each. Torch divides longer sums among its
    threads, and then bits depend on the number of threads."""
    return torch.stack([part.sum() for part in p_V.split(_PART)]).sum()


def is_broken(p_V: Tensor) -> bool:
    """Return whether the logits of this distribution were not finite."""
    return bool(p_V[0].isnan())


def draw(p_V: Tensor, u: float) -> int:
    """Return the token at quantile `u` in [0, 1) of (unnormalised) probabilities. It never has probability zero."""
    cdf = p_V.cumsum(0)
    token = int(torch.searchsorted(cdf, u * float(cdf[-1]), right=True))
    if token < p_V.shape[0]:
        return token
    return int(torch.nonzero(p_V)[-1])  # reached if u * total is rounded up to the total


def margin_of(logits_V: Tensor, position: int) -> Margin:
    """Return the margin of the token at `position`: the difference of the two largest logits."""
    first, second = sorted(logits_V.tolist(), reverse=True)[:2]
    return Margin(first - second, position)


def token_logprob(logits_V: Tensor, token: int, num_top: int) -> TokenLogprob:
    """Compute the log-probability of `token` and of the `num_top` most likely tokens, before temperature and
    filters."""
    logprobs = torch.log_softmax(logits_V, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, ids = logprobs.topk(min(num_top, logprobs.shape[0]))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)
