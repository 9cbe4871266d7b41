"""Acceptance of drafts: the walk down a tree, and rejection sampling of a chain.

Shape suffixes as in `sampling.py`; S drawn drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.batch import NO_TOKEN
from specbatch.kernels.torch.sampling import draw


def accept_path(tokens_BN: Tensor, parents_BN: Tensor, choice_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Find the accepted path. It goes from the root to the child that holds the target's own choice, and so on until
    there is no such child.

    `choice_BN` is the target's argmax or sample at every node. `parents_BN` is -1 at the root, node 0, and -2 at
    nodes that are padding. A parent comes before its children, and siblings hold distinct tokens.

    Return (path_BN, num_path_B), int64: the accepted nodes from the root down, padded with 0, and their number,
    1 .. N. The next token is `choice_BN` at the last of them.
    """
    num_nodes = tokens_BN.shape[1]
    nodes = torch.arange(num_nodes, device=tokens_BN.device)
    ancestor = parents_BN.clamp(min=0)
    kept = (nodes == 0) | ((parents_BN >= 0) & (tokens_BN == choice_BN.gather(1, ancestor)))
    # A node is accepted if it and all its ancestors are the choice at their parent. Each turn doubles the distance.
    for _ in range((num_nodes - 1).bit_length()):
        kept = kept & kept.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    path = torch.where(kept, nodes, num_nodes).sort(dim=1).values
    return torch.where(path < num_nodes, path, 0), kept.sum(dim=1)


def accept_chain(
    drafts_BD: Tensor,
    q_BSW: Tensor,
    target_ids_W: Tensor | None,
    p_BNV: Tensor,
    num_drafts_B: Tensor,
    temperature_B: Tensor,
    u_accept_BD: Tensor,
    u_residual_BD: Tensor,
    u_sample_BN: Tensor,
    index_BN: Tensor | None = None,
    is_given_B: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accept drafts of a chain by rejection sampling (Leviathan et al. 2023, Chen et al. 2023). Draft i, drawn from
    q_i, is accepted as long as u * q_i(x) < p_i(x). The first rejected draft is replaced by a draw from max(p_i - q_i,
    0). If all `num_drafts_B` drafts are accepted, the next token is drawn from p.

    `drafts_BD`: target token ids. `q_BSW`: the distributions from which the first S were drawn, over draft tokens. Past
    them q is 0: such a draft is accepted if it is possible. `is_given_B`: bool, the rows whose drafts were not drawn,
    so q is 1 at each of them; None: there are none. A rejected one is replaced by a draw from p without it.
    `target_ids_W`: the (distinct) target ids of draft tokens; None: draft ids are target ids, W <= V. `p_BNV`: the
    target's distribution after each node; N = D + 1, and node i + 1 is draft i. `index_BN`: p is (T, V), and this is
    the row of each node that a chain comes to; None: each node has a row. `u_accept_BD`, `u_residual_BD`: float64 draws
    for the token of draft i. `u_sample_BN`: those for the token after node i. In all three, [.., i] belongs to position
    num_computed_tokens + i + 1. Rows of temperature 0 have a one-hot p, and accept exactly the drafts that are the
    target's argmax, whatever their q.

    If q_i is NaN (see `distribution`), draft i is rejected and the token is drawn from p_i. If p is NaN at the end of
    the path, the token is NO_TOKEN.

    Return (num_path_B, next_token_B, num_broken_B), int64: 1 + the number of accepted drafts, the token after them,
    and the number of drafts whose q is NaN (0 for temperature 0, where q is not read).
    """
    if index_BN is not None:
        p_BNV = p_BNV[index_BN]
    num_drafts, vocab = drafts_BD.shape[1], p_BNV.shape[2]
    num_drawn = min(num_drafts, q_BSW.shape[1])
    q_BSV = widen(q_BSW[:, :num_drawn], target_ids_W, vocab)
    greedy_B1 = (temperature_B == 0)[:, None]
    given_B1 = torch.zeros_like(greedy_B1) if is_given_B is None else is_given_B[:, None]
    draft_BD1 = drafts_BD[:, :, None]
    p_BD = p_BNV[:, :num_drafts].gather(2, draft_BD1)[:, :, 0].double()
    q_BS = q_BSV.gather(2, draft_BD1[:, :num_drawn])[:, :, 0].double()
    q_BD = torch.where(greedy_B1 | given_B1, 1.0, torch.nn.functional.pad(q_BS, (0, num_drafts - num_drawn)))
    real = torch.arange(num_drafts, device=drafts_BD.device) < num_drafts_B[:, None]
    broken_BD = real & q_BD.isnan()
    accepted = real & (u_accept_BD * q_BD < p_BD)
    num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)

    last_B1 = num_accepted[:, None]
    rejected_B1 = last_B1 < num_drafts_B[:, None]
    first_rejected_B1 = last_B1.clamp(max=num_drafts - 1)
    p_BV = _row(p_BNV, last_B1).double()
    drawn_BV = _row(q_BSV, first_rejected_B1.clamp(max=num_drawn - 1)).double()
    given_BV = torch.zeros_like(p_BV).scatter(1, drafts_BD.gather(1, first_rejected_B1), 1.0)
    q_BV = torch.where(given_B1, given_BV, torch.where(first_rejected_B1 < num_drawn, drawn_BV, 0.0))
    residual = (p_BV - q_BV).clamp(min=0.0)
    # Without a residual, p = q up to rounding, and a rejection has probability zero.
    usable = rejected_B1 & ~greedy_B1 & (residual.sum(dim=1, keepdim=True) > 0.0)
    usable &= ~broken_BD.gather(1, first_rejected_B1)
    u = torch.where(rejected_B1, u_residual_BD.gather(1, first_rejected_B1), u_sample_BN.gather(1, last_B1))
    token = draw(torch.where(usable, residual, p_BV), u[:, 0])
    return num_accepted + 1, torch.where(p_BV[:, 0].isnan(), NO_TOKEN, token), broken_BD.sum(dim=1)


def widen(q_BDW: Tensor, target_ids_W: Tensor | None, vocab: int) -> Tensor:
    """Return distributions over draft tokens as distributions over the target's vocabulary (B, D, V)."""
    if target_ids_W is None:
        return torch.nn.functional.pad(q_BDW, (0, vocab - q_BDW.shape[2]))
    wide = q_BDW.new_zeros((*q_BDW.shape[:2], vocab))
    return wide.scatter(2, target_ids_W.expand_as(q_BDW), q_BDW)


def _row(x_BMV: Tensor, index_B1: Tensor) -> Tensor:
    """Return the row of each sequence at its index, (B, V)."""
    return x_BMV.gather(1, index_B1[:, :, None].expand(-1, -1, x_BMV.shape[2]))[:, 0]
