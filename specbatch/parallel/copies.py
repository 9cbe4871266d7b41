"""Sums of two GPUs by copy engines: no multiprocessor sends, or waits, so that all of them compute another pass.

Each GPU copies its tensor into the mailbox of the other one, and adds what came into its own. A kernel that waits would
need a multiprocessor, and large GEMMs hold all of them from their beginning to their end. Here the stream waits, for a
word that the other GPU writes (memory operations of streams, `cuStreamWaitValue32` of the CUDA driver).

A mailbox has two words. `ready`: a tensor has come. `free`: this GPU may send the next one. Each is 0 or 1, so that a
CUDA graph can hold the operations. The words are written by the other GPU, and set back by the GPU that waited.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_READY, _FREE = 0, 4  # bytes from the beginning of the words
WORDS_BYTES = 256
_WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ of cuda.h


class Mailbox(NamedTuple):
    """`memory`: uint8, which the other GPU writes. `peer`: its mailbox, as this GPU sees it. The words come after the
    first `capacity` bytes."""

    memory: Tensor
    peer: Tensor

    @property
    def capacity(self) -> int:
        return len(self.memory) - WORDS_BYTES

    def reset(self) -> None:
        """It is empty. Before the other GPU uses it."""
        words = self.memory[self.capacity :].view(torch.int32)
        words.zero_()
        words[_FREE // 4] = 1


def send(x: Tensor, mailbox: Mailbox) -> None:
    """On the current stream: a contiguous tensor of at most `capacity` bytes goes into the other GPU's mailbox."""
    own, other = _words(mailbox.memory), _words(mailbox.peer)
    _await_one(own + _FREE)
    mailbox.peer[: x.nbytes].copy_(x.view(-1).view(torch.uint8))
    _write(other + _READY, 1)


def receive(like: Tensor, mailbox: Mailbox) -> Tensor:
    """What the other GPU has sent, of this shape and dtype: for the current stream, until `release`."""
    _await_one(_words(mailbox.memory) + _READY)
    return mailbox.memory[: like.nbytes].view(like.dtype).view(like.shape)


def release(mailbox: Mailbox) -> None:
    """What came is read: the other GPU may send again."""
    _write(_words(mailbox.peer) + _FREE, 1)


def _words(memory: Tensor) -> int:
    return memory.data_ptr() + len(memory) - WORDS_BYTES


def _await_one(address: int) -> None:
    """The stream waits until the word there is 1, and sets it back to 0."""
    _check(_driver().cuStreamWaitValue32_v2(_stream(), address, 1, _WAIT_EQUAL))
    _write(address, 0)


def _write(address: int, value: int) -> None:
    """After all that the stream has written is seen by other GPUs, too."""
    _check(_driver().cuStreamWriteValue32_v2(_stream(), address, value, 0))


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
