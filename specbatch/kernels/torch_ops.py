"""All operations as plain torch: see `kernels.ops_for`."""

from specbatch.kernels.torch_linear import gated_linear, linear, norm_gated_linear, norm_linear
from specbatch.kernels.torch_model import Workspace, attend, move_slots, rms_norm, rotary_write, silu_mul
from specbatch.kernels.torch_round import (
    accept_chain,
    accept_path,
    argmax,
    beam_step,
    distribution,
    draft_topk,
    ngram_lookup,
    sample,
    select_nodes,
    uniform,
)

__all__ = [
    "Workspace",
    "accept_chain",
    "accept_path",
    "argmax",
    "attend",
    "beam_step",
    "distribution",
    "draft_topk",
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
    "uniform",
]
