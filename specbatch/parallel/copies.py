"""Sums and exchanges of GPUs by copy engines. No multiprocessor sends or waits, so all of them can compute another
pass.

Each GPU copies its tensors into the mailboxes of the others, and reads the tensors that came into its own. A kernel
that waits would need a multiprocessor, and large GEMMs hold all of them from beginning to end. Here the stream waits
for a word that another GPU writes (memory operations of streams, `cuStreamBatchMemOp` of the CUDA driver).

A word is written after all earlier writes of the stream are visible to the other GPU (the driver's default is a fence
of the system). A mailbox has two words for each other GPU. `ready` says that its tensor has come. `free` says that this
GPU may send it the next one. Each is 0 or 1, so that a CUDA graph can hold the operations. The other GPU writes them,
and the GPU that waited sets them back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from specbatch.parallel.algorithms import ALIGNMENT

_READY, _FREE = 0, 128  # offsets in bytes from the beginning of the words; each other GPU has a word of 4 bytes at both
WORDS_BYTES = 256
# CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32 and CU_STREAM_WAIT_VALUE_EQ of cuda.h
_WAIT, _WRITE, _UNTIL_EQUAL = 1, 2, 1


class Mailbox:
    """A mailbox for tensors of the other GPUs of a group. `memories`: uint8 memory of the GPU of each rank, as this GPU
    sees it. The words come last. `capacity`: the bytes of the largest tensor that a GPU sends to another one."""

    def __init__(self, memories: Sequence[Tensor], rank: int) -> None:
        size, room = len(memories), len(memories[rank]) - WORDS_BYTES
        self.capacity = room // self._places(size) // ALIGNMENT * ALIGNMENT
        self._memories, self._rank, self._room = memories, rank, room
        # Each rank begins with another one, so that no GPU gets all tensors at once.
        self._others = [(rank + i) % size for i in range(1, size)]
        # The addresses and the operations are kept: the host has less time to launch a sum than half a layer takes.
        self._addresses = [memory.data_ptr() for memory in memories]
        words = [address + room for address in self._addresses]
        own = words[rank]
        ready = [_write(words[other] + _READY + 4 * rank, 1) for other in self._others]
        until_free = [_await_one(own + _FREE + 4 * other) for other in self._others]
        until_ready = [operation for other in self._others for operation in _await_one(own + _READY + 4 * other)]
        # Between two copies, one batch says that the first has come, and waits until there is room for the second.
        self._before = [_Batch(until_free[0]), *(_Batch([ready[i - 1], *until_free[i]]) for i in range(1, size - 1))]
        self._after = _Batch([ready[-1], *until_ready])
        self._release = _Batch([_write(words[other] + _FREE + 4 * rank, 1) for other in self._others])

    def reset(self) -> None:
        """Mark the mailbox as empty. Call it before another GPU uses the mailbox."""
        words = self._memories[self._rank][self._room :].view(torch.int32)
        words.zero_()
        words[_FREE // 4 :] = 1

    def exchange(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy a contiguous tensor into the mailbox of each other GPU, on the current stream, and return what the other
        GPUs send, (size - 1, C) in the order of ranks. `tensors` has one for each rank, all of the same size and dtype.
        That of this rank is not sent. Work on the current stream can read what came until `release`."""
        assert all(x.is_contiguous() for x in tensors)
        self._send(tensors, _stream())
        return self._received(tensors[self._rank])

    def release(self) -> None:
        """Tell the other GPUs that they may send again, after the tensors that came were read."""
        self._release.launch(_stream())

    def _send(self, tensors: Sequence[Tensor], stream: int) -> None:
        """Copy a tensor into the memory of each other GPU, and let the stream wait for theirs."""
        num_bytes = tensors[self._rank].nbytes
        for other, before in zip(self._others, self._before, strict=True):
            before.launch(stream)
            _copy(self._address(self._rank, other, num_bytes), tensors[other], stream)
        self._after.launch(stream)

    def _received(self, like: Tensor) -> Tensor:
        """Return what came into the places of this GPU, (places, C)."""
        places = self._places(len(self._memories))
        return self._memories[self._rank][: places * like.nbytes].view(like.dtype).view(places, -1)

    def _address(self, sender: int, receiver: int, num_bytes: int) -> int:
        """Return the address of the sender's place in the memory of the receiver, as this GPU sees it."""
        return self._addresses[receiver] + self._place(sender, receiver) * num_bytes

    @staticmethod
    def _places(size: int) -> int:
        """Return the number of tensors that a memory has room for."""
        return size - 1

    @staticmethod
    def _place(sender: int, receiver: int) -> int:
        """Return the number of the sender's tensor in the receiver's mailbox, which has none of its own."""
        return sender - (sender > receiver)


