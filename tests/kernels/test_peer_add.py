"""Sums of what copy engines brought."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.batches import DEVICE, DTYPES

received = pytest.importorskip("specbatch.kernels.triton.ranks.peer_add")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 1000), (2, 4096)], ids=str)
def test_sums_round_as_those_of_one_shot(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, other, residual = torch.randn((3, *shape), device=DEVICE).to(dtype)
    expected = (x.float() + other.float()).to(dtype)
    out = torch.empty_like(x)
    received.add_received(x, other, None, out)
    assert torch.equal(out, expected)
    received.add_received(x, other, residual, out)
    assert torch.equal(out, residual + expected)
