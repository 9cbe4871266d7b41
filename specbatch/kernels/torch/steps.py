"""The small steps between the large operations of a round, in plain torch. On a GPU each is one kernel: as torch
operations they would be dozens of launches over a few numbers, which take longer than a layer of a small model.

Shape suffixes: S slots, F fields, B sequences, N tree nodes, M longest path (root counted), Q new tokens of a sequence,
T = B * Q packed tokens (or B * M), P pages of a table, L longest token list, K topk, C candidates, W words of a mask or
draft vocabulary, Z columns of the round output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.batch import (
    LIKELY_BITS,
    LIKELY_COLUMNS,
    LIKELY_KNOWN,
    LIKELY_PER_COLUMN,
    LOG_BOUNDS_K,
    NO_TOKEN,
    Committed,
    Field,
    PackedNodes,
    Spans,
    slots_of,
)
from specbatch.kernels.torch.acceptance import accept_path


def span_layout(
    page_table_BP: Tensor,
    page_size: int,
    length_B: Tensor,
    done_B: Tensor,
    num_queries: int,
    *,
    start: int = 0,
    position: int = 0,
    position_stride: int = 1,
    depths_BQ: Tensor | None = None,
    num_written_B: Tensor | None = None,
    mask_start: int = 0,
) -> Spans:
    """Lay out `num_queries` new tokens of each sequence. Token q is in slot length + start + q of its pages, at
    position length + position + q * position_stride, or with `depths_BQ` (int64) at length + position + depth. The
    first `num_written_B` tokens of live sequences (done_B = 0) are written. mask_starts_B is length + mask_start.

    `length_B`, `done_B` and `num_written_B` are int64 and may be columns of a wider table.
    """
    batch, device = length_B.shape[0], length_B.device
    query = torch.arange(num_queries, device=device)
    index = length_B[:, None] + start + query
    written = ((done_B == 0)[:, None]) & (query < (num_queries if num_written_B is None else num_written_B[:, None]))
    slots = torch.where(written, slots_of(page_table_BP, page_size, index), -1)
    offset = query * position_stride if depths_BQ is None else depths_BQ
    positions = length_B[:, None] + position + offset
    return Spans(
        slots.view(-1),
        positions.reshape(-1),
        (length_B + start).int(),
        (length_B + mask_start).int(),
        torch.arange(0, (batch + 1) * num_queries, num_queries, dtype=torch.int32, device=device),
    )


def share_budget(scores_BN: Tensor, done_B: Tensor, num_verified: int) -> Tensor:
    """Share a round's budget of nodes among chains: return how many nodes of each are verified, (B,) int64, 1 .. N.
    They are `num_verified` in all, of B .. B * N: all roots, and the drafts with the highest scores. Of equal scores, a
    node nearer to its root comes first, then an earlier sequence.

    `scores_BN`: float32, which do not rise along a chain. A chain that is done (`done_B` != 0) comes after the others.
    """
    batch, num_nodes = scores_BN.shape
    assert batch <= num_verified <= batch * num_nodes, (batch, num_verified, num_nodes)
    scores_BN = torch.where(scores_BN.isnan() | (done_B != 0)[:, None], -torch.inf, scores_BN)
    scores_BN = torch.cat((torch.full_like(scores_BN[:, :1], torch.inf), scores_BN[:, 1:]), dim=1)
    chosen = scores_BN.t().reshape(-1).sort(descending=True, stable=True).indices[:num_verified]
    return torch.zeros_like(done_B, dtype=torch.int64).index_add_(0, chosen % batch, torch.ones_like(chosen))


def pack_nodes(
    counts_B: Tensor, tokens_BN: Tensor, slots_T: Tensor, positions_T: Tensor, num_verified: int
) -> PackedNodes:
    """Pack the first `counts_B` nodes of each sequence, `num_verified` in all. `slots_T` and `positions_T` are those of
    all B * N nodes."""
    batch, num_nodes = tokens_BN.shape
    nodes = torch.arange(num_nodes, device=counts_B.device)
    ends_B = counts_B.cumsum(0)
    index_BN = (ends_B - counts_B)[:, None] + torch.minimum(nodes, counts_B[:, None] - 1)
    # Nodes that are not verified are written to a place after the others.
    place_BN = torch.where(nodes < counts_B[:, None], index_BN, num_verified)
    nodes_T = torch.zeros(num_verified + 1, dtype=torch.int64, device=counts_B.device)
    nodes_T = nodes_T.scatter_(0, place_BN.view(-1), torch.arange(batch * num_nodes, device=counts_B.device))[:-1]
    return PackedNodes(
        nodes_T,
        index_BN,
        tokens_BN.reshape(-1)[nodes_T],
        slots_T[nodes_T],
        positions_T[nodes_T],
        torch.nn.functional.pad(ends_B, (1, 0)).int(),
    )


def commit_round(
    ints_SF: Tensor,
    tokens_SL: Tensor,
    page_table_SP: Tensor,
    req_idx_B: Tensor,
    page_size: int,
    eos_K: Tensor,
    max_path: int,
    tokens_BN: Tensor,
    choice_BN: Tensor | None = None,
    *,
    parents_BN: Tensor | None = None,
    depths_BN: Tensor | None = None,
    num_nodes_B: Tensor | None = None,
    path_BN: Tensor | None = None,
    num_path_B: Tensor | None = None,
    next_token_B: Tensor | None = None,
    num_broken_B: Tensor | None = None,
    scores_BN: Tensor | None = None,
    margin_BN: Tensor | None = None,
) -> Committed:
    """Accept and commit a round: choose the path, advance the requests, make the round output, and list the slots that
    have to move.

    Acceptance: `choice_BN` is the target's own token at every node. The path goes from the root to the child that holds
    the choice, until there is none: down the tree of `parents_BN` (see `accept_path`), else along a chain, of which
    `num_nodes_B` nodes are real (None: all). The path can also be given: `num_path_B` nodes of `path_BN` (None: of the
    chain). The token after the path is the choice at its end, else `next_token_B`.

    Commit, for live requests only: `ints_SF` (in place) gets the new length and root. It is marked done if a new token
    within the limit is a stop token or one of `eos_K` (unless the request ignores these), or if the limit is reached.
    The new tokens are written after the root in `tokens_SL` (in place; L = 0: no tokens are kept). If the token after
    the path is NO_TOKEN, the request is done, and later computations for it see token 0. `num_broken_B`
    goes to the output, and so do the numbers of nodes with scores (`scores_BN`, float32) of at least each of
    LOG_BOUNDS_K, and `margin_BN` (float32, after each node) for the path's nodes. Without it, and past the path,
    margins are infinite.

    All integers are int64, except tokens_SL and page_table_SP, which are int32. `req_idx_B`: each sequence's line of
    the tables; only a sequence that is done may repeat.
    """
    batch, num_nodes = tokens_BN.shape
    assert max_path <= num_nodes, f"a path of {max_path} in a tree of {num_nodes}"
    nodes = torch.arange(num_nodes, device=tokens_BN.device)
    if num_path_B is None:
        assert choice_BN is not None
        chain = (nodes - 1).expand(batch, -1)
        if num_nodes_B is not None:
            chain = torch.where(nodes < num_nodes_B[:, None], chain, -2)
        path_BN, num_path_B = accept_path(tokens_BN, chain if parents_BN is None else parents_BN, choice_BN)
    path = (nodes.expand(batch, -1) if path_BN is None else path_BN)[:, :max_path]
    offset = nodes[:max_path]
    on_path = offset < num_path_B[:, None]
    path = torch.where(on_path, path, 0)
    last = offset == num_path_B[:, None] - 1
    if next_token_B is None:
        assert choice_BN is not None
        next_token_B = choice_BN.gather(1, path.gather(1, num_path_B[:, None] - 1))[:, 0]
    failed = next_token_B == NO_TOKEN
    next_token_B = next_token_B.clamp(min=0)
    tokens = tokens_BN.gather(1, path).roll(-1, dims=1)
    tokens = torch.where(on_path, torch.where(last, next_token_B[:, None], tokens), 0)

    ints = ints_SF[req_idx_B]
    length, live = ints[:, Field.LENGTH], ints[:, Field.DONE] == 0
    room = ints[:, Field.LIMIT] - length - 1
    counted = offset < torch.minimum(num_path_B, room)[:, None]
    eos = (tokens[:, :, None] == eos_K).any(dim=2) & (ints[:, Field.IGNORE_EOS] == 0)[:, None]
    stops = ints[:, None, Field.STOP :]
    ends = ((eos | (tokens[:, :, None] == stops).any(dim=2)) & counted).any(dim=1)
    new = ints.clone()
    # The length stays below the limit, because a round that is already launched runs once more from here, without
    # effect.
    new[:, Field.LENGTH] = torch.minimum(length + num_path_B, ints[:, Field.LIMIT] - 1)
    new[:, Field.ROOT] = next_token_B
    new[:, Field.DONE] = (ends | failed | (num_path_B >= room)).long()
    ints_SF.index_copy_(0, req_idx_B, torch.where(live[:, None], new, ints))
    max_length = tokens_SL.shape[1]
    if max_length:
        index = length[:, None] + 1 + offset
        kept = on_path & live[:, None] & (index < max_length)
        # Tokens that are not kept write the request's first token over itself; no round changes it.
        index = torch.where(kept, index, 0)
        value = torch.where(kept, tokens, tokens_SL[req_idx_B, 0].long()[:, None])
        tokens_SL.index_put_((req_idx_B[:, None].expand_as(index), index), value.int())

    drafted = (num_nodes if num_nodes_B is None else num_nodes_B) - torch.ones_like(length)
    depth = drafted if depths_BN is None else depths_BN.amax(dim=1)
    broken = torch.zeros_like(length) if num_broken_B is None else num_broken_B
    if margin_BN is None:
        margin_BN = torch.full(tokens_BN.shape, torch.inf, device=tokens_BN.device)
    margins = torch.where(on_path, margin_BN.gather(1, path), torch.inf).view(torch.int32)
    counts = torch.stack((torch.where(live, num_path_B, 0), drafted, depth, broken), dim=1)
    likely_BC = _packed_counts(scores_BN, batch, counts.device)
    shown = torch.where(last & failed[:, None], NO_TOKEN, tokens)
    table = page_table_SP[req_idx_B]
    moves = live[:, None] & on_path & (path != offset)
    target = torch.where(moves, slots_of(table, page_size, length[:, None] + offset), -1)
    return Committed(
        path,
        num_path_B,
        tokens,
        torch.cat((counts.int(), likely_BC, shown.int(), margins), dim=1),
        (torch.arange(batch, device=path.device)[:, None] * num_nodes + path).view(-1),
        slots_of(table, page_size, length[:, None] + path).view(-1),
        target.view(-1),
    )


def _packed_counts(scores_BN: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """Return the columns of the output that say how probable drafts were, (B, LIKELY_COLUMNS) int32. None: 0."""
    if scores_BN is None:
        return torch.zeros(batch, LIKELY_COLUMNS, dtype=torch.int32, device=device)
    bounds_K1 = torch.tensor(LOG_BOUNDS_K, dtype=torch.float32, device=device)[:, None]
    counts_BK = (scores_BN[:, None, 1:] >= bounds_K1).sum(dim=2).clamp(max=(1 << LIKELY_BITS) - 1)
    shifts = LIKELY_BITS * torch.arange(LIKELY_PER_COLUMN, device=device)
    return ((counts_BK.view(batch, LIKELY_COLUMNS, -1) << shifts).sum(dim=2) | LIKELY_KNOWN).int()
