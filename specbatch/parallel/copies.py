"""Sums of two GPUs by copy engines. No multiprocessor sends or waits, so all of them can compute another pass.

Each GPU copies its tensor into the mailbox of the other one, and adds the tensor that came into its own. A kernel that
waits would need a multiprocessor, and large GEMMs hold all of them from beginning to end. Here the stream waits for a
word that the other GPU writes (memory operations of streams, `cuStreamWaitValue32` of the CUDA driver).

A word is written after all earlier writes of the stream are visible to the other GPU (the driver's default is a fence
of the system). A mailbox has two words. `ready` says that a tensor has come. `free` says that this GPU may send the
next one. Each is 0 or 1, so that a CUDA graph can hold the operations. The other GPU writes them, and the GPU that
waited sets them back.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

_READY, _FREE = 0, 4  # offsets in bytes from the beginning of the words
WORDS_BYTES = 256
_WAIT_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ of cuda.h


class Mailbox:
    """A mailbox for tensors of the other GPU. `memory`: uint8 memory of this GPU, which the other one writes. `peer`:
    the other GPU's mailbox, as this GPU sees it. The words come after the first `capacity` bytes."""

    def __init__(self, memory: Tensor, peer: Tensor) -> None:
        assert len(memory) == len(peer)
        self.capacity = len(memory) - WORDS_BYTES
        self._memory, self._peer = memory, peer
        # The addresses are kept, because the host must launch a sum in less time than a GPU needs for a part of a
        # layer.
        self._own_words, self._peer_words = (tensor.data_ptr() + self.capacity for tensor in (memory, peer))

    def reset(self) -> None:
        """Mark the mailbox as empty. Call it before the other GPU uses the mailbox."""
        words = self._memory[self.capacity :].view(torch.int32)
        words.zero_()
        words[_FREE // 4] = 1

    def send(self, x: Tensor) -> None:
        """Copy a contiguous tensor of at most `capacity` bytes into the other GPU's mailbox, on the current stream."""
        stream = _stream()
        _await_one(stream, self._own_words + _FREE)
        self._peer[: x.nbytes].copy_(x.view(-1).view(torch.uint8))
        _write(stream, self._peer_words + _READY, 1)

    def receive(self, like: Tensor) -> Tensor:
        """Return the tensor that the other GPU sends, with the shape and the dtype of `like`. Work on the current
        stream can read it until `release`."""
        _await_one(_stream(), self._own_words + _READY)
        return beginning(self._memory, like)

    def release(self) -> None:
        """Tell the other GPU that it may send again, after the tensor that came was read."""
        _write(_stream(), self._peer_words + _FREE, 1)


def beginning(memory: Tensor, like: Tensor) -> Tensor:
    """Return the beginning of uint8 memory as a tensor with the shape and the dtype of `like`."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)


def has_stream_operations(device: torch.device) -> bool:
    """Return whether the driver can write a word, and wait for it, in the order of a stream."""
    word = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        _write(_stream(), word.data_ptr(), 1)
        _await_one(_stream(), word.data_ptr())
    except (OSError, AttributeError, RuntimeError):  # no driver, an old one, or one that refuses
        return False
    return int(word) == 0


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
