"""CUDA graphs: a function is captured once for each of a ladder of batch sizes, then replayed.

A captured function reads and writes fixed addresses: buffers that live as long as the engine, its temporary memory, and
its output. All graphs of a runner share one memory pool. They are captured largest first, so the pool is as large as
the largest graph needs. No other graph gets the memory of an output, so outputs should be small. An output is valid
until the next replay.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def ladder(largest: int) -> list[int]:
    """List the batch sizes to capture, ascending: 1, 2, 4, then multiples of 8, of 16 from 32 on, of 32 from 128 on, of
    64 from 512 on, of 128 from 1024 on; and the largest itself."""
    sizes = {1, 2, 4, largest}
    sizes |= set(range(8, 32, 8)) | set(range(32, 128, 16)) | set(range(128, 512, 32)) | set(range(512, 1024, 64))
    sizes |= set(range(1024, largest, 128))
    return sorted(size for size in sizes if size <= largest)


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: Any


class GraphRunner:
    """A runner of captured functions, each with a key. A stream has one runner.

    `seconds` and `bytes` are the time and the memory of the captures. Torch allocated `pool_bytes` of the bytes, and
    the driver the rest: `first_bytes` at the first capture, which are for all graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self.seconds = 0.0
        self.bytes = self.pool_bytes = self.first_bytes = 0

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def capture(self, key: tuple[Any, ...], function: Callable[[], Any]) -> Any:
        """Capture `function` under `key`, and return its output, which is valid as after a replay.

        `function` must not synchronise with the host, and extra runs of it must do no harm: it runs once before the
        capture, so that kernels are compiled and loaded, and is replayed once after it. If it raises, nothing is
        captured.
        """
        assert key not in self._captured, f"{key} is captured already"
        began = time.perf_counter()
        function()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # a capture does this, too; otherwise these bytes would count as the graph's
        free, reserved = torch.cuda.mem_get_info(self.device)[0], torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        # A garbage collection can free device memory (of another engine's graphs), which breaks the capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                output = function()
        finally:
            if collects:
                gc.enable()
        graph.replay()  # the warm-up of the next capture can read this output
        torch.cuda.synchronize(self.device)
        self._captured[key] = _Captured(graph, output)
        self.bytes += free - torch.cuda.mem_get_info(self.device)[0]
        self.pool_bytes += torch.cuda.memory_reserved(self.device) - reserved
        if len(self) == 1:
            self.first_bytes = max(0, self.bytes - self.pool_bytes)
        self.seconds += time.perf_counter() - began
        return output

    def replace_output(self, key: tuple[Any, ...], output: Any) -> None:
        """Keep only this part of the function's output. Later captures can use the memory of the rest."""
        self._captured[key].output = output

    def drop(self, key: tuple[Any, ...]) -> None:
        """Drop the captured function, if there is one."""
        self._captured.pop(key, None)

    def output(self, key: tuple[Any, ...]) -> Any:
        """Return the output of a captured function."""
        return self._captured[key].output

    def replay(self, key: tuple[Any, ...]) -> Any:
        """Launch a captured function on the current stream, and return its output."""
        captured = self._captured[key]
        captured.graph.replay()
        return captured.output
