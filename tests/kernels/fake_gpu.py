"""Triton's compiler for an H100, without a GPU: what is launched is only counted.

For a process of its own: the tests' process has Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class FakeGpu:
    """The names of the kernels that were launched, and of those that were compiled."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.compiled: list[str] = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
            load_binary=lambda name, kernel, shared, device: (1, 1, 32, 0, 1024),
            unload_module=lambda module: None,
        )
        driver.set_active(self)
        knobs.compilation.listener = self._has_compiled

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *args: self.launched.append(metadata.name)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def _has_compiled(self, *, src: Any, **rest: Any) -> None:
        self.compiled.append(src.name)
