"""The number of threads with which torch computes on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Compute with `count` threads, and with as many as before afterwards."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
