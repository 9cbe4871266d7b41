# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Tiles of weights in whole numbers inside kernels (Triton). `kernels/integers.py` has the layout.

In bfloat16 the bits 0x4300 + n are the number 128 + n for each n of 4 bits. So a number costs a part of a shift, a mask
and a permutation of bytes, and one subtraction. That is for GPUs of compute capability 8 or later.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack_bytes(values, zeros, dtype: tl.constexpr):
    """Return numbers of 8 bits (N, K) less their zero points (N, 1), which is exact. Both are uint8."""
    if _IS_COMPILED and dtype == tl.bfloat16:
        return _bytes_to_bfloat16(values, tl.broadcast_to(-zeros.to(tl.float32).to(dtype), values.shape))
    return (values.to(tl.float32) - zeros.to(tl.float32)).to(dtype)


@triton.jit
def unpack_nibbles(values, low_zeros, high_zeros, dtype: tl.constexpr):
    """Return the low and the high numbers of 4 bits of each byte (N, K) less their zero points (N, 1), which is exact.
    All are uint8."""
    if _IS_COMPILED and dtype == tl.bfloat16:
        low_less = tl.broadcast_to(-(low_zeros.to(tl.float32) + 128.0).to(dtype), values.shape)
        high_less = tl.broadcast_to(-(high_zeros.to(tl.float32) + 128.0).to(dtype), values.shape)
        return _nibbles_to_bfloat16(values, low_less, high_less)
    low = (values & 15).to(tl.float32) - low_zeros.to(tl.float32)
    high = (values >> 4).to(tl.float32) - high_zeros.to(tl.float32)
    return low.to(dtype), high.to(dtype)


_IS_COMPILED = tl.constexpr(isinstance(unpack_bytes, triton.JITFunction))  # the interpreter has no assembler


@triton.jit
def _nibbles_to_bfloat16(values, low_less, high_less):
    """`low_less`, `high_less`: -(128 + zero) in bfloat16, of the shape of values."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 n, a, one;
        mov.b32 one, 0x3F803F80;
        and.b32 n, $4, 0x0F0F0F0F;
        prmt.b32 a, n, 0x43434343, 0x7170;
        fma.rn.bf16x2 $0, a, one, $5;
        prmt.b32 a, n, 0x43434343, 0x7372;
        fma.rn.bf16x2 $1, a, one, $6;
        shr.u32 n, $4, 4;
        and.b32 n, n, 0x0F0F0F0F;
        prmt.b32 a, n, 0x43434343, 0x7170;
        fma.rn.bf16x2 $2, a, one, $7;
        prmt.b32 a, n, 0x43434343, 0x7372;
        fma.rn.bf16x2 $3, a, one, $8;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [values, low_less, high_less],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _bytes_to_bfloat16(values, less):
    """`less`: -zero in bfloat16, of the shape of values. A number is 16 h + l: 16 (128 + h) - 2176 and 128 + l are
    exact, and so is their sum."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 l, h, a, b, one, sixteen, shift;
        mov.b32 one, 0x3F803F80;
        mov.b32 sixteen, 0x41804180;
        mov.b32 shift, 0xC508C508;
        and.b32 l, $2, 0x0F0F0F0F;
        shr.u32 h, $2, 4;
        and.b32 h, h, 0x0F0F0F0F;
        prmt.b32 a, l, 0x43434343, 0x7170;
        prmt.b32 b, h, 0x43434343, 0x7170;
        fma.rn.bf16x2 b, b, sixteen, shift;
        fma.rn.bf16x2 a, a, one, b;
        fma.rn.bf16x2 $0, a, one, $3;
        prmt.b32 a, l, 0x43434343, 0x7372;
        prmt.b32 b, h, 0x43434343, 0x7372;
        fma.rn.bf16x2 b, b, sixteen, shift;
        fma.rn.bf16x2 a, a, one, b;
        fma.rn.bf16x2 $1, a, one, $4;
        }""",
        "=&r,=&r,r,r,r",
        [values, less],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )
