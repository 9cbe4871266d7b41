"""The tokens of a draft tree, the choice of its nodes, and its mask as FlashInfer's kernels read it, in plain torch.

Shape suffixes as in `sampling.py`; of `tree_mask_bits`: B sequences, T packed tokens (Q of each sequence), W words, Z
bytes; of chains: B requests, C chains of a request, D drafts, M new tokens, E edges between buckets, P last places of
groups, Q buckets of all sources.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.kernels.corpus import ESTIMATE_UNIT, LITTLE
from specbatch.kernels.torch.sampling import argmax


def draft_topk(logits_RW: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k most likely draft tokens of each row: log-softmax values (R, K) float32, descending, and ids (R, K)
    int64. Of equal logits the lower id comes first. If the logits are not finite, these are the first k ids, all with
    -inf. 1 <= k <= 32, k <= W."""
    ids = argmax(logits_RW)[:, None] if k == 1 else _best_ids(logits_RW, k)
    log_p = torch.log_softmax(logits_RW, dim=-1, dtype=torch.promote_types(logits_RW.dtype, torch.float32))
    return unbroken_drafts(log_p.gather(1, ids).float(), ids)


def _best_ids(logits_RW: Tensor, k: int) -> Tensor:
    """Return the ids (R, K) of the k largest logits, descending. Of equal logits the lower id comes first, which topk
    alone does not promise. A CPU takes eight times as long to sort the vocabulary."""
    width = logits_RW.shape[1]
    least_R1 = logits_RW.topk(k, dim=-1).values[:, -1:]
    # Logits above the least one that is kept come first, then equal ones. Within each part lower ids come first.
    part_RW = (logits_RW > least_R1).int() + (logits_RW >= least_R1).int()
    key_RW = part_RW * width - torch.arange(width, dtype=torch.int32, device=logits_RW.device)
    ids_RK = (-key_RW.topk(k, dim=-1).values).long() % width
    order_RK = logits_RW.gather(1, ids_RK).sort(dim=-1, descending=True, stable=True).indices
    return ids_RK.gather(1, order_RK)


def unbroken_drafts(scores_RK: Tensor, ids_RK: Tensor) -> tuple[Tensor, Tensor]:
    """Return `scores_RK` and `ids_RK`, in which a row without finite logits, whose log-softmax is NaN, has the first
    ids with -inf. A tree of NaN would keep children without their parents."""
    broken = scores_RK.isnan()
    first = torch.arange(scores_RK.shape[-1], device=scores_RK.device)
    return torch.where(broken, -torch.inf, scores_RK), torch.where(broken, first, ids_RK)


