"""One-shot sums over GPUs: what one GPU does, when the others have sent their parts already. Two real GPUs add in
`tests/parallel/test_cuda_group_gpu.py`."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from specbatch.kernels import ops_for
from tests.kernels.batches import DEVICE, DTYPES

one_shot = pytest.importorskip("specbatch.kernels.triton.ranks.one_shot")

SIZE = 3
CAPACITY = 3 * one_shot.BLOCK_BYTES


class Memory:
    """Of one GPU, as the kernel divides it."""

    def __init__(self) -> None:
        self.bytes = torch.zeros(one_shot.inbox_bytes(CAPACITY, SIZE), dtype=torch.uint8, device=DEVICE)
        num_data = 2 * SIZE * CAPACITY
        self._data = self.bytes[:num_data].view(2, SIZE, CAPACITY)
        self.flags = self.bytes[num_data:].view(torch.int32).view(2, SIZE, 3)

    def fill(self, numbers: list[int], sender: int, x: Tensor) -> None:
        """What the sender writes, block by block, in the sum with these numbers."""
        flat, size = x.reshape(-1), one_shot.BLOCK_BYTES // x.itemsize
        for i, number in enumerate(numbers[: -(-len(flat) // size)]):
            span = slice(i * size, (i + 1) * size)
            self.part(number % 2, sender, flat)[span] = flat[span]

    def filled(self, numbers: list[int], sender: int, like: Tensor) -> Tensor:
        """What was written, likewise."""
        found, size = torch.empty_like(like).view(-1), one_shot.BLOCK_BYTES // like.itemsize
        for i, number in enumerate(numbers[: -(-len(found) // size)]):
            span = slice(i * size, (i + 1) * size)
            found[span] = self.part(number % 2, sender, found)[span]
        return found.view(like.shape)

    def part(self, half: int, sender: int, like: Tensor) -> Tensor:
        return self._data[half, sender].view(like.dtype)[: like.numel()].view(like.shape)


def inbox_of(rank: int, memories: list[Memory]) -> Any:
    addresses = torch.tensor([memory.bytes.data_ptr() for memory in memories], device=DEVICE)
    return one_shot.Inbox(
        memories[rank].bytes, addresses, torch.zeros(3, dtype=torch.int32, device=DEVICE), rank, CAPACITY
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rank", "alone"), [(0, True), (1, True), (2, True), (1, False)])
def test_sums_in_turns(rank: int, alone: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_shot, "_FEW", 2)
    memories = [Memory() for _ in range(SIZE)]
    inbox = inbox_of(rank, memories)
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
        for other in others:
            memories[rank].fill(numbers, other, xs[other])
        found = torch.empty_like(residual)
        one_shot.one_shot_sum(xs[rank], residual if shape[0] > 1 else None, found, inbox, is_alone=alone)
        expected = (xs[0].float() + xs[1].float() + xs[2].float()).to(dtype)
        assert torch.equal(found, residual + expected if shape[0] > 1 else expected), shape
        for other in others:
            assert torch.equal(memories[other].filled(numbers, rank, xs[rank]), xs[rank])
            for i in range(blocks):
                assert memories[other].flags[numbers[i] % 2, rank, i] == numbers[i]
    assert inbox.counts_K.tolist() == numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", range(SIZE))
def test_gathers_and_scatters_in_turns_with_sums(rank: int, dtype: torch.dtype) -> None:
    """They share the counts of blocks. Rows of parts do not follow each other."""
    memories = [Memory() for _ in range(SIZE)]
    inbox, others, numbers = inbox_of(rank, memories), [i for i in range(SIZE) if i != rank], [0, 0, 0]
    for kind, count in (("gather", 1000), ("scatter", 2050), ("sum", 8), ("scatter", 8), ("gather", 3000)):
        # The part of each sender for each receiver; all are the same but in a scatter.
        parts = torch.randn((SIZE, SIZE, count), device=DEVICE).to(dtype)
        parts = parts if kind == "scatter" else parts[:, :1].expand_as(parts)
        count = min(count, CAPACITY // dtype.itemsize)
        parts = parts[:, :, :count]
        for i in range(-(-count * dtype.itemsize // one_shot.BLOCK_BYTES)):
            numbers[i] += 1
            for other in others:
                memories[rank].flags[numbers[i] % 2, other, i] = numbers[i]
        for other in others:
            memories[rank].fill(numbers, other, parts[other, rank])
        residual, wide = (
            torch.randn(count, device=DEVICE).to(dtype),
            torch.empty(SIZE, count + 8, device=DEVICE).to(dtype),
        )
        out, total = torch.empty_like(residual), sum(parts[i, rank].float() for i in range(SIZE)).to(dtype)  # type: ignore
        if kind == "gather":
            one_shot.one_shot_gather(parts[rank, 0].contiguous(), wide[:, :count], inbox)
            assert torch.equal(wide[:, :count], parts[:, rank])
        elif kind == "scatter":
            wide[:, :count] = parts[rank]
            one_shot.one_shot_scatter(wide[:, :count], residual, out, inbox)
            assert torch.equal(out, residual + total)
        else:
            one_shot.one_shot_sum(parts[rank, 0].contiguous(), None, out, inbox)
            assert torch.equal(out, total)
        for other in others:
            sent = parts[rank, other].contiguous()
            assert torch.equal(memories[other].filled(numbers, rank, sent), sent), (kind, other)
        assert inbox.counts_K.tolist() == numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("two_shot", [False, True])
def test_a_sum_and_its_norm(rank: int, dtype: torch.dtype, two_shot: bool) -> None:
    """Rows of one and of two blocks, after sums in which their blocks took part unequally often."""
    memories = [Memory() for _ in range(SIZE)]
    inbox, ops = inbox_of(rank, memories), ops_for(torch.device("cpu"), dtype)
    others = [i for i in range(SIZE) if i != rank]
    in_block = one_shot.BLOCK_BYTES // dtype.itemsize
    inbox.counts_K.copy_(torch.tensor([4, 7, 7]))
    numbers = [4, 7, 7]
    for shape in ((1, 2 * in_block), (3, in_block), (2, in_block), (1, 2 * in_block)):
        xs = torch.randn((SIZE, *shape), device=DEVICE).to(dtype)
        residual = torch.randn(shape, device=DEVICE).to(dtype)
        weight = torch.randn(shape[1], device=DEVICE).to(dtype)
        row_blocks = shape[1] // in_block
        firsts = range(0, shape[0] * row_blocks, row_blocks)
        numbers = [number + (i < shape[0] * row_blocks) for i, number in enumerate(numbers)]
        expected = residual + (xs[0].float() + xs[1].float() + xs[2].float()).to(dtype)
        for other in others:
            # Rows that another one adds come from there as sums.
            sent = xs[other].clone()
            if two_shot:
                sent[other::SIZE] = expected[other::SIZE]
            memories[rank].fill(numbers, other, sent)
            for i in firsts:
                memories[rank].flags[numbers[i] % 2, other, i] = numbers[i]
        total, normed = torch.empty_like(residual), torch.empty_like(residual)
        assert one_shot.has_whole_blocks(residual)
        one_shot.sum_norm(xs[rank], residual, weight, 0.5, inbox, total, normed, two_shot=two_shot)
        assert torch.equal(total, expected), shape
        assert_close(normed.cpu(), ops.rms_norm(expected.cpu(), weight.cpu(), 0.5), rtol=1e-2, atol=1e-6)
        for other in others:
            for row, i in enumerate(firsts):
                owner = row % SIZE if two_shot else None
                if owner not in (None, rank, other):
                    continue  # nothing is sent to it
                wanted = expected if owner == rank else xs[rank]
                assert torch.equal(memories[other].filled(numbers, rank, xs[rank])[row], wanted[row])
                assert memories[other].flags[numbers[i] % 2, rank, i] == numbers[i]
        assert inbox.counts_K.tolist() == numbers


def _rank(rank: int, size: int, memories: list[Tensor], seed: int) -> None:
    """A process: 60 sums with and without norms, gathers and scatters in turns, each as soon as the one before ends."""
    capacity = 8 * one_shot.BLOCK_BYTES
    addresses, counts = torch.tensor([x.data_ptr() for x in memories]), torch.zeros(8, dtype=torch.int32)
    inbox = one_shot.Inbox(memories[rank], addresses, counts, rank, capacity)
    same, own = random.Random(seed), random.Random(seed * 97 + rank)
    for turn in range(60):
        kind = same.choice(("two_shot", "two_shot", "one_shot", "sum", "gather", "scatter"))
        generator = torch.Generator().manual_seed(1000 * seed + turn)
        row_blocks = same.choice((1, 2))
        shape = (same.randint(1, 8 // row_blocks), 1024 * row_blocks) if "shot" in kind else (same.randint(1, 2048),)
        xs, (residual, weight) = (torch.randn((n, *shape), generator=generator) for n in (size, 2))
        total, out = residual + sum(xs[1:], xs[0]), torch.full_like(residual, torch.nan)
        time.sleep(own.choice((0, 0, 0.01)))
        if "shot" in kind:
            normed = torch.full_like(residual, torch.nan)
            one_shot.sum_norm(xs[rank], residual, weight[0], 0.5, inbox, out, normed, two_shot=kind == "two_shot")
            assert_close(
                normed,
                ops_for(torch.device("cpu"), torch.float32).rms_norm(total, weight[0], 0.5),
                rtol=1e-4,
                atol=1e-5,
            )
        elif kind == "sum":
            one_shot.one_shot_sum(xs[rank], residual, out, inbox)
        elif kind == "gather":
            found = torch.empty_like(xs)
            one_shot.one_shot_gather(xs[rank], found, inbox)
            assert torch.equal(found, xs), turn
            continue
        else:  # what a rank sends to the rank i is its tensor times i + 1
            parts = torch.stack([(i + 1) * xs[rank] for i in range(size)])
            one_shot.one_shot_scatter(parts, residual, out, inbox)
            total = residual + sum((rank + 1) * x for x in xs[1:]) + (rank + 1) * xs[0]
            assert_close(out, total, rtol=1e-5, atol=1e-5)
            continue
        assert torch.equal(out, total), (turn, kind)


@pytest.mark.wide
@pytest.mark.skipif(DEVICE.type == "cuda", reason="GPUs have tests of their own")
@pytest.mark.parametrize("size", [2, 4])
def test_processes_at_the_same_time(size: int) -> None:
    num_bytes = one_shot.inbox_bytes(8 * one_shot.BLOCK_BYTES, size)
    memories = [torch.zeros(num_bytes, dtype=torch.uint8).share_memory_() for _ in range(size)]
    torch.multiprocessing.spawn(_rank, (size, memories, size), nprocs=size)


def test_rows_of_whole_blocks() -> None:
    for size, expected in ((2048, True), (4096, True), (8192, True), (1024, False), (6144, False), (2056, False)):
        assert one_shot.has_whole_blocks(torch.empty(3, size, dtype=torch.bfloat16)) == expected, size
    assert one_shot.has_whole_blocks(torch.empty(3, 1024))
