# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Tiles of a weight in MXFP4 inside GEMM kernels (Triton). `kernels/torch/parts/mxfp4.py` has the layout.

Shape suffixes as there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.mxfp4 import MXFP4_GROUP

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
def load_mxfp4_bfloat16(
    values_ptr, scales_ptr, rows, first, size_in, stride_values, stride_scales, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Return what `load_mxfp4` does, in bfloat16, with three and a half instructions an element. All rows exist.
    MASKED: the last inputs may not exist. It is for GPUs of compute capability 8 or later."""
    GROUPS: tl.constexpr = BLOCK_K // _GROUP
    groups = tl.arange(0, GROUPS)
    pairs = groups[:, None] * (_GROUP // 2) + tl.arange(0, _GROUP // 2)[None, :]
    values_ptrs = values_ptr + rows[:, None, None] * stride_values + first // 2 + pairs[None, :, :]
    scales_ptrs = scales_ptr + rows[:, None] * stride_scales + first // _GROUP + groups[None, :]
    if MASKED:
        values = tl.load(values_ptrs, mask=(first // 2 + pairs < size_in // 2)[None, :, :], other=0)
        scales = tl.load(scales_ptrs, mask=(first // _GROUP + groups < size_in // _GROUP)[None, :], other=0)
    else:
        values = tl.load(values_ptrs)
        scales = tl.load(scales_ptrs)
    # 2^(scale - 127) from its bits. That of scale 0 is a subnormal number.
    bits = tl.where(scales == 0, 1 << 6, scales.to(tl.int16) << 7).to(tl.int16)
    factors = tl.broadcast_to(bits.to(tl.bfloat16, bitcast=True)[:, :, None], values.shape)
    # The bits of a code, moved to the top of a bfloat16, are 2^-126 of its number, also where that is subnormal.
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b32 t, a, b, power, zero;
        mov.b32 power, 0x7E807E80;
        mov.b32 zero, 0x80008000;
        prmt.b32 t, $4, 0, 0x4140;
        shl.b32 a, t, 12;
        shl.b32 b, t, 6;
        and.b32 a, a, 0x80008000;
        and.b32 b, b, 0x01C001C0;
        or.b32 a, a, b;
        fma.rn.bf16x2 a, a, power, zero;
        fma.rn.bf16x2 $0, a, $5, zero;
        shl.b32 a, t, 8;
        shl.b32 b, t, 2;
        and.b32 a, a, 0x80008000;
        and.b32 b, b, 0x01C001C0;
        or.b32 a, a, b;
        fma.rn.bf16x2 a, a, power, zero;
        fma.rn.bf16x2 $2, a, $5, zero;
        prmt.b32 t, $4, 0, 0x4342;
        shl.b32 a, t, 12;
        shl.b32 b, t, 6;
        and.b32 a, a, 0x80008000;
        and.b32 b, b, 0x01C001C0;
        or.b32 a, a, b;
        fma.rn.bf16x2 a, a, power, zero;
        fma.rn.bf16x2 $1, a, $6, zero;
        shl.b32 a, t, 8;
        shl.b32 b, t, 2;
        and.b32 a, a, 0x80008000;
        and.b32 b, b, 0x01C001C0;
        or.b32 a, a, b;
        fma.rn.bf16x2 a, a, power, zero;
        fma.rn.bf16x2 $3, a, $6, zero;
        }""",
        "=r,=r,=r,=r,r,r,r",
        [values, factors],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
    return tl.reshape(tl.interleave(low, high), [values.shape[0], BLOCK_K])


@triton.jit
def _numbers(codes):
    """Return the E2M1 numbers of the low four bits. As the top bits of a float32 they are 2^-126 of the number, also
    where it is subnormal."""
    bits = ((codes & 8) << 28) | ((codes & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
