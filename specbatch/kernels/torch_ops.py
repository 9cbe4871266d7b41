"""All operations as plain torch: see `kernels.ops_for`."""

from specbatch.kernels.torch_linear import gated_linear, linear, norm_gated_linear, norm_linear
from specbatch.kernels.torch_mask import tree_mask_bits
from specbatch.kernels.torch_model import Workspace, attend, move_slots, rms_norm, rotary_write, silu_mul
from specbatch.kernels.torch_round import (
    accept_chain,
    argmax,
    distribution,
    draft_topk,
    draw,
    ngram_lookup,
    sample,
    select_nodes,
    uniform,
)
from specbatch.kernels.torch_steps import beam_expand, beam_start, commit_round, span_layout

__all__ = [
    "Workspace",
    "accept_chain",
    "argmax",
    "attend",
    "beam_expand",
    "beam_start",
    "commit_round",
    "distribution",
    "draft_topk",
    "draw",
    "gated_linear",
    "linear",
    "move_slots",
    "ngram_lookup",
    "norm_gated_linear",
    "norm_linear",
    "rms_norm",
    "rotary_write",
    "sample",
    "select_nodes",
    "silu_mul",
    "span_layout",
    "tree_mask_bits",
    "uniform",
]