def select_nodes(
    root_B: Tensor, tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor, num_draft_tokens: int, num_steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose the tree to verify, as EAGLE-2 does (Li et al. 2024): the root and the num_draft_tokens - 1 candidates
    with the highest cumulative scores, in the candidates' order. Of equal scores the earlier candidate is chosen.

    `parents_BC` is each candidate's parent: a candidate, or -1 for the root. A parent has a smaller index, and at least
    the same score. No candidate is deeper than `num_steps`.

    Return (tokens_BN, parents_BN, depths_BN, mask_BNW). The first three are int64; the root has parent -1 and depth 0.
    The mask is int32, W = ceil(N / 32): bit j & 31 of word j >> 5 of mask_BNW[b, i] says that node i sees node j. A
    node sees its ancestors and itself.
    """
    batch, device = tokens_BC.shape[0], tokens_BC.device
    chosen = scores_BC.sort(dim=1, descending=True, stable=True).indices[:, : num_draft_tokens - 1].sort(dim=1).values
    tokens = torch.cat((root_B[:, None], tokens_BC.gather(1, chosen)), dim=1)
    candidate = parents_BC.gather(1, chosen)
    parents = torch.where(candidate < 0, 0, torch.searchsorted(chosen, candidate.contiguous()) + 1)
    parents = torch.cat((torch.full((batch, 1), -1, dtype=torch.int64, device=device), parents), dim=1)

    nodes = torch.arange(num_draft_tokens, device=device)
    words = torch.arange((num_draft_tokens + 31) // 32, device=device)
    own = torch.where((nodes >> 5)[:, None] == words, 1 << (nodes & 31)[:, None], 0)
    mask = own.expand(batch, -1, -1)
    depths = (nodes > 0).long().expand(batch, -1)
    ancestor = parents.clamp(min=0)
    for _ in range(num_steps.bit_length()):  # each turn doubles the distance
        mask = mask | mask.gather(1, ancestor[:, :, None].expand_as(mask))
        depths = depths + depths.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    # Bit 31 is the sign.
    return tokens, parents, depths, torch.where(mask >= 2**31, mask - 2**32, mask).int()


def tree_mask_bits(mask_TW: Tensor, mask_starts_B: Tensor, starts_B: Tensor, num_queries: int, max_keys: int) -> Tensor:
    """Return the mask of a `PagedBatch` in FlashInfer's format: a bit for each pair of query and key, (B, Z) uint8.

    Bit q * L + k of sequence b, from the least significant bit of its first byte, says whether query q sees slot k,
    where L = starts[b] + num_queries is the number of the sequence's keys, at most `max_keys`. Each sequence has Z =
    ceil(num_queries * max_keys / 8) bytes; the bits after its first num_queries * L can have any value.
    """
    batch, width = starts_B.shape[0], mask_TW.shape[1] * 32
    device = mask_TW.device
    index = torch.arange(-(-num_queries * max_keys // 8) * 8, device=device)
    keys_B1 = (starts_B + num_queries).to(torch.int64)[:, None]
    query = (index // keys_B1).clamp_(max=num_queries - 1)
    bit = index % keys_B1 - mask_starts_B[:, None]
    seq = torch.arange(batch, device=device)[:, None]
    word = mask_TW.view(batch, num_queries, -1)[seq, query, bit.clamp(0, width - 1) // 32]
    visible = (bit < 0) | ((bit < width) & ((word >> (bit % 32)) & 1).bool())
    bits = visible.view(batch, -1, 8).int() << torch.arange(8, dtype=torch.int32, device=device)
    return bits.sum(dim=2).to(torch.uint8)


# Chains of drafts by how likely they are, and how many of them were right, see `draft/calibration.py`


def judge_chains(
    tokens_BCD: Tensor,
    estimates_BCD: Tensor,
    sources_BC: Tensor,
    factors_Q: Tensor,
    edges_E: Tensor,
    places_P: Tensor,
    most: float,
) -> tuple[Tensor, Tensor]:
    """Return (probabilities_BCD, buckets_BCD): float32, the probability that a draft and all before it are right, and
    int64, the bucket of each draft. An estimate is multiplied by the factor of its bucket, to at most `most`.

    `tokens_BCD`: int64. `estimates_BCD`: float32; 0: there is no draft. `sources_BC`: int64. `edges_E`: float32, rising
    values between the buckets of a chain's first estimate. `places_P`: int64, the last place of each group of places
    but the last."""
    num_places, num_edges = len(places_P) + 1, len(edges_E)
    is_draft_BCD = estimates_BCD > 0
    is_same_BCCD = tokens_BCD[:, :, None] == tokens_BCD[:, None]
    is_same_BCCD = is_same_BCCD & is_draft_BCD[:, :, None] & is_draft_BCD[:, None]
    agrees_BCD = is_same_BCCD.long().cumprod(dim=3).sum(dim=2) > 1  # with another one, not with itself alone
    places_D = torch.bucketize(torch.arange(1, tokens_BCD.shape[2] + 1, device=places_P.device), places_P)
    firsts_BC1 = torch.bucketize(estimates_BCD[:, :, :1].contiguous(), edges_E)
    kinds_BCD = 2 * sources_BC[:, :, None] + agrees_BCD
    buckets_BCD = (kinds_BCD * (num_edges + 1) + firsts_BC1) * num_places + places_D
    return (estimates_BCD * factors_Q[buckets_BCD]).clamp(max=most).cumprod(dim=2), buckets_BCD


def choose_chain(
    root_B: Tensor,
    tokens_BCD: Tensor,
    probabilities_BCD: Tensor,
    sources_BC: Tensor,
    price: Tensor,
    least: float,
    is_drawn: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Choose the chain of each sequence that is worth most, the first of equal ones: a draft is worth what its
    probability is above the `price` of a node (float32, one number), and LITTLE of it in any case. A chain ends where
    probabilities fall below `least`. `is_drawn`: the last chain is chosen where the one before it is worth most of
    those before the last one.

    Return (tokens_BN, scores_BN, num_nodes_B, chosen_B3, is_given_B), N = D + 1: int64, the root and the drafts;
    float32, 0 and the logarithms of their probabilities; int64, the number of nodes; int64, the number of drafts, the
    source and the index of the chain; bool, whether a chain before the last two was chosen (None: `is_drawn` is
    False)."""
    batch, num_chains, _ = tokens_BCD.shape
    probabilities_BCD = torch.where(probabilities_BCD >= least, probabilities_BCD, 0.0)
    worth_BCD = (probabilities_BCD - price).clamp(min=0.0) + LITTLE * probabilities_BCD
    best_B, is_given_B = worth_BCD[:, : num_chains - is_drawn].sum(dim=2).argmax(dim=1), None
    if is_drawn:
        is_given_B = best_B < num_chains - 2
        best_B = best_B + ~is_given_B
    lines_B = torch.arange(batch, device=best_B.device)
    probabilities_BD = probabilities_BCD[lines_B, best_B]
    counts_B = (probabilities_BD > 0).sum(dim=1)
    tokens_BN = torch.cat((root_B[:, None], tokens_BCD[lines_B, best_B]), dim=1)
    scores_BN = torch.nn.functional.pad(probabilities_BD.log(), (1, 0))
    chosen_B3 = torch.stack((counts_B, sources_BC[lines_B, best_B], best_B), dim=1)
    return tokens_BN, scores_BN, counts_B + 1, chosen_B3, is_given_B


def largest_left(scores_BN: Tensor, num_verified_B: Tensor, num_new_B: Tensor) -> Tensor:
    """Return the largest probability of a draft that was not verified, float32, one number; 0: there is none.
    `scores_BN`: the logarithms of the probabilities of nodes. The first `num_verified_B` drafts were verified.
    `num_new_B`: the tokens that were committed; 0: the sequence was done."""
    draft = torch.arange(scores_BN.shape[1] - 1, device=scores_BN.device)
    is_left_BD = (draft >= num_verified_B[:, None]) & (num_new_B > 0)[:, None]
    return (scores_BN[:, 1:].exp() * is_left_BD).amax().view(1)


def count_right(
    tokens_BCD: Tensor,
    estimates_BCD: Tensor,
    buckets_BCD: Tensor,
    factors_Q: Tensor,
    chosen_B: Tensor,
    new_BM: Tensor,
    num_new_B: Tensor,
    sums_2Q2: Tensor,
    num_texts: int,
    num_drawn_B: Tensor | None = None,
) -> Tensor:
    """Return `sums_2Q2` after adding to its buckets what a round showed about drafts: the estimates of those that were
    tried, in units of 1 / ESTIMATE_UNIT, and the number of those that were right. A draft is tried if all before it
    were right, and the token in its place is known: one of the first `num_new_B` of `new_BM`. All integers are int64.
    `num_drawn_B`: the drafts of the last two chains that count; None: all do.

    The second half of the sums is of chosen chains alone, whose indices are `chosen_B`, if these are below `num_texts`.
    Their estimates are multiplied by `factors_Q` (float32) before they are added."""
    width = min(tokens_BCD.shape[2], new_BM.shape[1])
    estimates_BCW = estimates_BCD[:, :, :width]
    index = torch.arange(width, device=num_new_B.device)
    is_known_BCW = (index < num_new_B[:, None])[:, None].expand_as(estimates_BCW)
    if num_drawn_B is not None:
        is_drawn_BW = index < num_drawn_B[:, None]
        is_known_BCW = torch.cat((is_known_BCW[:, :-2], is_known_BCW[:, -2:] & is_drawn_BW[:, None]), dim=1)
    is_right_BCW = (tokens_BCD[:, :, :width] == new_BM[:, None, :width]) & (estimates_BCW > 0)
    right_BCW = (is_right_BCW & is_known_BCW).long().cumprod(dim=2)
    tried_BCW = torch.nn.functional.pad(right_BCW, (1, 0), value=1)[:, :, :-1] * is_known_BCW
    buckets_BCW = buckets_BCD[:, :, :width]
    chain = torch.arange(tokens_BCD.shape[1], device=num_new_B.device)
    is_chosen_BC1 = ((chain == chosen_B[:, None]) & (chain < num_texts))[:, :, None]
    for sums_Q2, estimates, counts in (
        (sums_2Q2[0], estimates_BCW, True),
        (sums_2Q2[1], estimates_BCW * factors_Q[buckets_BCW], is_chosen_BC1),
    ):
        expected_BCW = (estimates * ESTIMATE_UNIT).long() * tried_BCW * counts
        found = torch.stack((expected_BCW, right_BCW * counts), dim=3).view(-1, 2)
        sums_Q2.index_add_(0, buckets_BCW.reshape(-1), found)
    return sums_2Q2
