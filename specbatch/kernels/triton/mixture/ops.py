# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Mixtures of experts: the choice of experts, one GEMM for gate and up and one for down, and the sum.

A *choice* is one expert of one token; a token has K of them, and choice n belongs to token n // K. A program of a GEMM
multiplies a part of one expert's weight with at most `block_m` choices of it. Of few tokens a program finds the choices
of its expert itself; the choices of more tokens are sorted before, see `sorting.py`. No number of choices ever leaves
the GPU: the grid has as many programs as the worst distribution needs, and those without work end at once.

`kernels/torch/mixture.py` defines the results.

Shape suffixes: T packed tokens, X experts, K experts of a token, N = T K choices, B blocks, E hidden size, I inner
features of an expert.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specbatch.kernels.activations import Activation
from specbatch.kernels.experts import ExpertWeights, Routing
from specbatch.kernels.mxfp4 import MXFP4_GROUP
from specbatch.kernels.quantised import GROUP
from specbatch.kernels.triton.mixture.kernel import combine_kernel, expert_gemm, route_kernel
from specbatch.kernels.triton.mixture.sorting import sorted_blocks
from specbatch.kernels.triton.mixture.tile import MAX_UNSORTED, ExpertTile, fitting, tiles_for, tokens_of_a_program
from specbatch.kernels.triton.parts.launch import dependent_launch, launch, launch_options
from specbatch.kernels.triton.parts.shared_memory import like_hopper, shared_bytes
from specbatch.kernels.triton.parts.tma import can_use_tma


