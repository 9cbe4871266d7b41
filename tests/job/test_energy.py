"""Joules of a GPU, on a fake of NVML."""

from __future__ import annotations

import sys
import types

import pytest

from specbatch.job.energy import EnergyMeter, gpu_uuid


class Fake(types.ModuleType):
    """pynvml, with a counter for each card."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.millijoules = {"GPU-a": 5_000}

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return self.millijoules[handle]


def test_joules_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Fake()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = EnergyMeter("a")
    assert meter.joules() == 0
    nvml.millijoules["GPU-a"] += 2_500
    assert meter.joules(fresh=False) == 0, "the counter was read a moment ago, and reading it takes long"
    assert meter.joules() == 2.5
    assert meter.joules(fresh=False) == 2.5
    del nvml.millijoules["GPU-a"]
    assert meter.joules() is None
    assert EnergyMeter("GPU-b").joules() is None


def test_nothing_is_known_without_a_gpu_or_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_uuid("cpu") is None
    assert EnergyMeter(None).joules() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert EnergyMeter("a").joules() is None


@pytest.mark.gpu
def test_the_counter_of_a_real_card_rises() -> None:
    import torch

    pytest.importorskip("pynvml")
    meter = EnergyMeter(gpu_uuid("cuda:0"))
    assert meter.joules() is not None
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(300):
        a @ a
    torch.cuda.synchronize()
    assert (meter.joules() or 0) > 1
