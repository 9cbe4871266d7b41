"""The steps of the heads of block drafters, in plain torch.

Shape suffixes: T branches of all requests (the same number of each request), B requests, P branches of the step before,
I inputs, R size of the state, G = 3 R gates, X inner size, W draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gru_step(
    input_TI: Tensor, state_PR: Tensor | None, parents_T: Tensor | None, of_input_GI: Tensor, of_state_GR: Tensor
) -> Tensor:
    """Return the states (T, R) of a GRU without biases after one more input (Cho et al. 2014, in torch's form). The
    gates are reset, update, and candidate.

    `state_PR`: the states before; None: zeros. `parents_T`: the state of these that each branch continues; None: its
    own.
    """
    gates_TG = F.linear(input_TI, of_input_GI)
    size = of_state_GR.shape[1]
    state_TR = input_TI.new_zeros(len(input_TI), size) if state_PR is None else state_PR
    if parents_T is not None:
        state_TR = state_TR[parents_T]
    of_state_TG = F.linear(state_TR, of_state_GR)
    reset, update = torch.sigmoid(gates_TG[:, : 2 * size] + of_state_TG[:, : 2 * size]).chunk(2, dim=1)
    candidate = torch.tanh(torch.addcmul(gates_TG[:, 2 * size :], reset, of_state_TG[:, 2 * size :]))
    return torch.lerp(candidate, state_TR, update)


def add_bottleneck(
    logits_BW: Tensor, inner_BX: Tensor, state_TR: Tensor, of_state_XR: Tensor, of_inner_WX: Tensor
) -> Tensor:
    """Return logits (T, W): those of each branch's request, and silu(inner + state S^T) U^T, where S is `of_state_XR`
    and U is `of_inner_WX`."""
    count = len(state_TR) // len(logits_BW)
    if count > 1:
        logits_BW, inner_BX = (x.repeat_interleave(count, dim=0) for x in (logits_BW, inner_BX))
    inner_TX = F.silu(inner_BX + F.linear(state_TR, of_state_XR))
    return logits_BW + F.linear(inner_TX, of_inner_WX)
