"""Changes to the target's logits before acceptance: the rules of requests, for every node of a draft tree.

A rule is a function of the text that leads to a node: the prompt, what is committed, and the nodes of its own path. So
speculative output is that of plain decoding.

On a GPU shapes are fixed and the host reads nothing; on a CPU only requests with rules are edited.

Shape suffixes: B requests of a batch, N tree nodes, T computed tokens, V vocabulary.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from specbatch.batch import Edits, TreeNodes
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.draft.method import DraftTrees


def edited_logits(
    state: RequestTable,
    view: BatchView,
    trees: DraftTrees,
    logits_TV: Tensor,
    edits: Edits,
    ops: ModuleType,
    *,
    fixed_shapes: bool,
    keep: bool,
) -> Tensor:
    """Return the logits under the rules of `state.rules` and of grammars. `edits`: all kinds of edits that requests of
    the batch have.
    `fixed_shapes`: all N nodes of each request are computed, otherwise only its first `num_nodes`. `keep`: `logits_TV`
    must not change."""
    if not edits:
        return logits_TV
    if edits & Edits.VALUES:
        wanted = torch.promote_types(logits_TV.dtype, torch.float32)
        logits_TV = logits_TV.to(wanted, copy=keep)
    elif keep:
        logits_TV = logits_TV.clone()
    if edits & Edits.GRAMMAR:
        _forbid_by_grammars(state, view, trees, logits_TV, ops, fixed_shapes=fixed_shapes)
    if edits is Edits.GRAMMAR:
        return logits_TV
    rules = state.rules
    assert rules is not None, "no request has brought rules"
    nodes = TreeNodes(view.req_idx_B, view.length_B, trees.tokens_BN, trees.depths_BN, trees.mask_BNW)
    if fixed_shapes:
        ops.edit_logits(logits_TV, nodes, rules, state.tokens_SL, edits)
        return logits_TV
    batch, num_nodes = trees.tokens_BN.shape
    counts = [num_nodes] * batch if trees.num_nodes_B is None else trees.num_nodes_B.tolist()
    kinds, ends = rules.edits_S[view.req_idx_B].tolist(), (view.length_B + 1).tolist()
    row = 0
    for i, count in enumerate(counts):
        if kinds[i] & edits:
            text_SL = state.tokens_SL[:, : ends[i]]
            kind = Edits(kinds[i]) & edits
            ops.edit_logits(logits_TV[row : row + count], nodes.of_request(i, count), rules, text_SL, kind)
        row += count
    return logits_TV


def _forbid_by_grammars(
    state: RequestTable,
    view: BatchView,
    trees: DraftTrees,
    logits_TV: Tensor,
    ops: ModuleType,
    *,
    fixed_shapes: bool,
) -> None:
    assert state.grammars is not None
    assert trees.states_BN is not None
    states_BN = trees.states_BN
    lines_BN = view.req_idx_B[:, None].expand_as(states_BN)
    states_T, lines_T = states_BN.reshape(-1), lines_BN.reshape(-1)
    if not fixed_shapes and trees.num_nodes_B is not None:
        is_node_BN = torch.arange(states_BN.shape[1]) < trees.num_nodes_B[:, None]
        states_T, lines_T = states_BN[is_node_BN], lines_BN[is_node_BN]
    ops.forbid_by_states(logits_TV, states_T, lines_T, state.ints_SF, state.grammars)
