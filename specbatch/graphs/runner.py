"""CUDA graphs: a function captured once for each of a ladder of batch sizes, then replayed.

A captured function reads and writes fixed addresses: buffers that live as long as the engine, its temporary memory, and
its output. All graphs of a runner share one memory pool and are captured largest first, so that the pool is as large as
the largest needs. What a function returns is never given to another graph, so it should be little; it is valid until
the next replay.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def ladder(largest: int) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, then multiples of 8, of 16 from 32 on, of 32 from 128 on; and the
    largest itself."""
    sizes = {1, 2, 4, largest}
    sizes |= set(range(8, 32, 8)) | set(range(32, 128, 16)) | set(range(128, largest + 1, 32))
    return sorted(size for size in sizes if size <= largest)


@dataclass(slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    output: Any


class GraphRunner:
    """Captured functions by key. One instance for one stream of execution.

    `seconds` and `bytes` say what capturing took; `pool_bytes` is the part of the latter that torch allocated, the rest
    is the driver's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[Any, ...], _Captured] = {}
        self.seconds = 0.0
        self.bytes = self.pool_bytes = 0

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def capture(self, key: tuple[Any, ...], function: Callable[[], Any]) -> Any:
        """Capture `function` under `key`; returns its output, valid as after a replay. It must not touch the host, and
        running it in vain must do no harm: it is run once beforehand, so that what is loaded and compiled on first use
        is, before the capture, and replayed once after it. Where it raises, nothing is captured."""
        assert key not in self._captured, f"{key} is captured already"
        began = time.perf_counter()
        function()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # a capture does it too: what it gives back is not the graph's
        free, reserved = torch.cuda.mem_get_info(self.device)[0], torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        # What a collection frees on the device (another engine's graphs, say) would break the capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                output = function()
        finally:
            if collects:
                gc.enable()
        graph.replay()  # what is captured next may read this output, in its warm-up already
        torch.cuda.synchronize(self.device)
        self._captured[key] = _Captured(graph, output)
        self.bytes += free - torch.cuda.mem_get_info(self.device)[0]
        self.pool_bytes += torch.cuda.memory_reserved(self.device) - reserved
        self.seconds += time.perf_counter() - began
        return output

    def replace_output(self, key: tuple[Any, ...], output: Any) -> None:
        """Return this part of what the function returns from now on. Graphs captured later may use the memory of the
        rest."""
        self._captured[key].output = output

    def drop(self, key: tuple[Any, ...]) -> None:
        """Forget a captured function, if there is one."""
        self._captured.pop(key, None)

    def output(self, key: tuple[Any, ...]) -> Any:
        """What a captured function returned."""
        return self._captured[key].output

    def replay(self, key: tuple[Any, ...]) -> Any:
        """Launch a captured function on the current stream; returns its output."""
        captured = self._captured[key]
        captured.graph.replay()
        return captured.output
