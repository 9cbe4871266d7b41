"""The torch and the Triton kernels have the same operations, in files of the same names, under the same signatures."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch

from specbatch.kernels import ops_for
from specbatch.kernels import torch as reference


def test_the_same_operations() -> None:
    kernels = pytest.importorskip("specbatch.kernels.triton")
    assert reference.__all__ == kernels.__all__
    assert 20 < len(reference.__all__) < 80


@pytest.mark.parametrize("name", reference.__all__)
def test_the_same_file_and_signature(name: str) -> None:
    """A file of many kernels is a folder with a file `ops.py`. Triton's functions can have further arguments with
    defaults, for tuning."""
    kernels = pytest.importorskip("specbatch.kernels.triton")
    expected, found = getattr(reference, name), getattr(kernels, name)
    assert found is not expected
    assert found.__module__.removesuffix(".ops") == expected.__module__.replace(".torch.", ".triton.")
    mine, theirs = inspect.signature(expected), inspect.signature(found)
    further = list(theirs.parameters.values())[len(mine.parameters) :]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in further)
    same = [parameter for parameter in theirs.parameters.values() if parameter not in further]
    assert theirs.replace(parameters=same) == mine


@pytest.mark.parametrize(
    ("device", "dtype", "name"),
    [
        ("cpu", torch.float32, "torch"),
        ("cpu", torch.bfloat16, "torch"),
        ("cuda", torch.float64, "torch"),
        ("cuda", torch.float32, "triton"),
        ("cuda:1", torch.bfloat16, "triton"),
    ],
)
def test_operations_of_a_device(device: str, dtype: torch.dtype, name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    assert ops_for(torch.device(device), dtype) is importlib.import_module(f"specbatch.kernels.{name}")
