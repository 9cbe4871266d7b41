"""Training-time test (EAGLE-3, Li et al. 2025): the head is trained on its own output, which is its input when it
drafts.

Row t of a batch is the chain that drafts after token t + 1. Step 0 reads the pair (token t + 1, target's feature of t)
at position t and sees the pairs of all positions up to t, as draft-extend computes them. Step j reads (token t + 1 + j,
the chain's own output of step j - 1) at position t + j, and sees those same pairs and what steps 1 .. j of *its own
chain* made: a causal triangle and j diagonals. The token that step j predicts is t + 2 + j.

Shape suffixes: B sequences, L padded length, E hidden size, F = 3 * E features, W draft vocabulary, H query heads, K
key/value heads, D head dimension, R rows to learn, Q rows of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specbatch.train.eagle.head import DraftHead
from specbatch.train.learner import Losses
from specbatch.train.target import TargetRows

STEP_DECAY = 0.8  # the weight of step j's loss is 0.8 ** j, as in the authors' code
_KEPT_LOGITS = 2**30  # float32 elements of logits that are kept for the backward pass; others are computed again


@dataclass(frozen=True)
class StepRows:
    """The chains that learn at one step: rows of (B * L), and the rows of the target that hold the right answer."""

    rows_R: Tensor
    target_R: Tensor


def unroll(
    head: DraftHead,
    embedding_VE: Tensor,
    tokens_BL: Tensor,
    features_BLF: Tensor,
    tables: tuple[Tensor, Tensor],
    num_steps: int,
) -> list[Tensor]:
    """Compute the hidden states (B, L, E) of every step, before the final norm. `tables`: cos and sin for L + num_steps
    - 1 positions or more. Chains that run past the end of their row read token 0 there."""
    length = tokens_BL.shape[1]
    # The residual stream keeps the width of the parameters, float32 in training: seven steps add up in it.
    wide = head.fc.weight.dtype
    hidden = head.fc(features_BLF.to(wide)).to(wide)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    out = []
    for j in range(num_steps):
        tokens = F.pad(tokens_BL[:, 1 + j :], (0, min(1 + j, length)))
        cos, sin = (table[j : j + length] for table in tables)
        q, k, v = head.midlayer.project(embedding_VE[tokens], hidden, cos, sin)
        keys.append(k)
        values.append(v)
        hidden = head.midlayer.finish(hidden, attend(q, keys, values))
        out.append(hidden)
    return out


def attend(q_BHLD: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Compute step j's attention (B, H, L, D) over `keys` and `values` of steps 0 .. j, (B, K, L, D) each: it is causal
    over step 0, and the diagonal of the other steps.

    Later steps are one call of fused attention over all keys with a mask. It computes j L^2 products that are not used,
    but it keeps no L^2 tensor and needs no second softmax to merge, and the head is one layer.
    """
    length = q_BHLD.shape[2]
    group = q_BHLD.shape[1] // keys[0].shape[1]
    # Repeated, not enable_gqa: that has no fused kernel with a mask.
    k, v = (torch.cat(list(parts), dim=2).repeat_interleave(group, dim=1) for parts in (keys, values))
    if len(keys) == 1:
        return F.scaled_dot_product_attention(q_BHLD, k, v, is_causal=True)
    eye = torch.eye(length, dtype=torch.bool, device=k.device)
    causal = torch.ones(length, length, dtype=torch.bool, device=k.device).tril()
    mask = torch.cat([causal, *[eye] * (len(keys) - 1)], dim=1)
    return F.scaled_dot_product_attention(q_BHLD, k, v, mask)


def step_weights(num_steps: int) -> list[float]:
    """Return the weight of each step's loss."""
    return [STEP_DECAY**j for j in range(num_steps)]


def losses(head: DraftHead, hidden: Sequence[Tensor], rows: Sequence[StepRows], target: TargetRows) -> Losses:
    """Compute the cross entropy of every step against the target's distribution over the draft vocabulary, and the
    weighted mean of the steps.

    Rows whose best token the draft vocabulary lacks are left out of the loss, as in the authors' code, and count as
    misses.
    """
    kept = sum(step.rows_R.shape[0] for step in rows) * head.lm_head.out_features <= _KEPT_LOGITS
    steps, hits = [], []
    for hidden_BLE, step in zip(hidden, rows, strict=True):
        hidden_RE = hidden_BLE.flatten(0, 1)[step.rows_R]
        target_RW, best_R = target.logits_QW[step.target_R], target.best_Q[step.target_R]
        if kept or not torch.is_grad_enabled():
            loss, hit_R = _step_loss(head, hidden_RE, target_RW, best_R)
        else:
            loss, hit_R = checkpoint(_step_loss, head, hidden_RE, target_RW, best_R, use_reentrant=False)
        steps.append(loss)
        hits.append(hit_R)
    weights = step_weights(len(steps))
    total = torch.stack([w * loss for w, loss in zip(weights, steps, strict=True)]).sum() / sum(weights)
    return Losses(total, steps, hits)


def _step_loss(head: DraftHead, hidden_RE: Tensor, target_RW: Tensor, best_R: Tensor) -> tuple[Tensor, Tensor]:
    logits_RW = head.logits(hidden_RE)
    wide = torch.promote_types(logits_RW.dtype, torch.float32)
    log_q_RW = torch.log_softmax(logits_RW.to(wide), dim=-1)
    p_RW = torch.softmax(target_RW.to(wide), dim=-1)
    known_R = best_R >= 0
    loss_R = -(p_RW * log_q_RW).sum(dim=-1)
    loss = torch.where(known_R, loss_R, 0).sum() / known_R.sum().clamp(min=1)
    return loss, logits_RW.detach().argmax(dim=-1) == best_R
