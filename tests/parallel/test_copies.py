"""Mailboxes of ranks that are threads. They wait in a loop for a word of memory, as the stream of a GPU does."""

from __future__ import annotations

import ctypes
import random
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specbatch.parallel import copies
from specbatch.parallel.copies import WORDS_BYTES, DispatchBuffer, Mailbox
from specbatch.parallel.cuda import TorchCollectives
from specbatch.parallel.group import Group, in_order
from tests.parallel.threads import on_ranks


class FakeDriver:
    """A stream that does all at once. Waiting gives way to other threads."""

    def cuStreamBatchMemOp_v2(self, stream: int, count: int, operations: int, flags: int) -> int:
        for operation in (copies._Operation * count).from_address(operations):
            word = ctypes.c_uint32.from_address(operation.address)
            if operation.kind == copies._WRITE:
                word.value = operation.value
            end = time.monotonic() + 20
            while word.value != operation.value:
                assert time.monotonic() < end, "nobody writes it"
                time.sleep(0)
        return 0

    def cuMemcpyDtoDAsync_v2(self, to: int, source: int, num_bytes: int, stream: int) -> int:
        assert to != source, "it is there"
        ctypes.memmove(to, source, num_bytes)
        return 0


def test_a_driver_that_refuses_has_no_operations_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_stream", int)
    monkeypatch.setattr(copies, "_driver", FakeDriver)
    memories = [torch.zeros(WORDS_BYTES, dtype=torch.uint8) for _ in range(2)]
    assert copies.has_stream_operations(memories, 1)
    monkeypatch.setattr(copies, "_driver", lambda: SimpleNamespace(cuStreamBatchMemOp_v2=lambda *_: 801))
    assert not copies.has_stream_operations(memories, 0)
    monkeypatch.setattr(copies, "_driver", SimpleNamespace)
    assert not copies.has_stream_operations(memories, 0)


class Copies(TorchCollectives):
    """Only the operations by mailboxes. They add by torch."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def _add_received(  # type: ignore[override]
        self, received: Tensor, own: Tensor, rank: int, residual: Tensor | None, out: Tensor
    ) -> None:
        time.sleep(random.random() / 2000)  # other ranks must not write over what this one still reads
        others = list(received)
        total = in_order(torch.stack([*others[:rank], own.view(-1), *others[rank:]])).view(out.shape)
        out.copy_(total if residual is None else residual + total)


def test_sums_and_exchanges_of_many_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is ahead waits until its mailbox at the other ones is free. Two ranks add otherwise than four."""
    monkeypatch.setattr(copies, "_driver", FakeDriver)
    monkeypatch.setattr(copies, "_stream", int)
    for size in (2, 4):
        _sums_and_exchanges(size)


def _sums_and_exchanges(size: int) -> None:
    memories = [torch.empty(3 * 1024 + 16 + WORDS_BYTES, dtype=torch.uint8) for _ in range(size)]
    for rank in range(size):
        Mailbox(memories, rank).reset()

    def work(group: Group) -> None:
        rank = group.rank
        run, mailbox = Copies(rank, size), Mailbox(memories, rank)
        assert mailbox.capacity == (3 * 1024 + 16 if size == 2 else 1024)
        for turn in range(60):
            count = (4, 16, 64, 256)[turn % 4]
            of_ranks = [
                torch.randn(size, count, generator=torch.Generator().manual_seed(9 * turn + i)) for i in range(size)
            ]
            parts, residual = of_ranks[rank], torch.randn(size * count, generator=torch.Generator().manual_seed(turn))
            out, found = torch.empty(count), torch.empty(size, count)
            run.copied_scatter(parts, residual[:count], out, mailbox)
            assert torch.equal(out, residual[:count] + in_order(torch.stack([part[rank] for part in of_ranks]))), turn
            run.copied_gather(parts[0], found, mailbox)
            assert torch.equal(found, torch.stack([part[0] for part in of_ranks])), turn
            if 4 * size * count > mailbox.capacity * (1 if size == 2 else size):
                continue
            added = torch.empty(size * count)
            for more in (residual, None):
                run.copied(parts.view(-1), more, added, mailbox)
                total = in_order(torch.stack([part.view(-1) for part in of_ranks]))
                assert torch.equal(added, total if more is None else more + total), turn

    on_ranks(size, work)


def test_tokens_of_all_ranks_come_together_in_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is ahead waits until its place in the buffers of the others is free. What a rank writes to its own
    place is not copied."""
    monkeypatch.setattr(copies, "_driver", FakeDriver)
    monkeypatch.setattr(copies, "_stream", int)
    for size in (2, 4):
        memories = [torch.empty(size * 1024 + 16 + WORDS_BYTES, dtype=torch.uint8) for _ in range(size)]
        for rank in range(size):
            DispatchBuffer(memories, rank).reset()
        on_ranks(size, partial(_dispatches, memories))


def _dispatches(memories: list[Tensor], group: Group) -> None:
    rank, size = group.rank, len(memories)
    buffer = DispatchBuffer(memories, rank)
    assert buffer.capacity == 1024
    for turn in range(60):
        shape = ((1, 4), (2, 8), (8, 8), (16, 16))[turn % 4]
        of_ranks = [torch.randn(shape, generator=torch.Generator().manual_seed(9 * turn + i)) for i in range(size)]
        x = of_ranks[rank]
        if turn % 3:
            place = buffer.own_place(x)
            assert place.shape == shape
            x = place.copy_(x)
        found = buffer.gather(x).view(size, *shape)
        time.sleep(random.random() / 2000)  # other ranks must not write over what this one still reads
        assert torch.equal(found, torch.stack(of_ranks)), turn
        assert x is of_ranks[rank] or found[rank].data_ptr() == x.data_ptr()
        buffer.release()
