"""One-shot sums over GPUs: what one GPU does, when the others have sent their parts already. Two real GPUs add in
`tests/parallel/test_cuda_group_gpu.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.batches import DEVICE, DTYPES

one_shot = pytest.importorskip("specbatch.kernels.triton.one_shot")

SIZE = 3
CAPACITY = 3 * one_shot.BLOCK_BYTES


class Memory:
    """Of one GPU, as the kernel divides it."""

    def __init__(self) -> None:
        self.bytes = torch.zeros(one_shot.inbox_bytes(CAPACITY, SIZE), dtype=torch.uint8, device=DEVICE)
        num_data = 2 * SIZE * CAPACITY
        self._data = self.bytes[:num_data].view(2, SIZE, CAPACITY)
        self.flags = self.bytes[num_data:].view(torch.int32).view(2, SIZE, 3)

    def part(self, half: int, sender: int, like: Tensor) -> Tensor:
        return self._data[half, sender].view(like.dtype)[: like.numel()].view(like.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rank", "alone"), [(0, True), (1, True), (2, True), (1, False)])
def test_sums_in_turns(rank: int, alone: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "_FEW", 2)
    memories = [Memory() for _ in range(SIZE)]
    addresses = torch.tensor([memory.bytes.data_ptr() for memory in memories], device=DEVICE)
    inbox = one_shot.Inbox(
        memories[rank].bytes, addresses, torch.zeros(3, dtype=torch.int32, device=DEVICE), rank, CAPACITY
    )
    num_in_block = one_shot.BLOCK_BYTES // dtype.itemsize
    others = [i for i in range(SIZE) if i != rank]
    numbers = [0, 0, 0]  # of sums that each block took part in
    for shape in ((1, 8), (2, 1000), (3, 1), (1, 1025), (2, 1024)):
        xs = torch.randn((SIZE, *shape), device=DEVICE).to(dtype)
        residual = torch.randn(shape, device=DEVICE).to(dtype)
        blocks = -(-xs[0].nbytes // one_shot.BLOCK_BYTES)
        for i in range(blocks):
            numbers[i] += 1
            for other in others:
                memories[rank].flags[numbers[i] % 2, other, i] = numbers[i]
                span = slice(i * num_in_block, (i + 1) * num_in_block)
                part = memories[rank].part(numbers[i] % 2, other, xs[other]).view(-1)[span]
                part.copy_(xs[other].view(-1)[span])
        found = torch.empty_like(residual)
        one_shot.one_shot_sum(xs[rank], residual if shape[0] > 1 else None, found, inbox, is_alone=alone)
        expected = (xs[0].float() + xs[1].float() + xs[2].float()).to(dtype)
        assert torch.equal(found, residual + expected if shape[0] > 1 else expected), shape
        for other in others:
            for i in range(blocks):
                span = slice(i * num_in_block, (i + 1) * num_in_block)
                sent = memories[other].part(numbers[i] % 2, rank, xs[rank]).view(-1)[span]
                assert torch.equal(sent, xs[rank].view(-1)[span])
                assert memories[other].flags[numbers[i] % 2, rank, i] == numbers[i]
    assert inbox.counts_K.tolist() == numbers
