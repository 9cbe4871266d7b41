"""Names for the parts of a round in a trace."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

PREFIX = "specbatch "  # of names, in traces


def marked(name: str) -> AbstractContextManager[object]:
    """While torch's profiler runs, or `torch.autograd.profiler.emit_nvtx`, what is launched in it has this name. Else
    it does nothing. A CUDA graph that is replayed has the names of kernels alone."""
    return torch.profiler.record_function(PREFIX + name) if torch.autograd._profiler_enabled() else _NOTHING


_NOTHING = contextlib.nullcontext()
