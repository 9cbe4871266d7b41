"""Energy of a GPU, from the counter that NVML reads (Volta and later)."""

from __future__ import annotations

import contextlib
from typing import Any


class EnergyMeter:
    """Joules of one GPU since this was made; None: there is no GPU, no counter, or no package nvidia-ml-py.

    The counter is that of the whole card: workers that share one count its energy each, and other programs on it count.
    """

    def __init__(self, uuid: str | None) -> None:
        """`uuid`: of the GPU, as torch has it; None: a CPU."""
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

    def joules(self) -> float | None:
        now = self._millijoules()
        return None if now is None or self._start is None else (now - self._start) / 1000

    def _millijoules(self) -> int | None:
        if self._nvml is None:
            return None
        with contextlib.suppress(Exception):
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        return None


def gpu_uuid(device: str) -> str | None:
    """Of an engine's device, such as "cuda:1"; None: a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if torch.cuda.is_available() else None
