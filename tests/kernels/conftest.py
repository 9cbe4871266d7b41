"""Both implementations of the kernels, one after the other. Without a GPU, Triton's run in its interpreter."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "triton":
        pytest.importorskip("triton")
    return importlib.import_module(f"specbatch.kernels.{request.param}")
