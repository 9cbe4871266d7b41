"""Sums and exchanges of GPUs by copy engines. No multiprocessor sends or waits, so all of them can compute another
pass.

Each GPU copies its tensors into the mailboxes of the others, and reads the tensors that came into its own. A kernel
that waits would need a multiprocessor, and large GEMMs hold all of them from beginning to end. Here the stream waits
for a word that another GPU writes (memory operations of streams, `cuStreamWaitValue32` of the CUDA driver).

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
_WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ of cuda.h


class Mailbox:
    """A mailbox for tensors of the other GPUs of a group. `memories`: uint8 memory of the GPU of each rank, as this GPU
    sees it. The words come last. `capacity`: the bytes of the largest tensor that a GPU sends to another one."""

    def __init__(self, memories: Sequence[Tensor], rank: int) -> None:
        size, room = len(memories), len(memories[rank]) - WORDS_BYTES
        self.capacity = room // (size - 1) // ALIGNMENT * ALIGNMENT
        self._memories, self._rank, self._room = memories, rank, room
        # Each rank begins with another one, so that no GPU gets all tensors at once.
        self._others = [(rank + i) % size for i in range(1, size)]
        # The addresses are kept, because the host must launch a sum in less time than a GPU needs for a part of a
        # layer.
        self._words = [memory.data_ptr() + room for memory in memories]

    def reset(self) -> None:
        """Mark the mailbox as empty. Call it before another GPU uses the mailbox."""
        words = self._memories[self._rank][self._room :].view(torch.int32)
        words.zero_()
        words[_FREE // 4 :] = 1

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Copy a contiguous tensor into the mailbox of each other GPU, on the current stream. `tensors` has one for
        each rank, all of the same size. That of this rank is not sent."""
        stream, own_words = _stream(), self._words[self._rank]
        for other in self._others:
            x = tensors[other].view(-1).view(torch.uint8)
            at = _place(self._rank, other) * len(x)
            _await_one(stream, own_words + _FREE + 4 * other)
            self._memories[other][at : at + len(x)].copy_(x)
            _write(stream, self._words[other] + _READY + 4 * self._rank, 1)

    def receive(self, like: Tensor) -> Tensor:
        """Return what the other GPUs send, (size - 1, C) in the order of ranks. Each part has the dtype and the number
        of elements of `like`. Work on the current stream can read it until `release`."""
        stream, own_words = _stream(), self._words[self._rank]
        for other in self._others:
            _await_one(stream, own_words + _READY + 4 * other)
        count = len(self._others)
        return self._memories[self._rank][: count * like.nbytes].view(like.dtype).view(count, -1)

    def release(self) -> None:
        """Tell the other GPUs that they may send again, after the tensors that came were read."""
        stream = _stream()
        for other in self._others:
            _write(stream, self._words[other] + _FREE + 4 * self._rank, 1)


def _place(sender: int, receiver: int) -> int:
    """Return the number of the sender's tensor in the receiver's mailbox, which has none of its own."""
    return sender - (sender > receiver)


def beginning(memory: Tensor, like: Tensor) -> Tensor:
    """Return the beginning of uint8 memory as a tensor with the shape and the dtype of `like`."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def has_stream_operations(memories: Sequence[Tensor], rank: int) -> bool:
    """Return whether the driver can write words of the memory of each rank, and wait for a word of this one, in the
    order of a stream. `memories`: see `Mailbox`; WORDS_BYTES bytes of zeros."""
    own = memories[rank].view(torch.int32)[rank]
    try:
        for memory in memories:
            _write(_stream(), memory.data_ptr() + 4 * rank, 1)
        _await_one(_stream(), own.data_ptr())
    except (OSError, AttributeError, RuntimeError):  # no driver, an old one, or one that refuses
        return False
    return int(own) == 0


def _await_one(stream: int, address: int) -> None:
    """Let the stream wait until the word at `address` is 1, then set it back to 0."""
    _check(_driver().cuStreamWaitValue32_v2(stream, address, 1, _WAIT_EQUAL))
    _write(stream, address, 0)


def _write(stream: int, address: int, value: int) -> None:
    """Let the stream write a word, after all its earlier writes are visible to other GPUs."""
    _check(_driver().cuStreamWriteValue32_v2(stream, address, value, 0))


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@cache
def _driver() -> ctypes.CDLL:
    lib = ctypes.CDLL("libcuda.so.1")
    for name in ("cuStreamWaitValue32_v2", "cuStreamWriteValue32_v2"):
        getattr(lib, name).argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return lib


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"a memory operation of a CUDA stream failed with status {status}")
