"""The losses of a block drafter, which compare its distribution with the target's at the same position of the text.

DFlash has a cross entropy. DSpark has a tenth of it, and nine tenths of the total variation distance, whose complement
is the share of sampled drafts that are accepted. Both weigh draft j by exp(-j / gamma): a draft counts only if those
before it are right.

Shape suffixes: E hidden size, R drafts to learn, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbatch.train.block.batch import BlockBatch
from specbatch.train.block.drafter import TrainedBlocks
from specbatch.train.learner import Losses
from specbatch.train.target import FrozenTarget

_LOGITS_AT_ONCE = 2**28  # elements of logits that are computed at once
_KEPT_LOGITS = 2**30  # elements of logits that are kept for the backward pass; others are computed again


# Given draft logits and the target's, both (R, V), and the share of the total variation distance, return the losses
# (R,).
Compare = Callable[[Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class LossSettings:
    """The weights in the loss."""

    variation: float  # the share of the total variation distance; the rest is cross entropy
    gamma: float  # draft j has the weight exp(-j / gamma)

    def weights(self, num_drafts: int) -> list[float]:
        """Return the weights of the drafts of a block."""
        return [math.exp(-j / self.gamma) for j in range(num_drafts)]


def losses(
    drafter: TrainedBlocks,
    hidden_QE: Tensor,
    batch: BlockBatch,
    target: FrozenTarget,
    target_TE: Tensor,
    of: LossSettings,
    compare: Compare,
) -> Losses:
    """Compute the losses of all drafts of a batch. `target_TE`: the target's last hidden states. `compare`:
    `loss_of_logits`, or what torch.compile makes of it."""
    lm_head_VE = target.lm_head_VE
    vocab = len(lm_head_VE)
    size = max(_LOGITS_AT_ONCE // vocab, 1)
    kept = len(batch.learn_R) * vocab <= _KEPT_LOGITS
    found = []
    for learn_R, target_R, before_R in zip(
        *(rows.split(size) for rows in (batch.learn_R, batch.target_R, batch.before_R)), strict=True
    ):
        right = target.rows(target_TE, target_R)
        inputs = drafter, hidden_QE[learn_R], before_R, lm_head_VE, right.logits_QW, of.variation, compare
        if kept or not torch.is_grad_enabled():
            loss_R, best_R = _of_drafts(*inputs)
        else:
            loss_R, best_R = checkpoint(_of_drafts, *inputs, use_reentrant=False)
        found.append((loss_R, best_R == right.best_Q))
    loss_R, hit_R = (torch.cat(parts) for parts in zip(*found, strict=True))
    weights = of.weights(len(batch.counts))
    sums = [part.sum() for part in loss_R.split(batch.counts)]
    total = torch.stack([w * x for w, x in zip(weights, sums, strict=True)]).sum()
    total = total / sum(w * n for w, n in zip(weights, batch.counts, strict=True))
    steps = [x / max(n, 1) for x, n in zip(sums, batch.counts, strict=True)]
    return Losses(total, steps, list(hit_R.split(batch.counts)))


def _of_drafts(
    drafter: TrainedBlocks,
    hidden_RE: Tensor,
    before_R: Tensor,
    lm_head_VE: Tensor,
    target_RV: Tensor,
    variation: float,
    compare: Compare,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the most likely token of each draft."""
    logits_RV = drafter.logits(hidden_RE, before_R, lm_head_VE)
    return compare(logits_RV, target_RV, variation), logits_RV.detach().argmax(dim=-1)


def loss_of_logits(logits_RV: Tensor, target_RV: Tensor, variation: float) -> Tensor:
    """Return the loss (R,) of draft logits, given the target's. It is most of a step's time where the vocabulary is
    large: without torch.compile it reads and writes the logits of a batch about forty times."""
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    log_q_RV = torch.log_softmax(logits_RV.to(wide), dim=-1)
    p_RV = torch.softmax(target_RV.to(wide), dim=-1)
    loss_R = log_q_RV.new_zeros(len(log_q_RV))
    if variation < 1:
        loss_R = loss_R - (1 - variation) * (p_RV * log_q_RV).sum(dim=-1)
    if variation > 0:
        loss_R = loss_R + variation * 0.5 * (p_RV - log_q_RV.exp()).abs().sum(dim=-1)
    return loss_R
