"""Log-probabilities of chosen and of the most likely tokens.

Shape suffixes as in `sampling.py`; T rows of logits, R selected rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.kernels.torch.sampling import argmax

_PART_ROWS = 32  # rows computed at once, whose log-probabilities of the whole vocabulary are in memory


def logprobs(logits_TV: Tensor, index_R: Tensor, tokens_R: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Compute natural-log probabilities of rows `index_R` (int64) of the logits, before temperature and filters.

    Return values (R, 1 + K) in float32 (in float64 for float64 logits): those of `tokens_R` (int64), and those of the K
    most likely tokens, the most likely first. Also return these tokens' ids (R, K), int64. K is `num_top`, or V if that
    is less. Of equal logits the lower id comes first, for every K.
    """
    num_top = min(num_top, logits_TV.shape[1])
    values, ids = [], []
    for index, tokens in zip(index_R.split(_PART_ROWS), tokens_R.split(_PART_ROWS), strict=True):
        logits = logits_TV[index]
        logprobs_RV = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        top = _most_likely(logits, num_top) if num_top > 1 else argmax(logits)[:, None][:, :num_top]
        values.append(logprobs_RV.gather(1, torch.cat((tokens[:, None], top), dim=1)))
        ids.append(top)
    return torch.cat(values), torch.cat(ids)


def _most_likely(logits_RV: Tensor, num_top: int) -> Tensor:
    """Return the ids (R, K) of the most likely tokens. torch.topk alone does not define which of equal logits it takes,
    and in which order."""
    if logits_RV.device.type == "cpu":
        values, ids = logits_RV.topk(num_top, dim=-1)
        if bool(((logits_RV >= values[:, -1:]).sum(dim=1) == num_top).all()):  # no equal logit is left out
            ids = ids.sort(dim=1).values
            return ids.gather(1, logits_RV.gather(1, ids).sort(dim=1, descending=True, stable=True).indices)
    # This has fixed shapes, as CUDA graphs need. The Triton kernels are faster.
    return logits_RV.sort(dim=1, descending=True, stable=True).indices[:, :num_top]
