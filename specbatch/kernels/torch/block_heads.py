"""The steps of the heads of block drafters, in plain torch.

Shape suffixes: T branches of all requests (the same number of each request), B requests, P branches of the step before,
I inputs, R size of the state, G = 3 R gates, X inner size, W draft vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbatch.kernels.matrix import Matrix


def gru_step(
    input_TI: Tensor, state_PR: Tensor | None, parents_T: Tensor | None, of_input_GI: Matrix, of_state_GR: Matrix
) -> Tensor:
    """Return the states (T, R) of a GRU without biases after one more input (Cho et al. 2014, in torch's form). The
    gates are reset, update, and candidate.

    `state_PR`: the states before; None: zeros. `parents_T`: the state of these that each branch continues; None: its
    own.
    """
    gates_TG = _times(input_TI, of_input_GI)
    size = gates_TG.shape[1] // 3
    state_TR = input_TI.new_zeros(len(input_TI), size) if state_PR is None else state_PR
    if parents_T is not None:
        state_TR = state_TR[parents_T]
    of_state_TG = _times(state_TR, of_state_GR)
    reset, update = _sigmoid(gates_TG[:, : 2 * size] + of_state_TG[:, : 2 * size]).chunk(2, dim=1)
    candidate = torch.tanh(torch.addcmul(gates_TG[:, 2 * size :], reset, of_state_TG[:, 2 * size :]))
    return torch.lerp(candidate, state_TR, update)


def add_bottleneck(
    logits_BW: Tensor, inner_BX: Tensor, state_TR: Tensor, of_state_XR: Matrix, of_inner_WX: Matrix
) -> Tensor:
    """Return logits (T, W): those of each branch's request, and silu(inner + state S^T) U^T, where S is `of_state_XR`
    and U is `of_inner_WX`."""
    count = len(state_TR) // len(logits_BW)
    if count > 1:
        logits_BW, inner_BX = (x.repeat_interleave(count, dim=0) for x in (logits_BW, inner_BX))
    inner_TX = inner_BX + _times(state_TR, of_state_XR)
    return logits_BW + _times(inner_TX * _sigmoid(inner_TX), of_inner_WX)


def _times(x_TI: Tensor, matrix_OI: Matrix) -> Tensor:
    return F.linear(x_TI, matrix_OI) if isinstance(matrix_OI, Tensor) else matrix_OI(x_TI)


def _sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid. On a CPU torch's own has another formula for the last elements of a tensor, so that the bits
    of a row would depend on the number of rows."""
    return 1.0 / (1.0 + torch.exp(-x))
