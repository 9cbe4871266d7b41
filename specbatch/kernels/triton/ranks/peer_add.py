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
def _add_parts(
    parts_ptr, own_ptr, residual_ptr, out_ptr, count,
    SIZE: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """RANK: the number of the part that `own_ptr` has; the others follow each other. -1: `parts_ptr` has all."""
    dtype: tl.constexpr = parts_ptr.dtype.element_ty
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < count
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    total = tl.zeros((BLOCK,), dtype=wide)
    for part in tl.static_range(SIZE):
        if part == RANK:
            x = tl.load(own_ptr + at, mask=ok, other=0.0)
        else:
            place = part - 1 if RANK >= 0 and part > RANK else part
            # The load bypasses the cache of this multiprocessor, which does not see what other GPUs write.
            x = tl.load(parts_ptr + place * count + at, mask=ok, other=0.0, cache_modifier=".cg")
        total += x.to(wide)
    y = total.to(dtype)
    if HAS_RESIDUAL:
        y = (tl.load(residual_ptr + at, mask=ok, other=0.0).to(wide) + y.to(wide)).to(dtype)
    tl.store(out_ptr + at, y, mask=ok)


def add_parts(parts_GC: Tensor, residual_C: Tensor | None, out_C: Tensor) -> None:
    """Write to `out_C` the sum of the rows, added in order in float32 and rounded, + residual, rounded again. Float64
    is added in float64. The tensors are contiguous and have one dtype."""
    _launch(parts_GC, None, -1, residual_C, out_C)


def add_received(received_GC: Tensor, own: Tensor, rank: int, residual: Tensor | None, out: Tensor) -> None:
    """Do the same for the parts of the other ranks and the part of this one, in the order of ranks. `out` may have any
    shape."""
    flat = None if residual is None else residual.view(-1)
    _launch(received_GC, own.view(-1), rank, flat, out.view(-1))


def _launch(parts_GC: Tensor, own_C: Tensor | None, rank: int, residual_C: Tensor | None, out_C: Tensor) -> None:
    tensors = [tensor for tensor in (parts_GC, own_C, residual_C, out_C) if tensor is not None]
    assert all(tensor.is_contiguous() and tensor.dtype == out_C.dtype for tensor in tensors)
    assert all(tensor.shape[-1:] == out_C.shape for tensor in tensors)
    launch(
        _add_parts, (triton.cdiv(len(out_C), _BLOCK),), parts_GC, own_C, residual_C, out_C, len(out_C),
        SIZE=len(parts_GC) + (own_C is not None), RANK=rank, BLOCK=_BLOCK, HAS_RESIDUAL=residual_C is not None,
        num_warps=8,
    )  # fmt: skip
