"""Memory of a GPU that several test processes share.

Each process of a run keeps a CUDA context and its allocator's cache. So a test that needs much memory names the amount
with `@pytest.mark.gpu_memory(GIB)`. Such tests run one at a time, and each waits until this amount is free.
"""

from __future__ import annotations

import fcntl
import gc
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

_GIB = 1 << 30
_MAX_CACHED_BYTES = 256 << 20  # A process keeps at most these between two tests.
_MAX_WAIT_SECONDS = 120


@contextmanager
def memory_for(item: pytest.Item) -> Iterator[None]:
    """Run a GPU test when the memory that its mark names is free, and then return the memory in the cache."""
    mark = item.get_closest_marker("gpu_memory")
    if mark is None:
        yield
    else:
        with _one_at_a_time():
            _wait_for(mark.args[0] * _GIB)
            yield
            release()
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > _MAX_CACHED_BYTES:
        release()


def release() -> None:
    """Return this process's unused memory to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold a lock that all test processes of this machine share."""
    with Path(tempfile.gettempdir(), "specbatch-test-gpu-memory.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _wait_for(num_bytes: float) -> None:
    """Wait for other processes' tests to end, as long as these hold the memory. Skip on a smaller GPU."""
    release()
    if torch.cuda.mem_get_info()[1] < num_bytes:
        pytest.skip("the GPU is smaller")
    end = time.monotonic() + _MAX_WAIT_SECONDS
    while (free := torch.cuda.mem_get_info()[0]) < num_bytes:
        if time.monotonic() > end:
            pytest.fail(f"{free / _GIB:.1f} GiB are free, and the test needs {num_bytes / _GIB:.1f}")
        time.sleep(0.2)
