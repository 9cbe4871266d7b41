# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Tiles of a weight in MXFP4 inside GEMM kernels (Triton). `kernels/torch/mxfp4.py` has the layout.

Shape suffixes as there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.quantised import MXFP4_GROUP

_GROUP = tl.constexpr(MXFP4_GROUP)


@triton.jit
def load_mxfp4(
    values_ptr, scales_ptr, rows, row_ok, first, size_in, stride_values, stride_scales,
    BLOCK_K: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Return the weights (rows, BLOCK_K) of inputs [first, first + BLOCK_K) in `dtype`. What is not there is 0.

    `rows`: the numbers of outputs, int64 if offsets need it. `first`, BLOCK_K and `size_in`: multiples of MXFP4_GROUP.
    `stride_values`, `stride_scales`: bytes from one row to the next.
    """
    pairs = first // 2 + tl.arange(0, BLOCK_K // 2)
    groups = first // _GROUP + tl.arange(0, BLOCK_K // _GROUP)
    values_ok = row_ok[:, None] & (pairs < size_in // 2)[None, :]
    scales_ok = row_ok[:, None] & (groups < size_in // _GROUP)[None, :]
    values = tl.load(values_ptr + rows[:, None] * stride_values + pairs[None, :], mask=values_ok, other=0)
    scales = tl.load(scales_ptr + rows[:, None] * stride_scales + groups[None, :], mask=scales_ok, other=0)
    return unpack_mxfp4(values, scales, dtype)


@triton.jit
def unpack_mxfp4(values, scales, dtype: tl.constexpr):
    """Return the numbers (N, K) of bytes (N, K / 2) and scales (N, K / MXFP4_GROUP) in `dtype`."""
    N: tl.constexpr = values.shape[0]
    K: tl.constexpr = values.shape[1] * 2
    pairs = values.to(tl.int32)
    low, high = _numbers(pairs), _numbers(pairs >> 4)
    numbers = tl.reshape(tl.interleave(low, high), [N, K // _GROUP, _GROUP])
    # 2^(scale - 127) from its bits. That of scale 0 is a subnormal number.
    bits = tl.where(scales == 0, 1 << 22, scales.to(tl.int32) << 23)
    found = numbers * bits.to(tl.float32, bitcast=True)[:, :, None]
    return tl.reshape(found, [N, K]).to(dtype)


@triton.jit
def _numbers(codes):
    """Return the E2M1 numbers of the low four bits. As the top bits of a float32 they are 2^-126 of the number, also
    where it is subnormal."""
    bits = ((codes & 8) << 28) | ((codes & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