class DispatchBuffer(Mailbox):
    """A buffer in which the tokens of all GPUs come together, those of this one, too. So they need not be copied to a
    tensor before they are read. The arguments are those of `Mailbox`."""

    @staticmethod
    def _places(size: int) -> int:
        return size

    @staticmethod
    def _place(sender: int, receiver: int) -> int:
        return sender

    def own_place(self, like: Tensor) -> Tensor:
        """Return the place of this GPU's tokens, a tensor like `like`. Tokens that are written there are not copied."""
        at = self._rank * like.nbytes
        return beginning(self._memories[self._rank][at:], like)

    def gather(self, x: Tensor) -> Tensor:
        """Copy a contiguous tensor to all GPUs, on the current stream, and return the tensors of all, (size, C). Work
        on the current stream can read them until `release`."""
        assert x.is_contiguous()
        stream, own = _stream(), self._address(self._rank, self._rank, x.nbytes)
        if x.data_ptr() != own:
            _copy(own, x, stream)
        self._send([x] * len(self._memories), stream)
        return self._received(x)


def beginning(memory: Tensor, like: Tensor) -> Tensor:
    """Return the beginning of uint8 memory as a tensor with the shape and the dtype of `like`."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def has_stream_operations(memories: Sequence[Tensor], rank: int) -> bool:
    """Return whether the driver can write words of the memory of each rank, and wait for a word of this one, in the
    order of a stream. `memories`: see `Mailbox`; WORDS_BYTES bytes of zeros."""
    own = memories[rank].view(torch.int32)[rank]
    written = [_write(memory.data_ptr() + 4 * rank, 1) for memory in memories]
    try:
        _Batch([*written, *_await_one(own.data_ptr())]).launch(_stream())
    except (OSError, AttributeError, RuntimeError):  # no driver, an old one, or one that refuses
        return False
    return int(own) == 0


class _Operation(ctypes.Structure):
    """An operation on a word: `CUstreamBatchMemOpParams` of cuda.h."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


def _await_one(address: int) -> list[_Operation]:
    """Return the operations that wait until the word at `address` is 1, and then set it back to 0."""
    return [_Operation(_WAIT, address, 1, _UNTIL_EQUAL), _write(address, 0)]


def _write(address: int, value: int) -> _Operation:
    """Return the operation that writes a word, after all earlier writes of the stream are visible to other GPUs."""
    return _Operation(_WRITE, address, value)


class _Batch:
    """Operations that a stream does in order."""

    def __init__(self, operations: Sequence[_Operation]) -> None:
        self._count = len(operations)
        self._operations = (_Operation * self._count)(*operations)

    def launch(self, stream: int) -> None:
        _check(_driver().cuStreamBatchMemOp_v2(stream, self._count, ctypes.addressof(self._operations), 0))


def _copy(address: int, x: Tensor, stream: int) -> None:
    _check(_driver().cuMemcpyDtoDAsync_v2(address, x.data_ptr(), x.nbytes, stream))


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@cache
def _driver() -> ctypes.CDLL:
    lib = ctypes.CDLL("libcuda.so.1")
    lib.cuStreamBatchMemOp_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    lib.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return lib


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"an operation of a CUDA stream failed with status {status}")
