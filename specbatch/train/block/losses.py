"""The losses of a block drafter, which compare its distribution with the target's at the same position of the text.

DFlash has a cross entropy. DSpark has a tenth of it, and nine tenths of the total variation distance, whose complement
is the share of sampled drafts that are accepted. Both weigh draft j by exp(-j / gamma): a draft counts only if those
before it are right.

A draft whose right token the draft vocabulary lacks counts as a miss, and nothing learns from it.

Shape suffixes: E hidden size, X state of the head, R drafts to learn, Q rows of the target, N blocks, J drafts of a
block, W draft vocabulary.
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
from specbatch.train.target import FrozenTarget, TargetRows

_LOGITS_AT_ONCE = 2**28  # elements of logits that are computed at once
_KEPT_LOGITS = 2**30  # elements of logits that are kept for the backward pass; others are computed again


# Given draft logits and the target's, both (R, W), and the share of the total variation distance, return the losses
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
    right: TargetRows,
    of: LossSettings,
    compare: Compare,
) -> Losses:
    """Compute the losses of all drafts of a batch. `right`: the target's predictions at `target_rows_Q`. `compare`:
    `loss_of_logits`, or what torch.compile makes of it."""
    lm_head_WE = target.draft_head_WE
    vocab = len(lm_head_WE)
    size = max(_LOGITS_AT_ONCE // vocab, 1)
    kept = len(batch.learn_R) * vocab <= _KEPT_LOGITS
    states_NJX = drafter.head_states(batch.before_NJ, target.embedding_VE)
    states_RX = states_NJX.flatten(0, 1)[batch.drafts_R]
    found = []
    for learn_R, target_R, state_RX in zip(
        *(rows.split(size) for rows in (batch.learn_R, batch.target_R, states_RX)), strict=True
    ):
        inputs = drafter, hidden_QE[learn_R], state_RX, lm_head_WE, right.logits_QW, target_R, of.variation, compare
        if kept or not torch.is_grad_enabled():
            found.append(_of_drafts(*inputs))
        else:
            found.append(checkpoint(_of_drafts, *inputs, use_reentrant=False))
    loss_R, best_R = (torch.cat(parts) for parts in zip(*found, strict=True))
    right_R = right.best_Q[batch.target_R]
    known_R = right_R >= 0
    sums = torch.stack([x.sum() for x in (loss_R * known_R).split(batch.counts)])
    counts = torch.stack([x.sum() for x in known_R.split(batch.counts)])
    weights = sums.new_tensor(of.weights(len(batch.counts)))
    total = (weights * sums).sum() / (weights * counts).sum().clamp(min=weights.min())
    steps = list((sums / counts.clamp(min=1)).unbind())
    return Losses(total, steps, list((best_R == right_R).split(batch.counts)))


def _of_drafts(
    drafter: TrainedBlocks,
    hidden_RE: Tensor,
    state_RX: Tensor,
    lm_head_WE: Tensor,
    target_QW: Tensor,
    target_R: Tensor,
    variation: float,
    compare: Compare,
) -> tuple[Tensor, Tensor]:
    """Return the loss and the most likely token of each draft."""
    logits_RW = drafter.logits(hidden_RE, state_RX, lm_head_WE)
    return compare(logits_RW, target_QW[target_R], variation), logits_RW.detach().argmax(dim=-1)


def loss_of_logits(logits_RW: Tensor, target_RW: Tensor, variation: float) -> Tensor:
    """Return the loss (R,) of draft logits, given the target's. It is most of a step's time where the vocabulary is
    large: without torch.compile it reads and writes the logits of a batch about forty times."""
    wide = torch.promote_types(logits_RW.dtype, torch.float32)
    log_q_RW = torch.log_softmax(logits_RW.to(wide), dim=-1)
    p_RW = torch.softmax(target_RW.to(wide), dim=-1)
    loss_R = log_q_RW.new_zeros(len(log_q_RW))
    if variation < 1:
        loss_R = loss_R - (1 - variation) * (p_RW * log_q_RW).sum(dim=-1)
    if variation > 0:
        loss_R = loss_R + variation * 0.5 * (p_RW - log_q_RW.exp()).abs().sum(dim=-1)
    return loss_R
