"""Energy of a GPU, from the counter that NVML reads (Volta and later)."""

from __future__ import annotations

import contextlib
import time
from typing import Any

_SECONDS = 5.0  # between two readings while rows run: NVML takes milliseconds, and rounds would wait for it


class EnergyMeter:
    """Joules of one GPU since this was made; None: there is no GPU, no counter, or no package nvidia-ml-py.

    The counter is that of the whole card: workers that share one count its energy each, and other programs on it count.
    """

    def __init__(self, uuid: str | None) -> None:
        """`uuid`: the GPU's UUID from torch; None: the device is a CPU."""
        self._nvml: Any = None
        self._handle: Any = None
        if uuid is not None:
            # NVML has many errors: no driver, no rights, no counter. All mean that nothing is known.
            with contextlib.suppress(Exception):
                import pynvml

                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
                self._nvml = pynvml
        self._start = self._millijoules()
        self._last, self._read_at = self._start, time.perf_counter()

    def joules(self, *, fresh: bool = True) -> float | None:
        """`fresh` False: as it was at most a few seconds ago."""
        if fresh or time.perf_counter() - self._read_at > _SECONDS:
            self._last, self._read_at = self._millijoules(), time.perf_counter()
        return None if self._last is None or self._start is None else (self._last - self._start) / 1000

    def _millijoules(self) -> int | None:
        if self._nvml is None:
            return None
        with contextlib.suppress(Exception):
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return None


def gpu_uuid(device: str) -> str | None:
    """Return the UUID of an engine's device, such as "cuda:1". Returns None for a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if torch.cuda.is_available() else None
