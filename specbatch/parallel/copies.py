"""Sums of two GPUs by copy engines: no multiprocessor sends, or waits, so that all of them compute another pass.

Each GPU copies its tensor into the mailbox of the other one, and adds what came into its own. A kernel that waits would
need a multiprocessor, and large GEMMs hold all of them from their beginning to their end. Here the stream waits, for a
word that the other GPU writes (memory operations of streams, `cuStreamWaitValue32` of the CUDA driver).

A word is written after all that the stream wrote before is visible to the other GPU (the driver's default is a fence
of the system). A mailbox has two words. `ready`: a tensor has come. `free`: this GPU may send the next one. Each is 0
or 1, so that a CUDA graph can hold the operations. They are written by the other GPU, and set back by the GPU that
waited.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

_READY, _FREE = 0, 4  # bytes from the beginning of the words
WORDS_BYTES = 256
_WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ of cuda.h


class Mailbox:
    """`memory`: uint8, which the other GPU writes. `peer`: its mailbox, as this GPU sees it. The words come after the
    first `capacity` bytes."""

    def __init__(self, memory: Tensor, peer: Tensor) -> None:
        assert len(memory) == len(peer)
        self.capacity = len(memory) - WORDS_BYTES
        self._memory, self._peer = memory, peer
        # Kept, because the host has to launch a sum in less time than a GPU takes for a part of a layer.
        self._own_words, self._peer_words = (tensor.data_ptr() + self.capacity for tensor in (memory, peer))

    def reset(self) -> None:
        """It is empty. Before the other GPU uses it."""
        words = self._memory[self.capacity :].view(torch.int32)
        words.zero_()
        words[_FREE // 4] = 1

    def send(self, x: Tensor) -> None:
        """On the current stream: a contiguous tensor of at most `capacity` bytes goes into the other GPU's mailbox."""
        stream = _stream()
        _await_one(stream, self._own_words + _FREE)
        self._peer[: x.nbytes].copy_(x.view(-1).view(torch.uint8))
        _write(stream, self._peer_words + _READY, 1)

    def receive(self, like: Tensor) -> Tensor:
        """What the other GPU has sent, of this shape and dtype: for the current stream, until `release`."""
        _await_one(_stream(), self._own_words + _READY)
        return beginning(self._memory, like)

    def release(self) -> None:
        """What came is read: the other GPU may send again."""
        _write(_stream(), self._peer_words + _FREE, 1)


def beginning(memory: Tensor, like: Tensor) -> Tensor:
    """Of uint8 memory, as a tensor of this shape and dtype."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def has_stream_operations(device: torch.device) -> bool:
    """Whether the driver writes a word, and waits for it, in the order of a stream."""
    word = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        _write(_stream(), word.data_ptr(), 1)
        _await_one(_stream(), word.data_ptr())
    except (OSError, AttributeError, RuntimeError):  # no driver, an old one, or one that refuses
        return False
    return int(word) == 0


def _await_one(stream: int, address: int) -> None:
    """The stream waits until the word there is 1, and sets it back to 0."""
    _check(_driver().cuStreamWaitValue32_v2(stream, address, 1, _WAIT_EQUAL))
    _write(stream, address, 0)


def _write(stream: int, address: int, value: int) -> None:
    """After all that the stream has written is seen by other GPUs, too."""
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
