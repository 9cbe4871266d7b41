# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Keys, values and weights in FP8 (E4M3) as operands in float16 or bfloat16 (Triton).

Hopper converts two E4M3 numbers to float16 in one instruction. It has no such conversion to bfloat16: through float16,
each number costs one more instruction, on a unit that is slower than the memory. And float16 holds each E4M3 number
exactly, NaN included.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The exponent of float32: its bits, and the largest that queries may have.
_EXPONENT = tl.constexpr(0x7F800000)
_LARGEST_EXPONENT = tl.constexpr(14 << 23)  # queries become smaller than 2^14


@triton.jit
def half_queries(q):
    """Return queries (M, D) in float16, and the power of two (M,) by which each was divided, so that none is too large.
    bfloat16 numbers above 2^-27 of a query's largest stay exact. Numbers that are not finite stay so."""
    wide = q.to(tl.float32)
    exponent = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True) & _EXPONENT
    is_number = (exponent > _LARGEST_EXPONENT) & (exponent < _EXPONENT)
    unit = tl.where(is_number, exponent - _LARGEST_EXPONENT + (1 << 23), 127 << 23).to(tl.float32, bitcast=True)
    return (wide / unit[:, None]).to(tl.float16), unit


_IS_COMPILED = tl.constexpr(isinstance(half_queries, triton.JITFunction))  # the interpreter has no assembler


@triton.jit
def unpack_pairs(pairs_ND):
    """Unpack int16 numbers, each of which is two of E4M3, to two tensors of float16: the first and the second of each
    pair.

    A tensor core takes values as columns. With 16 bits for each number a tile is transposed while it is read from
    shared memory, with 8 bits byte by byte; so values are read as pairs.
    """
    if _IS_COMPILED:  # two instructions for two numbers, where Triton's own conversions need three
        first, second = tl.inline_asm_elementwise(
            """{
            .reg .b16 a, b;
            .reg .b32 x, y;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 x, a;
            cvt.rn.f16x2.e4m3x2 y, b;
            prmt.b32 $0, x, y, 0x5410;
            prmt.b32 $1, x, y, 0x7632;
            }""",
            "=r,=r,r",
            [pairs_ND],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first = (pairs_ND & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = ((pairs_ND >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return first, second


@triton.jit
def operand(x, like):
    """Return x in the dtype of `like`, so that tensor cores add its features in the same order with every tile.

    If Triton sees that an operand was loaded with 8 bits, a small tile adds every second pair of features before the
    others (its `kWidth` is 4), and a large one does not. So Triton must not see it.
    """
    wide = x.to(like.dtype)
    if _IS_COMPILED and x.dtype.primitive_bitwidth == 8 and wide.dtype.primitive_bitwidth == 16:
        wide = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [wide], dtype=wide.dtype, is_pure=False, pack=2)
    return wide


@triton.jit
def bfloat16_operand(x):
    """Return E4M3 numbers in bfloat16, which is exact, with two and a half instructions each that are not conversions.
    NaN becomes 480. As in `operand`, Triton does not see that the numbers were loaded with 8 bits. It is for GPUs of
    compute capability 8 or later."""
    # The bits of a number, moved to those of a bfloat16, are 2^-120 of it, also where that is subnormal.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 t, a, b, power, zero;
        mov.b32 power, 0x7B807B80;
        mov.b32 zero, 0x80008000;
        prmt.b32 t, $2, 0, 0x1404;
        shr.u32 a, t, 4;
        and.b32 a, a, 0x07F007F0;
        lop3.b32 b, t, 0x80008000, a, 0xEA;
        fma.rn.bf16x2 $0, b, power, zero;
        prmt.b32 t, $2, 0, 0x3424;
        shr.u32 a, t, 4;
        and.b32 a, a, 0x07F007F0;
        lop3.b32 b, t, 0x80008000, a, 0xEA;
        fma.rn.bf16x2 $1, b, power, zero;
        }""",
        "=r,=r,r",
        [x],
        dtype=tl.bfloat16,
        is_pure=False,
        pack=4,
    )
