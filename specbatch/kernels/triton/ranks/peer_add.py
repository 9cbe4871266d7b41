# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Adds tensors that other GPUs have copied into the memory of this one (Triton).

Shape suffixes: G GPUs, C elements.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.triton.parts.launch import launch

_BLOCK = 4096  # elements


@triton.jit
def _add_received(x_ptr, received_ptr, residual_ptr, out_ptr, count, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    # The load bypasses the cache of this multiprocessor, which does not see what other GPUs write.
    received = tl.load(received_ptr + at, mask=ok, other=0.0, cache_modifier=".cg").to(tl.float32)
    y = (tl.load(x_ptr + at, mask=ok, other=0.0).to(tl.float32) + received).to(dtype)
    if HAS_RESIDUAL:
        y = (tl.load(residual_ptr + at, mask=ok, other=0.0).to(tl.float32) + y.to(tl.float32)).to(dtype)
    tl.store(out_ptr + at, y, mask=ok)


def add_received(x: Tensor, received: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """Write to `out` x + received, added in float32 and rounded to their dtype, + residual, rounded again. The tensors
    are contiguous and have one shape, bfloat16 or float32."""
    tensors = (x, received, out) if residual is None else (x, received, out, residual)
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert all((tensor.shape, tensor.dtype) == (x.shape, x.dtype) for tensor in tensors)
    launch(
        _add_received, (triton.cdiv(x.numel(), _BLOCK),), x, received, residual, out, x.numel(),
        BLOCK=_BLOCK, HAS_RESIDUAL=residual is not None, num_warps=8,
    )  # fmt: skip


@triton.jit
def _add_parts(
    parts_ptr, residual_ptr, out_ptr, count, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):  # fmt: skip
    dtype: tl.constexpr = parts_ptr.dtype.element_ty
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    total = tl.zeros((BLOCK,), dtype=wide)
    for part in tl.static_range(SIZE):
        total += tl.load(parts_ptr + part * count + at, mask=ok, other=0.0, cache_modifier=".cg").to(wide)
    y = total.to(dtype)
    if HAS_RESIDUAL:
        y = (tl.load(residual_ptr + at, mask=ok, other=0.0).to(wide) + y.to(wide)).to(dtype)
    tl.store(out_ptr + at, y, mask=ok)


def add_parts(parts_GC: Tensor, residual_C: Tensor | None, out_C: Tensor) -> None:
    """Write to `out_C` the sum of the rows, added in order in float32 and rounded, + residual, rounded again. Float64
    is added in float64. The tensors are contiguous and have one dtype."""
    tensors = (parts_GC, out_C) if residual_C is None else (parts_GC, out_C, residual_C)
    assert all(tensor.is_contiguous() and tensor.dtype == out_C.dtype for tensor in tensors)
    assert parts_GC[0].shape == out_C.shape
    launch(
        _add_parts, (triton.cdiv(len(out_C), _BLOCK),), parts_GC, residual_C, out_C, len(out_C),
        SIZE=len(parts_GC), BLOCK=_BLOCK, HAS_RESIDUAL=residual_C is not None, num_warps=8,
    )  # fmt: skip
