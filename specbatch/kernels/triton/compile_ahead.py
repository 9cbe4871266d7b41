"""Compiles kernels in several threads, before they are needed. Nothing is launched, and no memory is taken.

A function that launches kernels is run over *fake* tensors: they have a shape, a dtype and a device, and no memory.
torch computes the shapes of what its own operations would return, and `parts/launch.py` has Triton compile a kernel
where it would launch it. So what is compiled follows from the code that runs later, and is written nowhere else. What a
function cannot do without numbers (such as reading a length on the host) raises.
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
    """Compiles the kernels that `function` launches; returns how many were compiled and how many failed. Tensors that
    `function` makes are fake. It may read real ones, such as weights. It must not write into them: operations and
    kernels over real tensors alone do run, on the numbers that are there.

    A kernel that cannot be compiled is left out: its launch will raise. Raises what `function` raises, when the kernels
    before that are compiled.
    """
    # Triton 3.6 leaves its mode on where the end of it is interrupted: in a context of its own that does no harm.
    return copy_context().run(_compiled, function, num_threads)


def _compiled(function: Callable[[], None], num_threads: int) -> tuple[int, int]:
    pool = ThreadPoolExecutor(num_threads)
    try:
        with AsyncCompileMode(pool, ignore_errors=True) as mode:  # its end waits for all kernels
            with _without_addresses(), FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
                function()
            futures = list(mode.raw_futures)
        failed = sum(future.exception() is not None for future in futures)
        return len(futures) - failed, failed
    finally:
        pool.shutdown(cancel_futures=True)  # where the wait was interrupted


def _without_addresses() -> AbstractContextManager[object]:
    """To ask a fake tensor of this context for its address raises. Otherwise torch would return 0, and a library that
    is called without torch would write there."""
    return config.patch(fake_tensor_allow_unsafe_data_ptr_access=False)
