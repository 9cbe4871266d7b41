"""Random numbers, sampling and draws, in plain torch.

On CUDA every function has fixed output shapes, and the host reads nothing, so a whole round can be captured in one CUDA
graph. On a CPU, only the filters that a row needs are computed.

Shape suffixes, here and in `acceptance`, `tree` and `ngram`: R rows of logits, V vocabulary, W draft vocabulary (of
probabilities) or words (of masks), B sequences, N tree nodes, D = N - 1 drafts of a chain, K = topk, C candidates, S
request indices, L longest token list.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specbatch.batch import LOWEST_LOGIT, NO_TOKEN
from specbatch.kernels.torch.parts.filters import filtered

_MASK32 = 0xFFFFFFFF
_MAX_BLOCK = 256  # the largest block of a vocabulary, a power of 2; torch vectorises the maximum of a block


def finite_peak(peak_R: Tensor) -> Tensor:
    """Return (R,) bool: whether rows of logits with these largest values (NaN if one is NaN) are *finite*. They are if
    they have no NaN and no +inf, and not all of them are masked. A single -inf is legal: it is a token that may not
    come."""
    return is_possible(peak_R) & (peak_R < torch.inf)


def is_possible(logits: Tensor) -> Tensor:
    """Return whether logits are not masked. They are compared in float32, because bfloat16 would round the bound."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) > LOWEST_LOGIT


def argmax(logits_RV: Tensor, otherwise: int = 0) -> Tensor:
    """Return (R,) int64: the lowest index among the largest values of each row; `otherwise` for rows that are not
    finite."""
    peak, best, _, _ = _blockwise_max(logits_RV)
    return torch.where(finite_peak(peak), best, otherwise)


