"""Which errors mean that memory is full."""

from __future__ import annotations

import torch

# cudaErrorMemoryAllocation as torch and Triton raise it, cuBLAS's error, and torch's allocator of the host.
_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory has run out, of the device or of the host: in `error`, or in what it was raised over (a capture
    that breaks off for it may end with another error)."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
            return True
        error = error.__context__
    return False
