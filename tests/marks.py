"""Marks that several test files share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()


def slow_on_cpu(*values: Any) -> Any:
    """Mark a case that takes seconds in Triton's interpreter (or on the CPU) and is fast on a GPU. Without a GPU only
    `-m slow` runs it."""
    return pytest.param(*values, marks=[] if CUDA else [pytest.mark.slow])