def argmax_and_margin(logits_RV: Tensor, otherwise: int = 0) -> tuple[Tensor, Tensor]:
    """Return `argmax`, and its *margin*, (R,) float32: the difference of the largest and the second largest value.
    Logits in bfloat16 and float16 are subtracted in float32. The margin is infinite if there is no second value, or if
    the row is not finite."""
    peak, best, peaks_RC, block_RK = _blockwise_max(logits_RV)
    block_size = block_RK.shape[1]
    block_RK.scatter_(1, best[:, None] % block_size, -torch.inf)
    second = peaks_RC.scatter(1, best[:, None] // block_size, block_RK.amax(dim=-1, keepdim=True)).amax(dim=-1)
    wide = torch.promote_types(peak.dtype, torch.float32)
    is_finite = finite_peak(peak)
    margin = torch.where(is_finite & is_possible(second), peak.to(wide) - second.to(wide), torch.inf)
    return torch.where(is_finite, best, otherwise), margin.float()


def _blockwise_max(logits_RV: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return for each row its largest value and the lowest index of it, the largest values of its C blocks, and a copy
    of the K values of the block with the largest. On a CPU this takes a fifth of the time of `max` with an index."""
    blocks_RCK = logits_RV.unflatten(1, (-1, math.gcd(logits_RV.shape[1], _MAX_BLOCK)))
    peaks_RC = blocks_RCK.amax(dim=-1)
    block_R1 = peaks_RC.max(dim=-1, keepdim=True).indices
    block_size = blocks_RCK.shape[2]
    block_RK = blocks_RCK.take_along_dim(block_R1[:, :, None], dim=1)[:, 0]
    peak, offset = block_RK.max(dim=-1)
    return peak, block_R1[:, 0] * block_size + offset, peaks_RC, block_RK


def uniform(seed_R: Tensor, stream_R: Tensor, sample_R: Tensor, position_R: Tensor, purpose: int) -> Tensor:
    """Return draws (R,) float64 from [0, 1) with 53 bits, by Philox4x32-10 (Salmon et al., SC 2011); see `draft.rng`.

    All arguments are int64 and broadcast against each other; 64-bit seeds and streams past 2^63 - 1 are held as
    negative numbers. `purpose` is a `draft.rng.Draw`.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(
        position_R & _MASK32, (sample_R << 8 | purpose) & _MASK32, stream_R & _MASK32, stream_R >> 32 & _MASK32
    )
    k0, k1 = seed_R & _MASK32, seed_R >> 32 & _MASK32
    for _ in range(10):
        high0, low0 = _multiply32(c0, 0xD2511F53)
        high1, low1 = _multiply32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return (c0 << 21 | c1 >> 11).double() * 2.0**-53


def _multiply32(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a product of 32-bit numbers. A product past 2^63 - 1 is held as a negative
    number, with the same bits."""
    product = x * factor
    return product >> 32 & _MASK32, product & _MASK32


def distribution(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Compute probabilities (R, V), float32 (on a CPU float64), after temperature, top-k (0: off), top-p (1: off) and
    min-p (0: off), in this order. Each filter applies to the tokens that the one before it has left. For temperature 0
    the argmax has probability 1. A row is NaN if its logits are not finite.

    Top-k keeps all tokens that tie with the k-th. Top-p keeps the smallest set that reaches p; of equal tokens the
    lower id comes first.
    """
    if logits_RV.device.type == "cpu":
        params = zip(*(values.tolist() for values in (temperature_R, top_k_R, top_p_R, min_p_R)), strict=True)
        best = argmax(logits_RV, NO_TOKEN).tolist()
        return torch.stack([_one_row(*row) for row in zip(logits_RV, best, params, strict=True)])
    return distributions(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R).float()


def _one_row(logits_V: Tensor, best: int, params: tuple[float, int, float, float]) -> Tensor:
    """Compute `distribution` for one row, on a CPU. `best`: the row's argmax."""
    if best == NO_TOKEN:
        return torch.full_like(logits_V, torch.nan, dtype=torch.float64)
    if params[0] > 0:
        return filtered(logits_V, *params)
    one_hot = torch.zeros_like(logits_V, dtype=torch.float64)
    one_hot[best] = 1.0
    return one_hot


def distributions(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> Tensor:
    """Compute `distribution` in float64, by the same operations for all rows, so that a CUDA graph can hold it."""
    vocab = logits_RV.shape[1]
    greedy_R1 = (temperature_R == 0)[:, None]
    wide = logits_RV.double()
    peak = wide.amax(dim=-1, keepdim=True)
    # The peak is taken off first: divided by a tiny temperature it would overflow.
    scaled = (wide - peak) / torch.where(greedy_R1, 1.0, temperature_R[:, None].double())
    ordered = scaled.sort(dim=-1, descending=True).values
    kth = ordered.gather(1, (top_k_R.long()[:, None] - 1).clamp(0, vocab - 1))
    drop = (scaled < kth) & ((top_k_R > 0) & (top_k_R < vocab))[:, None]
    p = torch.softmax(scaled.masked_fill(drop, -torch.inf), dim=-1)

    ordered, index = p.sort(dim=-1, descending=True, stable=True)
    top_p = top_p_R[:, None].double()
    beyond = (ordered.cumsum(-1) - ordered >= top_p) & (top_p < 1)
    p = p.masked_fill(torch.zeros_like(beyond).scatter(1, index, beyond), 0.0)
    p = torch.where(top_p < 1, p / p.sum(dim=-1, keepdim=True), p)

    p = p.masked_fill(p < min_p_R[:, None].double() * p.amax(dim=-1, keepdim=True), 0.0)
    p = p / p.sum(dim=-1, keepdim=True)
    one_hot = torch.zeros_like(p).scatter(1, argmax(logits_RV)[:, None], 1.0)
    return torch.where(finite_peak(peak), torch.where(greedy_R1, one_hot, p), torch.nan)


def draw(p_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return (R,) int64: the token at quantile u in [0, 1) of each row's (unnormalised) probabilities, by ascending id.
    It never has probability zero. For a row of NaN it is token 0. `uniform_R` is float64."""
    cdf = p_RV.double().cumsum(-1)
    if cdf.device.type == "cpu":
        token = torch.searchsorted(cdf, uniform_R[:, None] * cdf[:, -1:], right=True)[:, 0]
        if bool((token < p_RV.shape[1]).all()):
            return token
    positive = p_RV > 0
    # The token is the first one after the quantile. It is not found by binary search, because a parallel sum can fall
    # by a rounding.
    hit = positive & (cdf > uniform_R[:, None] * cdf[:, -1:])
    ids = torch.arange(p_RV.shape[1], device=p_RV.device)
    last = torch.where(positive, ids, 0).amax(dim=-1)  # the token if u * total is rounded up to the total
    return torch.where(hit, ids, last[:, None]).amin(dim=-1)


def sample(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """Return (R,) int64: the argmax if the temperature is 0, else the token at quantile u (float64) of `distribution`,
    by ascending id. It never has probability zero. It is NO_TOKEN if the logits are not finite."""
    best = argmax(logits_RV, NO_TOKEN)
    if logits_RV.device.type == "cpu":
        tokens = best.clone()
        for row in ((temperature_R > 0) & (best != NO_TOKEN)).nonzero()[:, 0].tolist():
            temperature, top_p, min_p = (float(values[row]) for values in (temperature_R, top_p_R, min_p_R))
            p_V = filtered(logits_RV[row], temperature, int(top_k_R[row]), top_p, min_p)
            tokens[row] = draw(p_V[None], uniform_R[row : row + 1])[0]
        return tokens
    p = distributions(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    return torch.where((temperature_R == 0) | (best == NO_TOKEN), best, draw(p, uniform_R))
