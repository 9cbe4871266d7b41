"""The errors that mean that memory is full."""

from __future__ import annotations

import torch

# cudaErrorMemoryAllocation as torch and Triton raise it, cuBLAS's error, and torch's allocator of the host.
_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether `error`, or an error that led to it, says that the memory of the device or of the host has run
    out. (A capture that breaks off for this reason can end with another error.)"""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
            return True
        error = error.__context__
    return False
