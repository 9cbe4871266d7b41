"""Names for the parts of a round in a trace."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

PREFIX = "specbatch "  # the beginning of the names in traces


def marked(name: str) -> AbstractContextManager[object]:
    """Return a context. While torch's profiler runs, or `torch.autograd.profiler.emit_nvtx`, work that is launched in
    it has this name in the trace. Otherwise it does nothing. The replay of a CUDA graph has the names of kernels
    alone."""
    return torch.profiler.record_function(PREFIX + name) if torch.autograd._profiler_enabled() else _NOTHING


_NOTHING = contextlib.nullcontext()