def route(logits_TX: Tensor, routing: Routing, correction_X: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `kernels/torch/mixture.py`."""
    return _route(logits_TX, routing, correction_X, None, None, 0.0)[:2]


def route_and_norm(
    logits_TX: Tensor,
    routing: Routing,
    correction_X: Tensor | None,
    x_TE: Tensor,
    norm_weight_E: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels/torch/mixture.py`."""
    return _route(logits_TX, routing, correction_X, x_TE.contiguous(), norm_weight_E, eps)


def _route(
    logits_TX: Tensor,
    routing: Routing,
    correction_X: Tensor | None,
    x_TE: Tensor | None,
    norm_weight_E: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (num_tokens, num_experts), top_k = logits_TX.shape, routing.top_k
    dtype = torch.float32 if routing.scoring == "sigmoid" else logits_TX.dtype
    weights_TK = logits_TX.new_empty(num_tokens, top_k, dtype=dtype)
    experts_TK = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits_TX.device)
    normed_TE = logits_TX if x_TE is None else torch.empty_like(x_TE)
    if not num_tokens:
        return weights_TK, experts_TK, normed_TE
    assert logits_TX.stride(1) == 1, logits_TX.stride()
    size = 0 if x_TE is None else x_TE.shape[1]
    pdl = dependent_launch(logits_TX)
    launch(
        route_kernel, (num_tokens, 1 if x_TE is None else 2),
        logits_TX, logits_TX if correction_X is None else correction_X, weights_TK, experts_TK, x_TE, norm_weight_E,
        normed_TE, logits_TX.stride(0), eps,
        X=num_experts, K=top_k, K_POWER=triton.next_power_of_2(top_k), X_POWER=triton.next_power_of_2(num_experts),
        SCORING=routing.scoring, NORM=routing.norm_topk_prob, GROUPS=routing.num_groups,
        GROUPS_POWER=triton.next_power_of_2(routing.num_groups), TOPK_GROUPS=routing.topk_groups, SCALE=routing.scale,
        HAS_CORRECTION=correction_X is not None, SIZE=size, SIZE_POWER=triton.next_power_of_2(max(size, 1)), PDL=pdl,
        num_warps=1, **launch_options(pdl),
    )  # fmt: skip
    return weights_TK, experts_TK, normed_TE


class _Blocks:
    """The blocks into which the choices of each expert are divided; a program of a GEMM has one. If they are not
    sorted, there is a block for each choice, and the program of an expert's first choice takes all choices of it."""

    def __init__(self, experts_TK: Tensor, first: int, num_experts: int, block_m: int, pdl: bool) -> None:
        num_tokens = experts_TK.shape[0]
        self.first = first
        self.experts, self.num_choices, self.block_m, self.pdl = experts_TK, experts_TK.numel(), block_m, pdl
        self.are_sorted = num_tokens > block_m or num_tokens > MAX_UNSORTED
        self.experts_B: Tensor | None = None  # the expert of each block; None: they are not sorted
        self.members_BM: Tensor | None = None  # the choices of each block
        self.count = self.num_choices  # blocks
        if not self.are_sorted:
            return
        self.experts_B, self.members_BM = sorted_blocks(experts_TK, first, num_experts, block_m, pdl)
        self.count = len(self.experts_B)


def fused_experts(
    x_TE: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    experts: ExpertWeights,
    residual_TE: Tensor | None = None,
    block_m: int | None = None,
    tiles: tuple[ExpertTile, ExpertTile] | None = None,
) -> Tensor:
    """See `kernels/torch/mixture.py`. `tiles`: those of gate and up, and of down, in place of the measured ones."""
    num_tokens, top_k = experts_TK.shape
    num_experts, hidden_size, _ = experts.down_XEI.shape
    y_TE = x_TE.new_empty(num_tokens, hidden_size)
    if not num_tokens:
        return y_TE
    if residual_TE is not None:
        residual_TE = residual_TE.contiguous()
    total, dtype = experts.total or num_experts, experts.down_XEI.dtype
    block_m = block_m or tokens_of_a_program(num_tokens, total, top_k, dtype)
    blocks = _Blocks(experts_TK, experts.first, num_experts, block_m, dependent_launch(x_TE))
    first, second = tiles or tiles_for(block_m, experts.down_XEI.dtype)
    gate_up = experts.gate_up_XFE, experts.gate_up_scales_XFG, experts.gate_up_bias_XF
    inner_NI = _multiply(x_TE.contiguous(), top_k, *gate_up, blocks, first, experts.activation)
    down = experts.down_XEI, experts.down_scales_XEG, experts.down_bias_XE
    of_experts_NE = _multiply(inner_NI, 1, *down, blocks, second)
    block = min(triton.next_power_of_2(hidden_size), 1024)
    launch(
        combine_kernel, (num_tokens, triton.cdiv(hidden_size, block)),
        y_TE, of_experts_NE, weights_TK, residual_TE, experts_TK, SIZE=hidden_size, K=top_k, BLOCK=block,
        FIRST=experts.first, HELD=num_experts, IS_PART=experts.total is not None,
        HAS_RESIDUAL=residual_TE is not None, PDL=blocks.pdl, num_warps=4, **launch_options(blocks.pdl),
    )  # fmt: skip
    return y_TE


def _multiply(
    x: Tensor,  # (N / divisor, I)
    divisor: int,
    weight_XOI: Tensor,  # (X, 2 O, I) with an activation
    scales_XOG: Tensor | None,  # None: the weight is not quantised
    bias_XO: Tensor | None,
    blocks: _Blocks,
    tile: ExpertTile,
    activation: Activation | None = None,
) -> Tensor:
    """Return (N, O): each choice's token, or its row if `divisor` is 1, times its expert's weight."""
    num_experts, num_rows, _ = weight_XOI.shape
    num_in = x.shape[1]
    assert weight_XOI.is_contiguous(), weight_XOI.stride()
    parts = 1 if activation is None else 2
    num_out = num_rows // parts
    is_mxfp4, is_fp8 = weight_XOI.dtype == torch.uint8, weight_XOI.dtype == torch.float8_e4m3fn
    has_tma = x.is_cuda and like_hopper(x.device) and num_in * weight_XOI.element_size() % 16 == 0
    has_tma = has_tma and can_use_tma(tile.num_warps, to_registers=parts == 2 or is_fp8)
    num_groups = scales_XOG.shape[2] if is_fp8 and scales_XOG is not None else 0
    block_i = GROUP if num_groups > 1 else None
    tile = fitting(tile, blocks.block_m, x.element_size(), shared_bytes(x), has_tma=has_tma, block_i=block_i)
    block_o = min(tile.block_o // parts, triton.next_power_of_2(num_out))
    block_i = block_i or max(16, min(tile.block_i, triton.next_power_of_2(num_in)))
    assert (is_mxfp4 or is_fp8) == (scales_XOG is not None), weight_XOI.dtype
    assert not is_mxfp4 or block_i % MXFP4_GROUP == num_in % MXFP4_GROUP == 0, (block_i, num_in)
    assert num_groups in (0, 1, triton.cdiv(num_in, GROUP)), (num_groups, num_in)
    assert scales_XOG is None or scales_XOG.is_contiguous(), scales_XOG.stride()
    y_NO = x.new_empty(blocks.num_choices, num_out)
    operand = None
    if tile.tma and not is_mxfp4:
        operand = TensorDescriptor.from_tensor(
            weight_XOI.view(num_experts * parts, num_out, num_in), [parts, block_o, block_i]
        )
    launch(
        expert_gemm, (blocks.count * triton.cdiv(num_out, block_o),),
        y_NO, x, weight_XOI, scales_XOG, bias_XO, operand, blocks.experts, blocks.experts_B, blocks.members_BM,
        blocks.num_choices,
        OUT=num_out, IN=num_in, DIVISOR=divisor, BLOCK_M=blocks.block_m, BLOCK_O=block_o, BLOCK_I=block_i,
        STAGES=tile.num_stages, GATED=parts == 2, ACTIVATION=activation or "silu",
        HAS_BIAS=bias_XO is not None, MXFP4=is_mxfp4, FP8=is_fp8, GROUPS=num_groups,
        PACKED=x.is_cuda and x.dtype == torch.bfloat16, TMA=operand is not None,
        SORTED=blocks.are_sorted, FIRST=blocks.first, HELD=num_experts,
        N_POWER=triton.next_power_of_2(blocks.num_choices) if not blocks.are_sorted else 1,
        PDL=blocks.pdl, num_warps=tile.num_warps, **launch_options(blocks.pdl),
    )  # fmt: skip
    return y_NO
