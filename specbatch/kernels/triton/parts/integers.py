# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Tiles of weights in whole numbers inside kernels (Triton). `kernels/integers.py` has the layout.

In bfloat16 the bits 0x4300 + n are the number 128 + n for each n of 4 bits; in float16 the bits 0x6400 + n are the
number 1024 + n. So two numbers of two words cost a shift, a `lop3` and a subtraction. bfloat16 is for GPUs of compute
capability 8 or later.

A word has 16 bits, like the numbers that tensor cores get. So Triton reads words from shared memory in the arrangement
of an operand, and numbers stay where they are unpacked.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack_nibbles(words, z0, z1, z2, z3, dtype: tl.constexpr):
    """Return the four numbers of 4 bits of each word (N, K) less their zero points (N, 1), which is exact. `words`:
    int16. `z0` to `z3`: zero points, uint8."""
    if _IS_COMPILED and dtype == tl.bfloat16:
        less0 = tl.broadcast_to(_less(z0, 128.0, dtype), words.shape)
        less1 = tl.broadcast_to(_less(z1, 128.0, dtype), words.shape)
        less2 = tl.broadcast_to(_less(z2, 128.0, dtype), words.shape)
        less3 = tl.broadcast_to(_less(z3, 128.0, dtype), words.shape)
        return _nibbles_to_bfloat16(words, less0, less1, less2, less3)
    if _IS_COMPILED and dtype == tl.float16:
        less0 = tl.broadcast_to(_less(z0, 1024.0, dtype), words.shape)
        less1 = tl.broadcast_to(_less(z1, 1024.0, dtype), words.shape)
        less2 = tl.broadcast_to(_less(z2, 1024.0, dtype), words.shape)
        less3 = tl.broadcast_to(_less(z3, 1024.0, dtype), words.shape)
        return _nibbles_to_float16(words, less0, less1, less2, less3)
    return (
        _difference(words & 15, z0, dtype),
        _difference((words >> 4) & 15, z1, dtype),
        _difference((words >> 8) & 15, z2, dtype),
        _difference((words >> 12) & 15, z3, dtype),
    )


_IS_COMPILED = tl.constexpr(isinstance(unpack_nibbles, triton.JITFunction))  # the interpreter has no assembler


@triton.jit
def unpack_bytes(words, z0, z1, dtype: tl.constexpr):
    """Return the two numbers of 8 bits of each word (N, K) less their zero points (N, 1), which is exact."""
    if _IS_COMPILED and dtype == tl.bfloat16:
        less0 = tl.broadcast_to(-z0.to(tl.float32).to(dtype), words.shape)
        less1 = tl.broadcast_to(-z1.to(tl.float32).to(dtype), words.shape)
        return _bytes_to_bfloat16(words, less0, less1)
    return _difference(words & 255, z0, dtype), _difference((words >> 8) & 255, z1, dtype)


@triton.jit
def _less(zeros, offset: tl.constexpr, dtype: tl.constexpr):
    """Return -(offset + zero)."""
    return -(zeros.to(tl.float32) + offset).to(dtype)


@triton.jit
def _difference(numbers, zeros, dtype: tl.constexpr):
    return (numbers.to(tl.float32) - zeros.to(tl.float32)).to(dtype)


@triton.jit
def _nibbles_to_bfloat16(words, less0, less1, less2, less3):
    """`less0` to `less3`: -(128 + zero) in bfloat16, of the shape of words."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 n, a, one;
        mov.b32 one, 0x3F803F80;
        lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, a, one, $5;
        shr.u32 n, $4, 4;
        lop3.b32 a, n, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $1, a, one, $6;
        shr.u32 n, $4, 8;
        lop3.b32 a, n, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $2, a, one, $7;
        shr.u32 n, $4, 12;
        lop3.b32 a, n, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $3, a, one, $8;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [words, less0, less1, less2, less3],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _nibbles_to_float16(words, less0, less1, less2, less3):
    """`less0` to `less3`: -(1024 + zero) in float16, of the shape of words."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 n, a;
        lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
        add.rn.f16x2 $0, a, $5;
        shr.u32 n, $4, 4;
        lop3.b32 a, n, 0x000F000F, 0x64006400, 0xEA;
        add.rn.f16x2 $1, a, $6;
        shr.u32 n, $4, 8;
        lop3.b32 a, n, 0x000F000F, 0x64006400, 0xEA;
        add.rn.f16x2 $2, a, $7;
        shr.u32 n, $4, 12;
        lop3.b32 a, n, 0x000F000F, 0x64006400, 0xEA;
        add.rn.f16x2 $3, a, $8;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [words, less0, less1, less2, less3],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _bytes_to_bfloat16(words, less0, less1):
    """`less0`, `less1`: -zero in bfloat16, of the shape of words. A number is 16 h + l: 16 (128 + h) - 2176 and 128 + l
    are exact, and so is their sum."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 n, a, b, one, sixteen, shift;
        mov.b32 one, 0x3F803F80;
        mov.b32 sixteen, 0x41804180;
        mov.b32 shift, 0xC508C508;
        lop3.b32 a, $2, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 n, $2, 4;
        lop3.b32 b, n, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 b, b, sixteen, shift;
        fma.rn.bf16x2 a, a, one, b;
        fma.rn.bf16x2 $0, a, one, $3;
        shr.u32 n, $2, 8;
        lop3.b32 a, n, 0x000F000F, 0x43004300, 0xEA;
        shr.u32 n, $2, 12;
        lop3.b32 b, n, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 b, b, sixteen, shift;
        fma.rn.bf16x2 a, a, one, b;
        fma.rn.bf16x2 $1, a, one, $4;
        }""",
        "=&r,=&r,r,r,r",
        [words, less0, less1],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )
