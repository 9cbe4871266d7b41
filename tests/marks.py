"""Marks that several test files share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()


def slow_on_cpu(*values: Any) -> Any:
    """A case that Triton's interpreter (or the CPU) takes seconds for: left to `-m slow` there, fast on a GPU."""
    return pytest.param(*values, marks=[] if CUDA else [pytest.mark.slow])
