"""Changes to the target's logits before acceptance: the rules of requests, for every node of a draft tree.

A rule is a function of the text that leads to a node: the prompt, what is committed, and the nodes of its own path. So
speculative output is that of plain decoding. Tokens are counted as integers, and all else is computed element by
element: nothing depends on the batch.

The order is that of vLLM: forbidden tokens (grammar, allowed_token_ids, bad_words, min_tokens), logit_bias,
repetition_penalty, frequency_penalty, presence_penalty.

On a GPU shapes are fixed and the host reads nothing; on a CPU only requests with rules are edited.

Shape suffixes: B requests of a batch, C of them, N tree nodes, T computed tokens, V vocabulary, L longest text, W words
of a mask, K bad words, M tokens of one before its last.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from specbatch.batch import Edits
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.cache.rule_table import ANY_TOKEN, NO_TEXT, RuleTable
from specbatch.draft.method import DraftTrees

_MAX_ELEMENTS = 1 << 24  # logits that are edited at once: temporary tensors are not larger


class _Nodes(NamedTuple):
    """The trees of C requests."""

    line_C: Tensor  # int64, of the tables
    length_C: Tensor  # int64, tokens before the root
    tokens_CN: Tensor  # int64
    depths_CN: Tensor  # int64
    sees_CNN: Tensor  # bool: node j lies on the path to node n (itself included); not of the root

    def part(self, requests: slice, num_nodes: int) -> _Nodes:
        return _Nodes(
            self.line_C[requests],
            self.length_C[requests],
            self.tokens_CN[requests, :num_nodes],
            self.depths_CN[requests, :num_nodes],
            self.sees_CNN[requests, :num_nodes, :num_nodes],
        )


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
    """The logits under the rules of `state.rules`. `edits`: all kinds that requests of the batch have. Of each request
    its first `num_nodes` nodes are computed, all N where shapes are fixed. `keep`: `logits_TV` must not change."""
    if not edits:
        return logits_TV
    rules = state.rules
    assert rules is not None, "no request has brought rules"
    if edits & Edits.VALUES:
        wanted = torch.promote_types(logits_TV.dtype, torch.float32)
        logits_TV = logits_TV.to(wanted, copy=keep)
    elif keep:
        logits_TV = logits_TV.clone()
    nodes = _nodes(view, trees)
    hit_BNK = _bad_words_begun(rules, nodes, state.tokens_SL) if edits & Edits.BAD_WORDS else None
    for requests, num_nodes, rows in _parts(rules, view, trees, logits_TV, fixed_shapes):
        part = nodes.part(requests, num_nodes)
        x_CNV = logits_TV[rows].view(-1, num_nodes, logits_TV.shape[1])
        if edits & (Edits.MASK | Edits.NODE_MASK):
            _forbid(rules, part, x_CNV, edits, ops)
        if hit_BNK is not None:
            ends_CNK = rules.bad_ends_SC[part.line_C][:, None].expand(-1, num_nodes, -1)
            forbidden_CNK = torch.where(hit_BNK[requests, :num_nodes], -torch.inf, 0.0)
            x_CNV.scatter_add_(2, ends_CNK, forbidden_CNK.to(x_CNV.dtype))
        if edits & Edits.VALUES:
            longest = None if fixed_shapes else int(part.length_C.max()) + 1
            _change_values(rules, part, state.tokens_SL, x_CNV, longest)
    return logits_TV


def _nodes(view: BatchView, trees: DraftTrees) -> _Nodes:
    batch, num_nodes = trees.tokens_BN.shape
    nodes = torch.arange(num_nodes, device=trees.tokens_BN.device)
    if trees.mask_BNW is None:
        sees_BNN = (nodes <= nodes[:, None]).expand(batch, -1, -1)
    else:
        sees_BNN = ((trees.mask_BNW[:, :, nodes >> 5] >> (nodes & 31)) & 1).bool()
    depths_BN = (nodes if trees.depths_BN is None else trees.depths_BN).expand(batch, -1)
    return _Nodes(view.req_idx_B, view.length_B, trees.tokens_BN, depths_BN, sees_BNN & (nodes > 0))


def _parts(
    rules: RuleTable, view: BatchView, trees: DraftTrees, logits_TV: Tensor, fixed_shapes: bool
) -> Iterator[tuple[slice, int, slice]]:
    """Some requests of the batch, the number of nodes of each, and their rows of the logits."""
    batch, num_nodes = trees.tokens_BN.shape
    if fixed_shapes:
        step = max(1, _MAX_ELEMENTS // (num_nodes * logits_TV.shape[1]))
        for first in range(0, batch, step):
            end = min(first + step, batch)
            yield slice(first, end), num_nodes, slice(first * num_nodes, end * num_nodes)
        return
    counts = [num_nodes] * batch if trees.num_nodes_B is None else trees.num_nodes_B.tolist()
    row = 0
    for i, (kinds, count) in enumerate(zip(rules.edits_S[view.req_idx_B].tolist(), counts, strict=True)):
        if kinds:
            yield slice(i, i + 1), count, slice(row, row + count)
        row += count


def _forbid(rules: RuleTable, nodes: _Nodes, x_CNV: Tensor, edits: Edits, ops: ModuleType) -> None:
    """The logits of tokens that masks forbid become -inf, in place."""
    line, num_nodes = nodes.line_C, x_CNV.shape[1]
    num_output_CN = (nodes.length_C + 1 - rules.num_prompt_S[line])[:, None] + nodes.depths_CN
    is_late_CN = num_output_CN >= rules.min_tokens_S[line][:, None]
    masks_C2W = rules.masks_S2W[line]
    allowed_CNW = torch.where(is_late_CN[:, :, None], masks_C2W[:, None, 1], masks_C2W[:, None, 0])
    if edits & Edits.NODE_MASK:
        assert rules.node_masks_SNW is not None, "no room for masks of nodes"
        allowed_CNW &= rules.node_masks_SNW[line, :num_nodes]
    ops.forbid_tokens(x_CNV.view(-1, x_CNV.shape[2]), allowed_CNW.flatten(0, 1))


def _bad_words_begun(rules: RuleTable, nodes: _Nodes, tokens_SL: Tensor) -> Tensor:
    """(C, N, K) bool: the output up to a node ends with all but the last token of a bad word."""
    line_C1, starts_CKM = nodes.line_C[:, None], rules.bad_starts_SCM[nodes.line_C]
    hit_CNK = torch.ones((), dtype=torch.bool, device=tokens_SL.device)
    for back in range(starts_CKM.shape[2]):
        # The token of the path that lies `back` before the node: a node, or one before the drafts.
        depth_CN = nodes.depths_CN - back
        is_it_CNN = nodes.sees_CNN & (nodes.depths_CN[:, None] == depth_CN[:, :, None])
        drafted_CN = torch.where(is_it_CNN, nodes.tokens_CN[:, None], 0).sum(2)
        index_CN = nodes.length_C[:, None] + depth_CN
        written_CN = tokens_SL[line_C1, index_CN.clamp(0, tokens_SL.shape[1] - 1)].long()
        written_CN = torch.where(index_CN >= rules.num_prompt_S[line_C1], written_CN, NO_TEXT)
        token_CN = torch.where(depth_CN > 0, drafted_CN, written_CN)
        wanted_CK = starts_CKM[:, :, back]
        hit_CNK = hit_CNK & ((wanted_CK[:, None] == token_CN[:, :, None]) | (wanted_CK[:, None] == ANY_TOKEN))
    return hit_CNK


def _change_values(rules: RuleTable, nodes: _Nodes, tokens_SL: Tensor, x_CNV: Tensor, longest: int | None) -> None:
    """Biases and penalties, in place. `longest`: tokens of the longest text; None: it is not known."""
    line, num_nodes = nodes.line_C, x_CNV.shape[1]
    biases_CNK = rules.biases_SK[line].to(x_CNV.dtype)[:, None].expand(-1, num_nodes, -1)
    x_CNV.scatter_add_(2, rules.bias_ids_SK[line][:, None].expand(-1, num_nodes, -1), biases_CNK)

    text_CL = tokens_SL[line, :longest].long()
    position = torch.arange(text_CL.shape[1], device=text_CL.device)
    is_text_CL = position <= nodes.length_C[:, None]
    is_output_CL = is_text_CL & (position >= rules.num_prompt_S[line][:, None])
    shape = x_CNV.shape[0], x_CNV.shape[2]
    num_text_CV, num_output_CV = (
        torch.zeros(shape, dtype=torch.int32, device=x_CNV.device).scatter_add_(1, text_CL, counted.int())
        for counted in (is_text_CL, is_output_CL)
    )
    penalties_C311 = rules.penalties_S3[line].to(x_CNV.dtype)[:, :, None, None]
    tokens_CNN = nodes.tokens_CN[:, None].expand(-1, num_nodes, -1).clamp(min=0)
    before_CNN = x_CNV.gather(2, tokens_CNN)
    # First the tokens of the text, as if a path had no drafts. A token that is there twice is written twice, equally.
    text_CL = torch.where(is_text_CL, text_CL, text_CL[:, :1])
    text_CNL, output_C1L = text_CL[:, None].expand(-1, num_nodes, -1), num_output_CV.gather(1, text_CL)[:, None]
    here = torch.ones_like(output_C1L, dtype=torch.bool)
    x_CNV.scatter_(2, text_CNL, _penalised(x_CNV.gather(2, text_CNL), here, output_C1L, penalties_C311))
    # Then the tokens of the tree, from what their logits were.
    is_same_CNN = nodes.tokens_CN[:, :, None] == nodes.tokens_CN[:, None]
    on_path_CNN = (nodes.sees_CNN[:, :, :, None] & is_same_CNN[:, None]).sum(2)  # of each node's token, at each node
    in_text_CNN, output_CNN = (
        counts.gather(1, tokens_CNN[:, 0])[:, None] + on_path_CNN for counts in (num_text_CV, num_output_CV)
    )
    x_CNV.scatter_(2, tokens_CNN, _penalised(before_CNN, in_text_CNN > 0, output_CNN, penalties_C311))


def _penalised(x: Tensor, in_text: Tensor, num_output: Tensor, penalties_C311: Tensor) -> Tensor:
    """Logits under repetition, frequency and presence penalties (as transformers and vLLM compute them)."""
    repetition, frequency, presence = penalties_C311.unbind(1)
    factor = torch.where(in_text, repetition, 1.0)
    x = torch.where(x > 0, x / factor, x * factor)
    return x - frequency * num_output - presence * (num_output > 0)
