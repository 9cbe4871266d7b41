"""Both implementations of the kernels, one after the other. Without a GPU, Triton's run in its interpreter."""

from __future__ import annotations

import pytest

from tests.kernels.operations import Ops, make_ops


@pytest.fixture(params=["torch", "triton"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return make_ops(request.param)


@pytest.fixture
def triton_ops() -> Ops:
    return make_ops("triton")
