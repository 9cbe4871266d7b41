"""The reference kernels: all operations in plain torch."""

from specbatch.kernels.torch.acceptance import accept_chain
from specbatch.kernels.torch.attention import attend
from specbatch.kernels.torch.beam import beam_expand, beam_start
from specbatch.kernels.torch.block_heads import add_bottleneck, gru_step
from specbatch.kernels.torch.delta import delta_prompts, delta_rounds, gated_norm, sigmoid_mul
from specbatch.kernels.torch.edits import edit_logits
from specbatch.kernels.torch.fp8 import act_mul_quantised, quantise, rms_norm_quantised, scaled_linear
from specbatch.kernels.torch.gemm import gated_linear, linear, norm_gated_linear, norm_linear
from specbatch.kernels.torch.grammars import advance_states, follow_trees, forbid_by_states
from specbatch.kernels.torch.integers import integer_gated_linear, integer_linear
from specbatch.kernels.torch.logprobs import logprobs
from specbatch.kernels.torch.long_sequences import long_sequences
from specbatch.kernels.torch.mixture import fused_experts, route, route_and_norm
from specbatch.kernels.torch.model import (
    act_mul,
    activated,
    add_normed,
    layer_norm,
    move_slots,
    norm_whole_heads,
    rms_norm,
    rotary_write,
    rotate,
    soft_capped,
)
from specbatch.kernels.torch.ngram import corpus_drafts, corpus_updates, join_chains, ngram_lookup
from specbatch.kernels.torch.prefixes import attend_prefixes
from specbatch.kernels.torch.sampling import argmax, argmax_and_margin, distribution, draw, sample, uniform
from specbatch.kernels.torch.steps import commit_round, pack_nodes, share_budget, span_layout
from specbatch.kernels.torch.tree import (
    choose_chain,
    count_right,
    draft_topk,
    judge_chains,
    largest_left,
    select_nodes,
    tree_mask_bits,
)
from specbatch.kernels.torch.workspace import Workspace

__all__ = [
    "Workspace",
    "accept_chain",
    "act_mul",
    "act_mul_quantised",
    "activated",
    "add_bottleneck",
    "add_normed",
    "advance_states",
    "argmax",
    "argmax_and_margin",
    "attend",
    "attend_prefixes",
    "beam_expand",
    "beam_start",
    "choose_chain",
    "commit_round",
    "corpus_drafts",
    "corpus_updates",
    "count_right",
    "delta_prompts",
    "delta_rounds",
    "distribution",
    "draft_topk",
    "draw",
    "edit_logits",
    "follow_trees",
    "forbid_by_states",
    "fused_experts",
    "gated_linear",
    "gated_norm",
    "gru_step",
    "integer_gated_linear",
    "integer_linear",
    "join_chains",
    "judge_chains",
    "largest_left",
    "layer_norm",
    "linear",
    "logprobs",
    "long_sequences",
    "move_slots",
    "ngram_lookup",
    "norm_gated_linear",
    "norm_linear",
    "norm_whole_heads",
    "pack_nodes",
    "quantise",
    "rms_norm",
    "rms_norm_quantised",
    "rotary_write",
    "rotate",
    "route",
    "route_and_norm",
    "sample",
    "scaled_linear",
    "select_nodes",
    "share_budget",
    "sigmoid_mul",
    "soft_capped",
    "span_layout",
    "tree_mask_bits",
    "uniform",
]
