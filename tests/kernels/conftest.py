"""Both implementations of the kernels, one after the other. Without a GPU, Triton's run in its interpreter."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.kernels.batches import CUDA
from tests.kernels.interpreter import speed_up
from tests.kernels.operations import Ops, make_ops

if not CUDA and find_spec("triton"):
    speed_up()


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


@pytest.fixture
def triton_ops() -> Ops:
    return make_ops("triton")
