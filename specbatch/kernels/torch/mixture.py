"""Mixtures of experts, in plain torch (Shazeer et al. 2017).

Shape suffixes: T packed tokens, X experts, K experts of a token, E hidden size, I inner features of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.experts import ExpertWeights
from specbatch.kernels.torch.model import act_mul


def route(logits_TX: Tensor, top_k: int, *, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """Return the weights (T, K), in the dtype of the logits, and the numbers (T, K) int32 of each token's experts: the
    most probable ones after a softmax in float32, the best one first (Mixtral, Jiang et al. 2024). Of equal ones the
    expert with the lower number comes first. `norm_topk_prob`: weights are divided by their sum."""
    wide = torch.promote_types(logits_TX.dtype, torch.float32)
    weights_TX, experts_TX = torch.softmax(logits_TX, dim=-1, dtype=wide).sort(dim=-1, descending=True, stable=True)
    weights_TK = weights_TX[:, :top_k]
    if norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK.to(logits_TX.dtype), experts_TX[:, :top_k].int()


def fused_experts(
    x_TE: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    experts: ExpertWeights,
    residual_TE: Tensor | None = None,
) -> Tensor:
    """Return the sum of a token's experts, (T, E). Each expert's output is rounded to x's dtype, multiplied by its
    weight and added in float32, in the order of `experts_TK`. The sum is rounded; then the residual is added, and the
    result is rounded again."""
    num_tokens, top_k = experts_TK.shape
    y_NE = x_TE.new_zeros(num_tokens * top_k, experts.down_XEI.shape[1])
    chosen_N = experts_TK.flatten()
    for number in range(experts.gate_up_XFE.shape[0]):
        index = (chosen_N == number).nonzero()[:, 0]
        if index.numel():
            inner = act_mul(F.linear(x_TE[index // top_k], experts.gate_up_XFE[number]), experts.activation)
            y_NE[index] = F.linear(inner, experts.down_XEI[number])
    return combine(y_NE, weights_TK, residual_TE)


def combine(y_NE: Tensor, weights_TK: Tensor, residual_TE: Tensor | None = None) -> Tensor:
    """Return the last step of `fused_experts`. `y_NE`: the experts' outputs; token t has rows t K to (t + 1) K."""
    num_tokens, top_k = weights_TK.shape
    wide = torch.promote_types(y_NE.dtype, torch.float32)
    y_TKE = y_NE.view(num_tokens, top_k, -1).to(wide) * weights_TK.to(wide)[:, :, None]
    total_TE = y_TKE[:, 0].clone()
    for choice in range(1, top_k):
        total_TE += y_TKE[:, choice]
    y_TE = total_TE.to(y_NE.dtype)
    return y_TE if residual_TE is None else residual_TE + y_TE
