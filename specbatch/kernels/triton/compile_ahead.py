"""Compiles kernels in several threads, before they are needed. Nothing is launched, and no memory is allocated.

A function that launches kernels runs over *fake* tensors, which have a shape, a dtype and a device, but no memory.
Torch computes the shapes of the results of its own operations, and `parts/launch.py` has Triton compile a kernel
instead of launching it. So the code that runs later is the only list of kernels. An operation that needs numbers (such
as reading a length on the host) raises.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context

import torch
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime._async_compile import AsyncCompileMode


def compile_ahead(function: Callable[[], None], num_threads: int) -> tuple[int, int]:
    """Compile the kernels that `function` launches. Return the number of compiled kernels and the number of failures.
    Tensors that `function` makes are fake. It may read real ones, such as weights, but it must not write to them:
    operations and kernels whose tensors are all real do run, on the numbers that are there.

    A kernel that cannot be compiled is left out: its launch will raise. An error of `function` is raised when the
    kernels before it are compiled.
    """
    # Triton 3.6 leaves its mode on if its end is interrupted. In a separate context that does no harm.
    return copy_context().run(_compiled, function, num_threads)


def _compiled(function: Callable[[], None], num_threads: int) -> tuple[int, int]:
    pool = ThreadPoolExecutor(num_threads)
    try:
        with AsyncCompileMode(pool, ignore_errors=True) as mode:  # the end of the block waits for all kernels
            with _without_addresses(), FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
                function()
            futures = list(mode.raw_futures)
        failed = sum(future.exception() is not None for future in futures)
        return len(futures) - failed, failed
    finally:
        pool.shutdown(cancel_futures=True)  # futures are left if the wait was interrupted


def _without_addresses() -> AbstractContextManager[object]:
    """Return a context whose fake tensors raise if they are asked for their address. Otherwise torch would return 0,
    and a library that is called without torch would write there."""
    return config.patch(fake_tensor_allow_unsafe_data_ptr_access=False)
