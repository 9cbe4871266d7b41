"""The shared memory of a program, and whether a GPU is like those that were measured. This module does not import
Triton."""

from __future__ import annotations

from functools import cache

import torch

HOPPER_SHARED_BYTES = 232_448  # 227 KiB


def shared_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of shared memory that a program can have on the tensor's GPU: 227 KiB on Hopper and data-centre
    Blackwell, 163 on A100, 99 on Ada, on other Ampere and on consumer Blackwell, 64 on Turing. Triton's interpreter
    counts as Hopper."""
    return _of_device(tensor.device) if tensor.is_cuda else HOPPER_SHARED_BYTES


@cache
def like_hopper(device: torch.device) -> bool:
    """Return whether measurements on Hopper hold for a GPU. They do not hold for consumer Blackwell, which has Hopper's
    instructions, but not its shared memory."""
    is_new = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    return is_new and _of_device(device) >= HOPPER_SHARED_BYTES


@cache
def _of_device(device: torch.device) -> int:
    # Every CUDA build of torch has it; AMD's have not, and their GPUs have 64 KiB.
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 1 << 16))
