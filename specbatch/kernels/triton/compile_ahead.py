"""Compiles kernels in several threads, before they are needed. Nothing is launched, and no memory is allocated.

A function that launches kernels runs over *fake* tensors, which have a shape, a dtype and a device, but no memory.
Torch computes the shapes of the results of its own operations, and `parts/launch.py` has Triton compile a kernel
instead of launching it. So the code that runs later is the only list of kernels. An operation that needs numbers (such
as reading a length on the host) raises.

Most of a compilation is Python, of which a process runs one thread at a time. Ranks of one host need nearly the same
kernels, and share the files that Triton keeps. So each compiles a share of them, and then finds the others' on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime._async_compile import AsyncCompileMode


@dataclass(frozen=True)
class Share:
    """A rank's share of the kernels. `meet`: waits until all ranks have called it."""

    rank: int
    size: int
    meet: Callable[[], object]

    def has(self, key: str) -> bool:
        """Return whether this rank compiles the kernel. Each key belongs to one rank."""
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % self.size == self.rank


ALONE = Share(0, 1, lambda: None)


def compile_ahead(function: Callable[[], None], num_threads: int, share: Share = ALONE) -> tuple[int, int]:
    """Compile the kernels that `function` launches. Return the number of compiled kernels and the number of failures.
    Tensors that `function` makes are fake. It may read real ones, such as weights, but it must not write to them:
    operations and kernels whose tensors are all real do run, on the numbers that are there. All ranks of `share` call
    this, and it waits for them once, even if it raises.

    A kernel that cannot be compiled is left out: its launch will raise. An error of `function` is raised when the
    kernels before it are compiled.
    """
    # Triton 3.6 leaves its mode on if its end is interrupted. In a separate context that does no harm.
    return copy_context().run(_compiled, function, num_threads, share)


def _compiled(function: Callable[[], None], num_threads: int, share: Share) -> tuple[int, int]:
    pool = ThreadPoolExecutor(num_threads)
    futures: list[Future[object]] = []
    try:
        own = _OwnKernels(pool, share)
        try:
            with own:  # the end of the block waits for all kernels
                try:
                    with _without_addresses(), FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
                        function()
                finally:
                    futures += own.raw_futures
        finally:
            share.meet()
        with AsyncCompileMode(pool, ignore_errors=True) as rest:
            for key, functions in own.of_others.items():  # a kernel that no other rank needs is compiled now
                rest.submit(key, *functions)
            futures += rest.raw_futures
        failed = sum(future.exception() is not None for future in futures)
        return len(futures) - failed, failed
    finally:
        pool.shutdown(cancel_futures=True)  # futures are left if the wait was interrupted


class _OwnKernels(AsyncCompileMode):
    """Compiles the kernels of this rank's share, and keeps what compiles the others."""

    def __init__(self, pool: ThreadPoolExecutor, share: Share) -> None:
        super().__init__(pool, ignore_errors=True)
        self._share = share
        self.of_others: dict[str, tuple[Any, ...]] = {}

    def submit(self, key: str, *functions: Any) -> Any:
        """Return None for a kernel of another rank: then Triton launches nothing, and compiles it when it is launched
        again."""
        if self._share.has(key):
            return super().submit(key, *functions)
        self.of_others.setdefault(key, functions)
        return None


def _without_addresses() -> AbstractContextManager[object]:
    """Return a context whose fake tensors raise if they are asked for their address. Otherwise torch would return 0,
    and a library that is called without torch would write there."""
    return config.patch(fake_tensor_allow_unsafe_data_ptr_access=False)
