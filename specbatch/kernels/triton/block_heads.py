# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The steps of the heads of block drafters (Triton). They run once for each draft, one after the other, and with few
branches the launches take longer than the arithmetic. So each step is few kernels.

Shape suffixes as in `kernels/torch/block_heads.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specbatch.kernels.matrix import Matrix
from specbatch.kernels.triton.parts.launch import await_former, dependent_launch, launch, launch_options

_BLOCK_R = 16  # units of a state, or inner features, of one program
_BLOCK_W = 64  # tokens of the draft vocabulary of one program
_BLOCK_I = 64  # inputs that are multiplied at once


@triton.jit
def _product(x_ptrs, x_mask, w_ptr, w_stride, rows, row_mask, IN: tl.constexpr, sums, BLOCK_I: tl.constexpr):
    """Add x W^T to `sums`. `x_ptrs`: the first element of each row of x. `rows`: those of W."""
    for start in tl.range(0, IN, BLOCK_I):
        offs = start + tl.arange(0, BLOCK_I)
        x = tl.load(x_ptrs[:, None] + offs[None, :], mask=x_mask[:, None] & (offs < IN)[None, :], other=0.0)
        w = tl.load(
            w_ptr + rows[None, :] * w_stride + offs[:, None], mask=row_mask[None, :] & (offs < IN)[:, None], other=0.0
        )
        sums = tl.dot(x, w, sums, input_precision="ieee")
    return sums


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit(do_not_specialize=["count"])
def _gru_step(
    input_ptr, state_ptr, parents_ptr, of_input_ptr, of_state_ptr, out_ptr, count, stride,
    IN: tl.constexpr, SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_PARENTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    units = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    branches = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_unit, is_branch = units < SIZE, branches < count
    await_former(PDL)
    reset = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    update = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    candidate = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    x_ptrs = input_ptr + branches.to(tl.int64) * stride
    for start in tl.range(0, IN, BLOCK_I):
        offs = start + tl.arange(0, BLOCK_I)
        x = tl.load(x_ptrs[:, None] + offs[None, :], mask=is_branch[:, None] & (offs < IN)[None, :], other=0.0)
        w_ptrs = of_input_ptr + units[None, :] * IN + offs[:, None]
        mask = is_unit[None, :] & (offs < IN)[:, None]
        reset = tl.dot(x, tl.load(w_ptrs, mask=mask, other=0.0), reset, input_precision="ieee")
        update = tl.dot(x, tl.load(w_ptrs + SIZE * IN, mask=mask, other=0.0), update, input_precision="ieee")
        candidate = tl.dot(x, tl.load(w_ptrs + 2 * SIZE * IN, mask=mask, other=0.0), candidate, input_precision="ieee")
    old = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    of_state = tl.zeros((BLOCK_T, BLOCK_R), tl.float32)
    if HAS_STATE:
        parents = branches.to(tl.int64)
        if HAS_PARENTS:
            parents = tl.load(parents_ptr + branches, mask=is_branch, other=0)
        s_ptrs = state_ptr + parents * SIZE
        for start in tl.range(0, SIZE, BLOCK_I):
            offs = start + tl.arange(0, BLOCK_I)
            s = tl.load(s_ptrs[:, None] + offs[None, :], mask=is_branch[:, None] & (offs < SIZE)[None, :], other=0.0)
            w_ptrs = of_state_ptr + units[None, :] * SIZE + offs[:, None]
            mask = is_unit[None, :] & (offs < SIZE)[:, None]
            reset = tl.dot(s, tl.load(w_ptrs, mask=mask, other=0.0), reset, input_precision="ieee")
            update = tl.dot(s, tl.load(w_ptrs + SIZE * SIZE, mask=mask, other=0.0), update, input_precision="ieee")
            of_state = tl.dot(
                s, tl.load(w_ptrs + 2 * SIZE * SIZE, mask=mask, other=0.0), of_state, input_precision="ieee"
            )
        both = is_branch[:, None] & is_unit[None, :]
        old = tl.load(s_ptrs[:, None] + units[None, :], mask=both, other=0.0).to(tl.float32)
    candidate = _tanh(candidate + tl.sigmoid(reset) * of_state)
    new = candidate + tl.sigmoid(update) * (old - candidate)
    out_ptrs = out_ptr + branches.to(tl.int64)[:, None] * SIZE + units[None, :]
    tl.store(out_ptrs, new.to(out_ptr.dtype.element_ty), mask=is_branch[:, None] & is_unit[None, :])


def gru_step(
    input_TI: Tensor, state_PR: Tensor | None, parents_T: Tensor | None, of_input_GI: Matrix, of_state_GR: Matrix
) -> Tensor:
    """See `kernels/torch/block_heads.py`. Sums and gates are in float32."""
    assert isinstance(of_input_GI, Tensor)
    assert isinstance(of_state_GR, Tensor)
    count, num_inputs = input_TI.shape
    size = of_state_GR.shape[1]
    assert input_TI.stride(1) == 1
    assert of_input_GI.is_contiguous()
    assert of_state_GR.is_contiguous()
    assert state_PR is None or state_PR.is_contiguous()
    out = input_TI.new_empty((count, size))
    block, pdl = _block_of(count), dependent_launch(input_TI)
    launch(
        _gru_step, (triton.cdiv(size, _BLOCK_R), triton.cdiv(count, block)),
        input_TI, out if state_PR is None else state_PR, out if parents_T is None else parents_T.contiguous(),
        of_input_GI, of_state_GR, out, count, input_TI.stride(0), IN=num_inputs, SIZE=size, BLOCK_T=block,
        BLOCK_R=_BLOCK_R, BLOCK_I=_BLOCK_I, HAS_STATE=state_PR is not None, HAS_PARENTS=parents_T is not None, PDL=pdl,
        num_stages=4, **launch_options(pdl),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count", "branches_of_one"])
def _inner(
    inner_ptr, state_ptr, of_state_ptr, out_ptr, count, branches_of_one, stride,
    SIZE: tl.constexpr, INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    features = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    branches = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_feature, is_branch = features < INNER, branches < count
    await_former(PDL)
    both = is_branch[:, None] & is_feature[None, :]
    requests = (branches // branches_of_one).to(tl.int64)
    sums = tl.load(inner_ptr + requests[:, None] * stride + features[None, :], mask=both, other=0.0).to(tl.float32)
    sums = _product(
        state_ptr + branches.to(tl.int64) * SIZE, is_branch, of_state_ptr, SIZE, features, is_feature, SIZE, sums,
        BLOCK_I,
    )  # fmt: skip
    out_ptrs = out_ptr + branches.to(tl.int64)[:, None] * INNER + features[None, :]
    tl.store(out_ptrs, (sums * tl.sigmoid(sums)).to(out_ptr.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["count", "branches_of_one"])
def _add_of_inner(
    logits_ptr, inner_ptr, of_inner_ptr, out_ptr, count, branches_of_one, width, stride,
    INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    branches = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token, is_branch = tokens < width, branches < count
    await_former(PDL)
    both = is_branch[:, None] & is_token[None, :]
    requests = (branches // branches_of_one).to(tl.int64)
    logits = tl.load(logits_ptr + requests[:, None] * stride + tokens[None, :], mask=both, other=0.0)
    sums = _product(
        inner_ptr + branches.to(tl.int64) * INNER, is_branch, of_inner_ptr, INNER, tokens, is_token, INNER,
        logits.to(tl.float32), BLOCK_I,
    )  # fmt: skip
    out_ptrs = out_ptr + branches.to(tl.int64)[:, None] * width + tokens[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=both)


def add_bottleneck(
    logits_BW: Tensor, inner_BX: Tensor, state_TR: Tensor, of_state_XR: Matrix, of_inner_WX: Matrix
) -> Tensor:
    """See `kernels/torch/block_heads.py`. Sums are in float32."""
    assert isinstance(of_state_XR, Tensor)
    assert isinstance(of_inner_WX, Tensor)
    count, size = state_TR.shape
    width, num_inner = of_inner_WX.shape
    assert logits_BW.stride(1) == inner_BX.stride(1) == 1
    assert state_TR.is_contiguous()
    assert of_state_XR.is_contiguous()
    assert of_inner_WX.is_contiguous()
    inner, out = state_TR.new_empty((count, num_inner)), logits_BW.new_empty((count, width))
    block, each, pdl = _block_of(count), count // len(logits_BW), dependent_launch(state_TR)
    options = dict(BLOCK_T=block, BLOCK_I=_BLOCK_I, PDL=pdl, num_stages=4, **launch_options(pdl))
    launch(
        _inner, (triton.cdiv(num_inner, _BLOCK_R), triton.cdiv(count, block)),
        inner_BX, state_TR, of_state_XR, inner, count, each, inner_BX.stride(0),
        SIZE=size, INNER=num_inner, BLOCK_X=_BLOCK_R, **options,
    )  # fmt: skip
    launch(
        _add_of_inner, (triton.cdiv(width, _BLOCK_W), triton.cdiv(count, block)),
        logits_BW, inner, of_inner_WX, out, count, each, width, logits_BW.stride(0),
        INNER=num_inner, BLOCK_W=_BLOCK_W, **options,
    )  # fmt: skip
    return out


def _block_of(count: int) -> int:
    """Return the branches of one program."""
    return min(64, max(16, triton.next_power_of_2(count)))
