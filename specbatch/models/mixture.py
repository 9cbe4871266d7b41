"""A mixture of experts in place of an MLP, on a CPU.

The experts of a batch are computed one after the other, each for the tokens that chose it. A token's outputs are added
in the order of its experts' numbers. So its bits do not depend on the other tokens.

Shape suffixes: T packed tokens, E hidden size, X experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specbatch.models.config import ModelConfig
from specbatch.models.layers import RMSNorm
from specbatch.models.linears.linear import Linear, Residual
from specbatch.models.weight_loader import WeightLoader


class MixtureMLP:
    """See the module's text. `prefix`: the beginning of the names of the layer's tensors."""

    takes_normed = True

    def __init__(self, config: ModelConfig, weights: WeightLoader, prefix: str) -> None:
        moe = config.moe
        assert moe is not None
        self._top_k, self._norm_topk_prob = moe.top_k, moe.norm_topk_prob
        block = f"{prefix}{moe.block}."
        self._router = weights.linear(f"{block}gate")
        self._experts = [
            _Expert(config, weights, f"{block}experts.{number}.", moe.projections) for number in range(moe.num_experts)
        ]
        self._shared: _Expert | None = None
        self._shared_gate: Linear | None = None
        if moe.shared_size:
            names = "gate_proj", "up_proj", "down_proj"
            self._shared = _Expert(config, weights, f"{block}shared_expert.", names)
            self._shared_gate = weights.linear(f"{block}shared_expert_gate")

    def start(self, x: Residual, norm: RMSNorm, next_norm: RMSNorm | None = None) -> Callable[[], Residual]:
        """Compute x + mixture(norm(x)), as `MLP.start` does."""
        y_TE = x.x_TE + self(x.normed(norm))
        return lambda: Residual(y_TE)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """Return mixture(x), (T, E)."""
        weights_TK, experts_TK = route(self._router(x_TE), self._top_k, norm_topk_prob=self._norm_topk_prob)
        y_TE = torch.zeros_like(x_TE)
        for number in experts_TK.unique().tolist():
            token, choice = (experts_TK == number).nonzero(as_tuple=True)
            of_expert = self._experts[number](x_TE[token])
            y_TE.index_add_(0, token, of_expert * weights_TK[token, choice, None])
        if self._shared is not None and self._shared_gate is not None:
            y_TE = y_TE + _sigmoid(self._shared_gate(x_TE)) * self._shared(x_TE)
        return y_TE

    def traceable(self) -> None:
        """See `linears.linear.Layer.traceable`: which experts run depends on the tokens."""
        return


def _sigmoid(logits_T1: Tensor) -> Tensor:
    """Compute a sigmoid as a softmax of two numbers, row by row. `torch.sigmoid` computes the elements at the end of a
    tensor by another formula than the others, so a token's bits would depend on its index."""
    return torch.softmax(torch.nn.functional.pad(logits_T1, (1, 0)), dim=-1)[:, 1:]


class _Expert:
    """Gated feed-forward of one expert."""

    def __init__(self, config: ModelConfig, weights: WeightLoader, prefix: str, names: tuple[str, str, str]) -> None:
        gate, up, down = (f"{prefix}{name}" for name in names)
        self._gated, self._down = weights.gated_linear(gate, up, config.activation), weights.linear(down)

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self._gated.into(self._down, x_TE)


def route(logits_TX: Tensor, top_k: int, *, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """Return the weights (T, K), in the dtype of the logits, and the numbers (T, K) of each token's experts: the most
    probable ones after a softmax in float32 (Mixtral, Jiang et al. 2024). `norm_topk_prob`: weights are divided by
    their sum."""
    wide = torch.promote_types(logits_TX.dtype, torch.float32)
    weights_TK, experts_TK = torch.softmax(logits_TX, dim=-1, dtype=wide).topk(top_k, dim=-1)
    if norm_topk_prob:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK.to(logits_TX.dtype), experts_TK
