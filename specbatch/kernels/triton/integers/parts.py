# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The shared parts of the kernels of `ops.py`: their first loads and their end. Shape suffixes as there."""

from __future__ import annotations

import triton
import triton.language as tl

from specbatch.kernels.triton.parts.elementwise import gate_and_up
from specbatch.kernels.triton.skinny.parts import prefetch_rows, rounded


@triton.jit
def prefetch_groups(
    pointer, row, group, OUT: tl.constexpr, GROUPS: tl.constexpr, OUTPUTS: tl.constexpr, GATED: tl.constexpr,
    COUNT: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Load scales or zero points into L2: those of OUTPUTS outputs from `row` on, of gate and of up if GATED, for up to
    COUNT groups from `group` on. Their loads would otherwise be the latest of a step. Nothing is loaded if memory is
    not aligned for the instruction."""
    WIDTH: tl.constexpr = 2 * OUT if GATED else OUT
    SIZE: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 8
    if (
        GROUPS > 1
        and OUT % OUTPUTS == 0
        and WIDTH * SIZE % 16 == 0
        and OUT * SIZE % 16 == 0
        and OUTPUTS * SIZE % 16 == 0
    ):
        for start in tl.static_range(0, COUNT, THREADS):
            prefetch_rows(pointer, group + start, GROUPS, WIDTH, row, min(COUNT - start, THREADS), OUTPUTS, THREADS)
            if GATED:
                prefetch_rows(
                    pointer, group + start, GROUPS, WIDTH, row + OUT, min(COUNT - start, THREADS), OUTPUTS, THREADS
                )


@triton.jit
def store_sums(
    acc, y, bias, residual, partial, row, tokens, split, M, OUT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store the sums (BLOCK_O, BLOCK_M) of outputs from `row` on. GATED: they are those of gate, then of up."""
    dtype: tl.constexpr = y.dtype.element_ty
    OUTPUTS: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    ok_m = tokens < M
    wide_tokens = tokens.to(tl.int64)[None, :]
    if SPLITS > 1:
        local = tl.arange(0, BLOCK_O)
        inside = row + local % OUTPUTS < OUT
        at = (split * M + wide_tokens) * (OUT * BLOCK_O // OUTPUTS)
        at += (row + local % OUTPUTS + local // OUTPUTS * OUT)[:, None]
        tl.store(partial + at, acc, mask=inside[:, None] & ok_m[None, :])
    else:
        outs = row + tl.arange(0, OUTPUTS)
        at = wide_tokens * OUT + outs[:, None]
        mask = (outs < OUT)[:, None] & ok_m[None, :]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OUTPUTS, BLOCK_M)), (1, 2, 0)))
            tl.store(y + at, gate_and_up(gate, up, ACTIVATION, dtype), mask=mask)
        else:
            b = acc
            r = acc
            if HAS_BIAS:
                b = tl.load(bias + outs, mask=outs < OUT, other=0.0)[:, None]
            if HAS_RESIDUAL:
                r = tl.load(residual + at, mask=mask, other=0.0)
            tl.store(y + at, rounded(acc, b, r, HAS_BIAS, HAS_RESIDUAL, dtype), mask=mask)
