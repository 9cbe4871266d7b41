# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Attention sinks inside attention kernels (Triton): a score of each query head that takes part in the softmax and has
no value (gpt-oss)."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.parts.soft_cap import LOG2E

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def sink_scores(sinks_ptr, head):
    """Return the sinks of the rows' heads in units of log2(e)."""
    return tl.load(sinks_ptr + head).to(tl.float32) * _LOG2E


@triton.jit
def merge_sink(acc, total, maximum, sink):
    """Add the sink to sums of weights of (rows, columns). It takes a share of the weights of all values."""
    new_maximum = tl.maximum(maximum, sink)
    share = tl.exp2(maximum - new_maximum)[:, None]
    return acc * share, total * share + tl.exp2(sink - new_maximum)[:, None]
