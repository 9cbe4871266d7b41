"""Sums of what copy engines brought."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.batches import DEVICE, DTYPES

received = pytest.importorskip("specbatch.kernels.triton.ranks.peer_add")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 1000), (2, 4096)], ids=str)
def test_sums_round_as_those_of_one_shot(shape: tuple[int, int], dtype: torch.dtype) -> None:
    *parts, residual = torch.randn((5, *shape), device=DEVICE).to(dtype)
    for size in (2, 4):
        expected = parts[0].float()
        for part in parts[1:size]:
            expected = expected + part.float()
        for rank in range(size):
            others = torch.stack([part.view(-1) for i, part in enumerate(parts[:size]) if i != rank])
            out = torch.empty_like(residual)
            received.add_received(others, parts[rank], rank, None, out)
            assert torch.equal(out, expected.to(dtype)), (size, rank)
            received.add_received(others, parts[rank], rank, residual, out)
            assert torch.equal(out, residual + expected.to(dtype)), (size, rank)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("count", [8, 5000])
def test_parts_are_added_in_order(count: int, dtype: torch.dtype) -> None:
    *parts, residual = torch.randn((5, count), device=DEVICE, dtype=torch.float64).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    expected = (((parts[0].to(wide) + parts[1].to(wide)) + parts[2].to(wide)) + parts[3].to(wide)).to(dtype)
    out = torch.empty_like(residual)
    received.add_parts(torch.stack(parts), None, out)
    assert torch.equal(out, expected)
    received.add_parts(torch.stack(parts), residual, out)
    assert torch.equal(out, residual + expected)
