"""Changes to the target's logits by the rules of requests, in plain torch.

Tokens are counted as integers, and all else is computed element by element, so results do not depend on the batch.

Shape suffixes: B requests, N tree nodes, V vocabulary, L tokens of a text, W words of a mask, K entries, M tokens of a
bad word before its last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.batch import ANY_TOKEN, NO_TEXT, Edits, RuleBuffers, TreeNodes


def edit_logits(logits_TV: Tensor, nodes: TreeNodes, rules: RuleBuffers, tokens_SL: Tensor, edits: Edits) -> None:
    """Apply the rules of each request to the logits after each of its nodes, in place: T = B * N rows.

    The order is that of vLLM: forbidden tokens (masks, bad words), biases, repetition, frequency, presence penalty.
    `edits`: the kinds that requests may have; with VALUES, logits are float32 or wider. `tokens_SL`: the text of each
    line, the root included.
    """
    batch, num_nodes = nodes.tokens_BN.shape
    x_BNV = logits_TV.view(batch, num_nodes, -1)
    depths_BN, sees_BNN = _paths(nodes)
    if edits & (Edits.MASK | Edits.NODE_MASK):
        _forbid(rules, nodes.req_idx_B, nodes.length_B[:, None] + depths_BN, x_BNV, edits)
    if edits & Edits.BAD_WORDS:
        ends_BNK = rules.bad_ends_SC[nodes.req_idx_B][:, None].expand(-1, num_nodes, -1)
        hit_BNK = _bad_words_begun(rules, nodes, depths_BN, sees_BNN, tokens_SL)
        x_BNV.scatter_add_(2, ends_BNK, torch.where(hit_BNK, -torch.inf, 0.0).to(x_BNV.dtype))
    if edits & Edits.VALUES:
        _change_values(rules, nodes, sees_BNN, tokens_SL, x_BNV)


def _paths(nodes: TreeNodes) -> tuple[Tensor, Tensor]:
    """Return the depths (B, N) int64, and (B, N, N) bool, which says whether node j is on the path to node n, n itself
    included but the root not."""
    batch, num_nodes = nodes.tokens_BN.shape
    index = torch.arange(num_nodes, device=nodes.tokens_BN.device)
    if nodes.mask_BNW is None:
        sees_BNN = (index <= index[:, None]).expand(batch, -1, -1)
    else:
        sees_BNN = ((nodes.mask_BNW[:, :, index >> 5] >> (index & 31)) & 1).bool()
    depths_BN = index if nodes.depths_BN is None else nodes.depths_BN
    return depths_BN.expand(batch, -1), sees_BNN & (index > 0)


def _forbid(rules: RuleBuffers, line_B: Tensor, position_BN: Tensor, x_BNV: Tensor, edits: Edits) -> None:
    num_nodes = x_BNV.shape[1]
    num_output_BN = position_BN + 1 - rules.num_prompt_S[line_B][:, None]
    is_late_BN = num_output_BN >= rules.min_tokens_S[line_B][:, None]
    masks_B2W = rules.masks_S2W[line_B]
    allowed_BNW = torch.where(is_late_BN[:, :, None], masks_B2W[:, None, 1], masks_B2W[:, None, 0])
    if edits & Edits.NODE_MASK:
        assert rules.node_masks_SNW is not None, "no room for masks of nodes"
        allowed_BNW &= rules.node_masks_SNW[line_B, :num_nodes]
    bits = torch.arange(32, dtype=torch.int32, device=allowed_BNW.device)
    allowed_BNV = ((allowed_BNW[..., None] >> bits) & 1).bool().flatten(2)[..., : x_BNV.shape[2]]
    x_BNV.masked_fill_(~allowed_BNV, -torch.inf)


def _bad_words_begun(
    rules: RuleBuffers, nodes: TreeNodes, depths_BN: Tensor, sees_BNN: Tensor, tokens_SL: Tensor
) -> Tensor:
    """Return (B, N, K) bool: whether the output up to a node ends with all but the last token of a bad word."""
    starts_BKM, line_B11 = rules.bad_starts_SCM[nodes.req_idx_B], nodes.req_idx_B[:, None, None]
    # The tokens of the path, the node's own first: nodes, and then what is written before the drafts.
    depth_BNM = depths_BN[:, :, None] - torch.arange(starts_BKM.shape[2], device=depths_BN.device)
    is_it_BNMN = sees_BNN[:, :, None] & (depths_BN[:, None, None] == depth_BNM[..., None])
    drafted_BNM = torch.where(is_it_BNMN, nodes.tokens_BN[:, None, None], 0).sum(3)
    index_BNM = nodes.length_B[:, None, None] + depth_BNM
    written_BNM = tokens_SL[line_B11, index_BNM.clamp(0, tokens_SL.shape[1] - 1)].long()
    written_BNM = torch.where(index_BNM >= rules.num_prompt_S[line_B11], written_BNM, NO_TEXT)
    token_BNM = torch.where(depth_BNM > 0, drafted_BNM, written_BNM)
    return ((starts_BKM[:, None] == token_BNM[:, :, None]) | (starts_BKM[:, None] == ANY_TOKEN)).all(3)


def _change_values(rules: RuleBuffers, nodes: TreeNodes, sees_BNN: Tensor, tokens_SL: Tensor, x_BNV: Tensor) -> None:
    """Apply biases and penalties."""
    line_B, num_nodes = nodes.req_idx_B, x_BNV.shape[1]
    biases_BNK = rules.biases_SK[line_B].to(x_BNV.dtype)[:, None].expand(-1, num_nodes, -1)
    x_BNV.scatter_add_(2, rules.bias_ids_SK[line_B][:, None].expand(-1, num_nodes, -1), biases_BNK)

    text_BL = tokens_SL[line_B].long()
    position = torch.arange(text_BL.shape[1], device=text_BL.device)
    is_text_BL = position <= nodes.length_B[:, None]
    is_output_BL = is_text_BL & (position >= rules.num_prompt_S[line_B][:, None])
    shape = x_BNV.shape[0], x_BNV.shape[2]
    num_text_BV, num_output_BV = (
        torch.zeros(shape, dtype=torch.int32, device=x_BNV.device).scatter_add_(1, text_BL, counted.int())
        for counted in (is_text_BL, is_output_BL)
    )
    penalties_B311 = rules.penalties_S3[line_B].to(x_BNV.dtype)[:, :, None, None]
    tokens_BNN = nodes.tokens_BN[:, None].expand(-1, num_nodes, -1).clamp(min=0)
    before_BNN = x_BNV.gather(2, tokens_BNN)
    # The tokens of the text come first, as if a path had no drafts. A token that is in the text twice is written twice
    # with the same value.
    text_BL = torch.where(is_text_BL, text_BL, text_BL[:, :1])
    text_BNL, output_B1L = text_BL[:, None].expand(-1, num_nodes, -1), num_output_BV.gather(1, text_BL)[:, None]
    here = torch.ones_like(output_B1L, dtype=torch.bool)
    x_BNV.scatter_(2, text_BNL, _penalised(x_BNV.gather(2, text_BNL), here, output_B1L, penalties_B311))
    # The tokens of the tree come next. They start from the logits before this.
    is_same_BNN = nodes.tokens_BN[:, :, None] == nodes.tokens_BN[:, None]
    on_path_BNN = (sees_BNN[:, :, :, None] & is_same_BNN[:, None]).sum(2)  # counts of each node's token
    in_text_BNN, output_BNN = (
        counts.gather(1, tokens_BNN[:, 0])[:, None] + on_path_BNN for counts in (num_text_BV, num_output_BV)
    )
    x_BNV.scatter_(2, tokens_BNN, _penalised(before_BNN, in_text_BNN > 0, output_BNN, penalties_B311))


def _penalised(x: Tensor, in_text: Tensor, num_output: Tensor, penalties_B311: Tensor) -> Tensor:
    """Return logits with repetition, frequency and presence penalties, as transformers and vLLM compute them."""
    repetition, frequency, presence = penalties_B311.unbind(1)
    factor = torch.where(in_text, repetition, 1.0)
    x = torch.where(x > 0, x / factor, x * factor)
    return x - frequency * num_output - presence * (num_output > 0)
