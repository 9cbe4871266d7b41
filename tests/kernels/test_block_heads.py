"""The steps of the heads of block drafters, torch and Triton alike, against torch's own GRU and plain products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.batches import CUDA, DEVICE, DTYPES, close, random
from tests.kernels.operations import Ops

pytestmark = [pytest.mark.gpu] if CUDA else []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "num_inputs", "size"), [(1, 24, 5), (5, 70, 32), (20, 24, 33)])
def test_steps_of_a_gru(ops: Ops, dtype: torch.dtype, count: int, num_inputs: int, size: int) -> None:
    gru = torch.nn.GRU(num_inputs, size, bias=False).to(DEVICE, torch.float32)
    of_input, of_state = gru.weight_ih_l0.detach().to(dtype), gru.weight_hh_l0.detach().to(dtype)
    inputs = [random(count, num_inputs, dtype=dtype, seed=i) for i in range(3)]
    parents = torch.arange(count, device=DEVICE).flip(0)
    with torch.no_grad():
        gru.weight_ih_l0.copy_(of_input)
        gru.weight_hh_l0.copy_(of_state)
        state: Tensor | None = None
        expected = torch.zeros(1, count, size, device=DEVICE)
        for i, x in enumerate(inputs):
            order = parents if i == 2 else None
            state = ops.raw.gru_step(x, state, order, of_input, of_state)
            before = expected if order is None else expected[:, order]
            with torch.backends.cudnn.flags(allow_tf32=False):
                expected = gru(x.float()[None], before.contiguous())[1]
            close(state, expected[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "branches", "size", "num_inner", "width"), [(1, 1, 5, 6, 30), (3, 1, 32, 70, 100), (5, 4, 33, 16, 65)]
)
def test_the_bottleneck(
    ops: Ops, dtype: torch.dtype, batch: int, branches: int, size: int, num_inner: int, width: int
) -> None:
    blocks, logits = random(batch, 3, num_inner, dtype=dtype), random(2, batch, width, dtype=dtype, seed=1)
    state = random(batch * branches, size, dtype=dtype, seed=2)
    of_state = random(num_inner, size, dtype=dtype, seed=3) / size**0.5
    of_inner = random(width, num_inner, dtype=dtype, seed=4) / num_inner**0.5
    found = ops.raw.add_bottleneck(logits[1], blocks[:, 2], state, of_state, of_inner)
    request = torch.arange(batch, device=DEVICE).repeat_interleave(branches)
    inner = F.silu(blocks[request, 2].float() + state.float() @ of_state.float().T)
    close(found, logits[1][request].float() + inner @ of_inner.float().T, dtype)
    assert found.dtype == dtype
