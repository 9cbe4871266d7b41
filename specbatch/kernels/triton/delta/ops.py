# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The gated delta rule: `kernels/torch/delta.py` defines the results.

Rounds are two kernels. The first one computes the convolution. In the second one, each program reads a part of a state,
replays the accepted nodes of the last round, writes the part, and goes on over the new nodes without writing it.
Prompts are four kernels: the convolution, the part of the rule that all chunks of tokens compute at the same time, the
part that follows the state from chunk to chunk, and the inputs that are kept. No length leaves
the GPU, so graphs may hold them.

Shape suffixes: T packed tokens, B sequences, H value heads, V and K dimensions of value and key heads, C channels of
the convolution, Z features of all value heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specbatch.batch import PagedBatch
from specbatch.kernels.delta import CHUNK, DeltaWeights, LayerStates
from specbatch.kernels.triton.delta.kernel import (
    conv_kernel,
    gate_kernel,
    keep_kernel,
    node_conv_kernel,
    norm_kernel,
    prompt_kernel,
    round_kernel,
    system_kernel,
)
from specbatch.kernels.triton.parts.launch import dependent_launch, launch, launch_options

_BLOCK_T, _BLOCK_C = 16, 128
_GATE_BLOCK = 1024


class RoundTiles(NamedTuple):
    """The constants of a round's kernels. `warps`: of a part of a state. `conv_block`: channels of a program."""

    warps: int = 1
    conv_block: int = 1024
    conv_warps: int = 4


class PromptTiles(NamedTuple):
    """The constants of the kernel that moves states over prompts: value dimensions of a program, its warps, and the
    tokens that it computes at once."""

    part: int = 32
    warps: int = 4
    chunk: int = CHUNK


ROUND_TILES, PROMPT_TILES = RoundTiles(), PromptTiles()


def delta_prompts(
    qkv_TC: Tensor,
    gates_T2H: Tensor,
    weights: DeltaWeights,
    states: LayerStates,
    batch: PagedBatch,
    tiles: PromptTiles = PROMPT_TILES,
) -> Tensor:
    """See `kernels/torch/delta.py`."""
    spans, (num_tokens, channels) = batch.states, qkv_TC.shape
    assert spans is not None
    _, num_heads, value_dim, _ = states.states_SHVK.shape
    num_sequences, num_kept = len(spans.lines_B), states.inputs_SRC.shape[1]
    # Tokens after the last sequence, which are padding, keep these zeros.
    out_THV = qkv_TC.new_zeros(num_tokens, num_heads, value_dim)
    if not num_tokens:
        return out_THV
    mixed_TC = qkv_TC.new_empty(num_tokens, channels)
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=qkv_TC.device)
    sequences_T = torch.searchsorted(batch.query_starts[1:], tokens, right=True, out_int32=True)
    has_checkpoints = spans.checkpoint_at_B is not None
    at_B, line_B = (spans.lines_B, spans.lines_B) if spans.checkpoint_at_B is None else (
        spans.checkpoint_at_B, spans.checkpoint_line_B
    )  # fmt: skip
    layout = spans.lines_B, batch.starts_B, batch.query_starts
    blocks, conv_strides = triton.cdiv(channels, _BLOCK_C), weights.conv_CW.stride()[::-1]
    launch(
        conv_kernel, (triton.cdiv(num_tokens, _BLOCK_T), blocks),
        qkv_TC, mixed_TC, weights.conv_CW, states.inputs_SRC, *layout, sequences_T, *conv_strides, qkv_TC.stride(0),
        num_tokens, num_sequences, C=channels, W=weights.conv_CW.shape[1], NUM_KEPT=num_kept, BLOCK_T=_BLOCK_T,
        BLOCK_C=_BLOCK_C,
    )  # fmt: skip
    sizes, num_lengths = _sizes(weights, states), states.lengths_SP.shape[1] // num_heads
    shared = {"C": channels, "HAS_CHECKPOINTS": has_checkpoints, "CHUNK": tiles.chunk}
    precision = "tf32x3" if qkv_TC.dtype == torch.float32 else "tf32"
    systems = states.states_SHVK.new_empty(num_tokens, num_heads, 2, tiles.chunk)
    launch(
        system_kernel, (triton.cdiv(num_tokens, tiles.chunk), num_heads),
        mixed_TC, gates_T2H, systems, weights.decay_H, weights.bias_H, batch.starts_B, batch.query_starts, sequences_T,
        at_B, gates_T2H.stride(0), num_tokens, num_sequences, **{k: v for k, v in sizes.items() if k != "V"}, **shared,
        PRECISION=precision, num_warps=tiles.chunk // 16,
    )  # fmt: skip
    launch(
        prompt_kernel, (triton.cdiv(value_dim, tiles.part), num_heads, num_sequences),
        mixed_TC, gates_T2H, systems, out_THV, weights.decay_H, weights.bias_H, states.states_SHVK, states.lengths_SP,
        *layout, batch.slots_T, at_B, line_B, gates_T2H.stride(0), **sizes, **shared, LENGTHS=num_lengths,
        LENGTHS_POWER=triton.next_power_of_2(num_lengths), PART=tiles.part, PRECISION=precision, num_warps=tiles.warps,
    )  # fmt: skip
    launch(
        keep_kernel, (num_sequences, num_kept, blocks),
        qkv_TC, states.inputs_SRC, *layout, batch.slots_T, at_B, line_B, qkv_TC.stride(0),
        C=channels, NUM_KEPT=num_kept, BLOCK_C=_BLOCK_C, HAS_CHECKPOINTS=has_checkpoints, num_warps=1,
    )  # fmt: skip
    return out_THV


