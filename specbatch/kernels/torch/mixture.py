"""Mixtures of experts, in plain torch (Shazeer et al. 2017).

Shape suffixes: T packed tokens, X experts, K experts of a token, G groups of experts, or of inputs that share a scale,
E hidden size, O output features, I input features or inner features of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.experts import ExpertWeights, Routing
from specbatch.kernels.torch.fp8 import dequantise_fp8
from specbatch.kernels.torch.model import act_mul, rms_norm
from specbatch.kernels.torch.parts import mxfp4


def route(logits_TX: Tensor, routing: Routing, correction_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the weights (T, K) and the numbers (T, K) int32 of each token's experts, as `Routing` says, computed in
    float32 at least. Weights of a softmax have the dtype of the logits, those of a sigmoid stay wide."""
    wide_TX = logits_TX.to(torch.promote_types(logits_TX.dtype, torch.float32))
    scores_TX = wide_TX
    if routing.scoring == "softmax":
        scores_TX = torch.softmax(wide_TX, dim=-1)
    elif routing.scoring == "sigmoid":
        scores_TX = row_sigmoid(wide_TX)
    choice_TX = scores_TX if correction_X is None else scores_TX + correction_X
    if routing.num_groups > 1:
        choice_TX = _of_best_groups(choice_TX, routing)
    experts_TK = _highest(choice_TX, routing.top_k)
    weights_TK = scores_TX.gather(1, experts_TK)
    if routing.scoring == "softmax_of_chosen":
        weights_TK = torch.softmax(weights_TK, dim=-1)
    elif routing.norm_topk_prob:
        # The second term only keeps sigmoids that are all 0 from becoming NaN.
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
    if routing.scale != 1.0:
        weights_TK = weights_TK * routing.scale
    return weights_TK if routing.scoring == "sigmoid" else weights_TK.to(logits_TX.dtype), experts_TK.int()


def route_and_norm(
    logits_TX: Tensor,
    routing: Routing,
    correction_X: Tensor | None,
    x_TE: Tensor,
    norm_weight_E: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `route`'s weights and numbers, and rms_norm(x), (T, E)."""
    return *route(logits_TX, routing, correction_X), rms_norm(x_TE, norm_weight_E, eps)


def row_sigmoid(logits: Tensor) -> Tensor:
    """Compute each sigmoid as a softmax of two numbers. `torch.sigmoid` computes the elements at the end of a tensor by
    another formula than the others, so a token's bits would depend on its index."""
    return torch.softmax(torch.stack((torch.zeros_like(logits), logits), dim=-1), dim=-1)[..., 1]


def _of_best_groups(scores_TX: Tensor, routing: Routing) -> Tensor:
    """Return the scores, with -inf for experts of groups that are left out."""
    num_tokens, num_experts = scores_TX.shape
    scores_TGX = scores_TX.view(num_tokens, routing.num_groups, num_experts // routing.num_groups)
    sums_TG = scores_TGX.topk(2, dim=-1).values.sum(dim=-1)
    is_left_TG = torch.zeros_like(sums_TG, dtype=torch.bool)
    is_left_TG.scatter_(1, _highest(sums_TG, routing.topk_groups), True)
    return scores_TGX.masked_fill(~is_left_TG.unsqueeze(-1), -torch.inf).view(num_tokens, num_experts)


def _highest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the largest numbers of each row. Of equal ones, the lowest index comes first."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def fused_experts(
    x_TE: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    experts: ExpertWeights,
    residual_TE: Tensor | None = None,
) -> Tensor:
    """Return the sum of a token's experts, (T, E). Each expert's output is rounded to x's dtype, multiplied by its
    weight and added in float32, in the order of `experts_TK`. The sum is rounded; then the residual is added, and the
    result is rounded again. Experts of other ranks are left out."""
    num_tokens, top_k = experts_TK.shape
    y_NE = x_TE.new_zeros(num_tokens * top_k, experts.down_XEI.shape[1])
    chosen_N = experts_TK.flatten() - experts.first
    for number in range(experts.gate_up_XFE.shape[0]):
        index = (chosen_N == number).nonzero()[:, 0]
        if index.numel():
            gate_up = experts.gate_up_XFE, experts.gate_up_scales_XFG, experts.gate_up_bias_XF
            down = experts.down_XEI, experts.down_scales_XEG, experts.down_bias_XE
            inner = act_mul(_linear(x_TE[index // top_k], *gate_up, number), experts.activation)
            y_NE[index] = _linear(inner, *down, number)
    if experts.total is not None:  # a weight that is NaN must not reach what is not here
        is_here_N = (chosen_N >= 0) & (chosen_N < experts.gate_up_XFE.shape[0])
        weights_TK = weights_TK.masked_fill(~is_here_N.view_as(weights_TK), 0.0)
    return combine(y_NE, weights_TK, residual_TE)


def _linear(
    x_TI: Tensor, weights_XOI: Tensor, scales_XOG: Tensor | None, biases_XO: Tensor | None, number: int
) -> Tensor:
    """Return x times the weight of one expert, plus its bias. x is not quantised. An FP8 number times its scale is no
    number of x's dtype, so it stays wide."""
    weight_OI, bias_O = weights_XOI[number], None if biases_XO is None else biases_XO[number]
    if scales_XOG is None:
        return F.linear(x_TI, weight_OI, bias_O)
    if weight_OI.dtype == torch.uint8:
        return F.linear(x_TI, mxfp4.dequantise(weight_OI, scales_XOG[number], x_TI.dtype), bias_O)
    wide = torch.promote_types(x_TI.dtype, torch.float32)
    weight_OI = dequantise_fp8(weight_OI, scales_XOG[number]).to(wide)
    return F.linear(x_TI.to(wide), weight_OI, None if bias_O is None else bias_O.to(wide)).to(x_TI.dtype)


def combine(y_NE: Tensor, weights_TK: Tensor, residual_TE: Tensor | None = None) -> Tensor:
    """Return the last step of `fused_experts`. `y_NE`: the experts' outputs; token t has rows t K to (t + 1) K."""
    num_tokens, top_k = weights_TK.shape
    wide = torch.promote_types(y_NE.dtype, torch.float32)
    y_TKE = y_NE.view(num_tokens, top_k, y_NE.shape[1]).to(wide) * weights_TK.to(wide)[:, :, None]
    total_TE = y_TKE[:, 0].clone()
    for choice in range(1, top_k):
        total_TE += y_TKE[:, choice]
    y_TE = total_TE.to(y_NE.dtype)
    return y_TE if residual_TE is None else residual_TE + y_TE