def delta_rounds(
    qkv_TC: Tensor,
    gates_T2H: Tensor,
    weights: DeltaWeights,
    states: LayerStates,
    batch: PagedBatch,
    tiles: RoundTiles = ROUND_TILES,
) -> Tensor:
    """See `kernels/torch/delta.py`. A program has as many value dimensions as `states` has in a part."""
    spans, (num_tokens, channels) = batch.states, qkv_TC.shape
    assert spans is not None
    assert batch.mask_TW is None, "states move along chains"
    _, num_heads, value_dim, _ = states.states_SHVK.shape
    conv_size, num_kept = weights.conv_CW.shape[1], states.inputs_SRC.shape[1]
    max_nodes = (num_kept - conv_size + 1) // 2
    assert batch.max_queries <= max_nodes, f"{batch.max_queries} nodes, and room for {max_nodes}"
    out_THV = qkv_TC.new_empty(num_tokens, num_heads, value_dim)
    if not num_tokens:
        return out_THV
    num_sequences, pdl = len(spans.lines_B), dependent_launch(qkv_TC)
    conv_strides = weights.conv_CW.stride()[::-1]
    mixed = qkv_TC.new_empty(num_sequences, 2 * max_nodes, channels)
    factors = states.states_SHVK.new_empty(num_sequences, 2 * max_nodes, 2 * num_heads)
    layout = spans.lines_B, batch.starts_B, batch.query_starts, batch.slots_T
    shared = {"C": channels, "MAX_NODES": max_nodes, "PDL": pdl}
    launch(
        node_conv_kernel, (triton.cdiv(channels, tiles.conv_block), 2 * max_nodes, num_sequences),
        qkv_TC, gates_T2H, mixed, factors, weights.conv_CW, states.inputs_SRC, states.gates_SR2H, weights.decay_H,
        weights.bias_H, states.lengths_SP, *layout, *conv_strides, qkv_TC.stride(0), gates_T2H.stride(0),
        LENGTHS=states.lengths_SP.shape[1], H=num_heads, H_POWER=triton.next_power_of_2(num_heads), W=conv_size,
        NUM_KEPT=num_kept, BLOCK_C=tiles.conv_block, **shared, num_warps=tiles.conv_warps, **launch_options(pdl),
    )  # fmt: skip
    sizes, num_parts = _sizes(weights, states), states.lengths_SP.shape[1] // num_heads
    key_power = sizes.pop("K_POWER")
    key_part = min(32, key_power)
    launch(
        round_kernel, (num_parts, num_heads, num_sequences),
        mixed, factors, out_THV, states.states_SHVK, states.lengths_SP, *layout, **sizes, PARTS=num_parts,
        PART=triton.next_power_of_2(triton.cdiv(value_dim, num_parts)), K_PARTS=key_power // key_part, K_PART=key_part,
        **shared, num_warps=tiles.warps, **launch_options(pdl),
    )  # fmt: skip
    return out_THV


def gated_norm(x_THV: Tensor, gate_TZ: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """See `kernels/torch/delta.py`."""
    num_tokens, num_heads, size = x_THV.shape
    out_TZ = x_THV.new_empty(num_tokens, num_heads * size)
    if not num_tokens:
        return out_TZ
    block_h, pdl = min(8, triton.next_power_of_2(num_heads)), dependent_launch(x_THV)
    launch(
        norm_kernel, (num_tokens, triton.cdiv(num_heads, block_h)),
        x_THV, gate_TZ, weight_V, out_TZ, eps, gate_TZ.stride(0),
        H=num_heads, V=size, V_POWER=triton.next_power_of_2(size), BLOCK_H=block_h, PDL=pdl, num_warps=2,
        **launch_options(pdl),
    )  # fmt: skip
    return out_TZ


def sigmoid_mul(x_THD: Tensor, gate_TZ: Tensor) -> Tensor:
    """See `kernels/torch/delta.py`."""
    out_THD, (num_tokens, size) = torch.empty_like(x_THD), gate_TZ.shape
    if num_tokens:
        assert x_THD.is_contiguous()
        pdl = dependent_launch(x_THD)
        launch(
            gate_kernel, (num_tokens, triton.cdiv(size, _GATE_BLOCK)),
            x_THD, gate_TZ, out_THD, gate_TZ.stride(0), SIZE=size, BLOCK=_GATE_BLOCK, PDL=pdl, num_warps=4,
            **launch_options(pdl),
        )  # fmt: skip
    return out_THD


def _sizes(weights: DeltaWeights, states: LayerStates) -> dict[str, int]:
    _, num_heads, value_dim, key_dim = states.states_SHVK.shape
    return {
        **{"H": num_heads, "KEY_HEADS": weights.num_key_heads, "K": key_dim, "V": value_dim},
        "K_POWER": max(16, triton.next_power_of_2(key_dim)),
    }
