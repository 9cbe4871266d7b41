"""The operations of a speculative round on a batch, in plain torch: the twins of the Triton kernels in
`round_sampling`, `round_tree` and `round_ngram`, and what runs where Triton does not.

Every function has fixed output shapes and reads nothing back to the host, so a whole round can be captured in one CUDA
graph. The rules are those of `speculation.{sampling,noise,verify,tree,ngram}`, which decide one sequence at a time.

Shape suffixes: R rows, V vocabulary, W draft vocabulary (of probabilities) or words (of masks), B sequences, N tree
nodes, D = N - 1 drafts of a chain, K = topk, C candidates, S cache slots, L longest token list.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
NO_TOKEN = -1  # what a target chooses where its logits are not finite
LOWEST_LOGIT = -1e38  # below are -inf and the lowest finite numbers: masks write either for "never"


def finite_peak(peak_R: Tensor) -> Tensor:
    """(R,) bool: whether rows of logits with these largest values (NaN where one is NaN) are *finite*: no NaN, no +inf,
    and not all of them masked. A single -inf is a token that never comes, and legal."""
    return (peak_R > LOWEST_LOGIT) & (peak_R < torch.inf)


def argmax(logits_RV: Tensor, otherwise: int = 0) -> Tensor:
    """(R,) int64: the lowest index among the largest values of each row; `otherwise` where a row is not finite."""
    peak, best = logits_RV.max(dim=-1)
    return torch.where(finite_peak(peak), best, otherwise)


def uniform(seed_R: Tensor, stream_R: Tensor, sample_R: Tensor, position_R: Tensor, purpose: int) -> Tensor:
    """(R,) float64 draws from [0, 1) with 53 bits; `speculation.noise.uniform` bit for bit (Philox4x32-10, Salmon et
    al., SC 2011).

    All arguments are int64 and broadcast against each other; 64-bit seeds and streams past 2^63 - 1 are held as
    negative numbers. `purpose` is a `speculation.noise.Purpose`.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(
        position_R & _MASK32, (sample_R << 8 | purpose) & _MASK32, stream_R & _MASK32, stream_R >> 32 & _MASK32
    )
    k0, k1 = seed_R & _MASK32, seed_R >> 32 & _MASK32
    for _ in range(10):
        high0, low0 = _multiply32(c0, 0xD2511F53)
        high1, low1 = _multiply32(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return (c0 << 21 | c1 >> 11).double() * 2.0**-53


def _multiply32(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of 32-bit numbers. By halves: the whole product overflows int64's sign."""
    low = (x & 0xFFFF) * factor
    high = (x >> 16) * factor + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF


def distribution(logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Probabilities (R, V) float32 after temperature, top-k (0: off), top-p (1: off) and min-p (0: off), in this order,
    each on what the one before it left; see `speculation.sampling.distribution`. Where the temperature is 0, all mass
    lies on the argmax. All of a row is NaN where its logits are not finite.
    """
    return _distribution64(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R).float()


def _distribution64(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor
) -> Tensor:
    vocab = logits_RV.shape[1]
    greedy_R1 = (temperature_R == 0)[:, None]
    wide = logits_RV.double()
    peak = wide.amax(dim=-1, keepdim=True)
    # The peak is taken off first: divided by a tiny temperature it would overflow.
    scaled = (wide - peak) / torch.where(greedy_R1, 1.0, temperature_R[:, None].double())
    ordered = scaled.sort(dim=-1, descending=True).values
    kth = ordered.gather(1, (top_k_R.long()[:, None] - 1).clamp(0, vocab - 1))
    drop = (scaled < kth) & ((top_k_R > 0) & (top_k_R < vocab))[:, None]
    p = torch.softmax(scaled.masked_fill(drop, -torch.inf), dim=-1)

    ordered, index = p.sort(dim=-1, descending=True, stable=True)
    top_p = top_p_R[:, None].double()
    beyond = (ordered.cumsum(-1) - ordered >= top_p) & (top_p < 1)
    p = p.masked_fill(torch.zeros_like(beyond).scatter(1, index, beyond), 0.0)
    p = torch.where(top_p < 1, p / p.sum(dim=-1, keepdim=True), p)

    p = p.masked_fill(p < min_p_R[:, None].double() * p.amax(dim=-1, keepdim=True), 0.0)
    p = p / p.sum(dim=-1, keepdim=True)
    one_hot = torch.zeros_like(p).scatter(1, argmax(logits_RV)[:, None], 1.0)
    return torch.where(finite_peak(peak), torch.where(greedy_R1, one_hot, p), torch.nan)


def draw(p_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """(R,) int64: the token at quantile u in [0, 1) of each row's (unnormalised) probabilities, by ascending id; never
    one of probability zero. Token 0 where the row is NaN. `uniform_R` is float64."""
    cdf = p_RV.double().cumsum(-1)
    positive = p_RV > 0
    # The first token behind the quantile. Not by binary search: a parallel sum may fall back by a rounding.
    hit = positive & (cdf > uniform_R[:, None] * cdf[:, -1:])
    ids = torch.arange(p_RV.shape[1], device=p_RV.device)
    last = torch.where(positive, ids, 0).amax(dim=-1)  # where u * total was rounded up to the total
    return torch.where(hit, ids, last[:, None]).amin(dim=-1)


def sample(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, uniform_R: Tensor
) -> Tensor:
    """(R,) int64: the argmax where the temperature is 0, else the token at quantile u (float64) of `distribution`, by
    ascending id; never one of probability zero. NO_TOKEN where the logits are not finite."""
    p = _distribution64(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    best = argmax(logits_RV, NO_TOKEN)
    return torch.where((temperature_R == 0) | (best == NO_TOKEN), best, draw(p, uniform_R))


def accept_path(tokens_BN: Tensor, parents_BN: Tensor, choice_BN: Tensor) -> tuple[Tensor, Tensor]:
    """The walk of `verify._walk_tree`: from the root to the child that holds the target's own choice, until there is
    none.

    `choice_BN` is the target's argmax or sample at every node. `parents_BN` is -1 at the root, node 0, and -2 at
    nodes that are padding; a parent comes before its children, and siblings hold distinct tokens.

    Returns (path_BN, num_path_B), int64: the accepted nodes from the root down, padded with 0, and their number,
    1 .. N. The next token is `choice_BN` at the last of them.
    """
    num_nodes = tokens_BN.shape[1]
    nodes = torch.arange(num_nodes, device=tokens_BN.device)
    ancestor = parents_BN.clamp(min=0)
    kept = (nodes == 0) | ((parents_BN >= 0) & (tokens_BN == choice_BN.gather(1, ancestor)))
    # A node is accepted if all nodes up to the root are the choice of the one above; each turn doubles the reach.
    for _ in range((num_nodes - 1).bit_length()):
        kept = kept & kept.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    path = torch.where(kept, nodes, num_nodes).sort(dim=1).values
    return torch.where(path < num_nodes, path, 0), kept.sum(dim=1)


def accept_chain(
    drafts_BD: Tensor,
    q_BDW: Tensor,
    target_ids_W: Tensor | None,
    p_BNV: Tensor,
    num_drafts_B: Tensor,
    temperature_B: Tensor,
    u_accept_BD: Tensor,
    u_residual_BD: Tensor,
    u_sample_BN: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rejection sampling of a chain (`verify._accept_chain`; Leviathan et al. 2023, Chen et al. 2023): draft i, drawn
    from q_i, is accepted while u * q_i(x) < p_i(x); the first rejected one is replaced by a draw from max(p_i - q_i,
    0); behind the last accepted one of all `num_drafts_B` the next token is drawn from p.

    drafts_BD: target token ids. q_BDW: the distributions that they were drawn from, over draft tokens, of which
    `target_ids_W` gives the (distinct) target ids; None: draft ids are target ids, W <= V. p_BNV: the target's
    distribution behind each node; N = D + 1, node i + 1 is draft i. u_accept, u_residual: float64 draws for the token
    of draft i, u_sample: for the token behind node n, that is [.., i] belongs to position num_computed_tokens + i + 1
    in all three. Rows of temperature 0 have a one-hot p, and accept exactly the drafts that are the
    target's argmax, whatever their q.

    Where q_i is NaN (see `distribution`), draft i is rejected and the token drawn from p_i. Where p is NaN at the end
    of the path, the token is NO_TOKEN.

    Returns (num_path_B, next_token_B, num_broken_B), int64: 1 + the number of accepted drafts, the token after them,
    and the number of drafts whose q is NaN (of temperature 0: none, for it does not matter there).
    """
    num_drafts, vocab = drafts_BD.shape[1], p_BNV.shape[2]
    q_BDV = _widen(q_BDW, target_ids_W, vocab)
    greedy_B1 = (temperature_B == 0)[:, None]
    draft_BD1 = drafts_BD[:, :, None]
    p_BD = p_BNV[:, :num_drafts].gather(2, draft_BD1)[:, :, 0].double()
    q_BD = torch.where(greedy_B1, 1.0, q_BDV.gather(2, draft_BD1)[:, :, 0].double())
    real = torch.arange(num_drafts, device=drafts_BD.device) < num_drafts_B[:, None]
    broken_BD = real & q_BD.isnan()
    accepted = real & (u_accept_BD * q_BD < p_BD)
    num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)

    last_B1 = num_accepted[:, None]
    rejected_B1 = last_B1 < num_drafts_B[:, None]
    first_rejected_B1 = last_B1.clamp(max=num_drafts - 1)
    p_BV = _row(p_BNV, last_B1).double()
    residual = (p_BV - _row(q_BDV, first_rejected_B1).double()).clamp(min=0.0)
    # No residual: p = q up to rounding, a rejection that happens with probability zero.
    usable = rejected_B1 & ~greedy_B1 & (residual.sum(dim=1, keepdim=True) > 0.0)
    usable &= ~broken_BD.gather(1, first_rejected_B1)
    u = torch.where(rejected_B1, u_residual_BD.gather(1, first_rejected_B1), u_sample_BN.gather(1, last_B1))
    token = draw(torch.where(usable, residual, p_BV), u[:, 0])
    return num_accepted + 1, torch.where(p_BV[:, 0].isnan(), NO_TOKEN, token), broken_BD.sum(dim=1)


def _widen(q_BDW: Tensor, target_ids_W: Tensor | None, vocab: int) -> Tensor:
    """Distributions over draft tokens as such over the target's vocabulary (B, D, V)."""
    if target_ids_W is None:
        return torch.nn.functional.pad(q_BDW, (0, vocab - q_BDW.shape[2]))
    wide = q_BDW.new_zeros((*q_BDW.shape[:2], vocab))
    return wide.scatter(2, target_ids_W.expand_as(q_BDW), q_BDW)


def _row(x_BMV: Tensor, index_B1: Tensor) -> Tensor:
    """(B, V): of each sequence the row at its index."""
    return x_BMV.gather(1, index_B1[:, :, None].expand(-1, -1, x_BMV.shape[2]))[:, 0]


def draft_topk(logits_RW: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely draft tokens of each row: log-softmax values (R, K) float32, descending, and ids (R, K) int64;
    of equal logits the lower id comes first. The first k ids, all -inf, where the logits are not finite. 1 <= k <= 16,
    k <= W."""
    ids = logits_RW.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    log_p = torch.log_softmax(logits_RW, dim=-1, dtype=torch.promote_types(logits_RW.dtype, torch.float32))
    return unbroken_drafts(log_p.gather(1, ids).float(), ids)


def unbroken_drafts(scores_RK: Tensor, ids_RK: Tensor) -> tuple[Tensor, Tensor]:
    """`scores_RK` and `ids_RK` of the most likely drafts, where a row without finite logits, whose log-softmax is NaN,
    has the first ids, all of them -inf. A tree of NaN would have children that are kept without their parents."""
    broken = scores_RK.isnan()
    first = torch.arange(scores_RK.shape[-1], device=scores_RK.device)
    return torch.where(broken, -torch.inf, scores_RK), torch.where(broken, first, ids_RK)


def select_nodes(
    root_B: Tensor, tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor, num_draft_tokens: int, num_steps: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tree to verify, as `speculation.tree.select_nodes`: the root and the num_draft_tokens - 1 candidates of the
    highest cumulative score, the earlier of equals first, in the candidates' order.

    `parents_BC` is the candidate that a candidate hangs on, -1 for the root; it has a smaller index, and at least the
    score. No candidate is deeper than `num_steps`.

    Returns (tokens_BN, parents_BN, depths_BN, mask_BNW): int64, parents -1 at the root, depths 0 there; and int32,
    W = ceil(N / 32): bit j & 31 of word j >> 5 of mask_BNW[b, i] says that node i sees node j, its ancestors and
    itself.
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
    for _ in range(num_steps.bit_length()):  # each turn doubles the reach
        mask = mask | mask.gather(1, ancestor[:, :, None].expand_as(mask))
        depths = depths + depths.gather(1, ancestor)
        ancestor = ancestor.gather(1, ancestor)
    # Bit 31 is the sign.
    return tokens, parents, depths, torch.where(mask >= 2**31, mask - 2**32, mask).int()


def ngram_lookup(
    tokens_SL: Tensor,
    req_idx_B: Tensor,
    num_tokens_S: Tensor,
    limit_S: Tensor,
    min_match: int,
    max_match: int,
    num_drafts: int,
) -> tuple[Tensor, Tensor]:
    """Prompt lookup (Saxena 2023; `speculation.ngram`): the continuation of the last earlier occurrence of the longest
    suffix of min_match to max_match tokens; over the drafted tokens themselves where it reaches the text's end.

    tokens_SL: int32, the tokens of each slot, of which the first `num_tokens_S` count. req_idx_B: the slot of each
    sequence. limit_S: the longest each slot's tokens may become; so many are drafted at most.

    Returns (drafts_BD, num_drafts_B), int64, D = num_drafts: drafts padded with 0, none where there is no occurrence.
    """
    history = tokens_SL[req_idx_B]
    length_B1 = num_tokens_S[req_idx_B].long()[:, None]
    width = history.shape[1]
    ends = torch.arange(width, device=history.device)  # of an occurrence: the index of the token behind it
    # (B, L): how many tokens in front of `end` equal the text's last ones, up to max_match.
    matched = torch.zeros_like(history, dtype=torch.int64)
    running = (ends >= 1) & (ends < length_B1)
    for back in range(1, max_match + 1):
        suffix = history.gather(1, (length_B1 - back).clamp(0, width - 1))
        before = history.roll(back, dims=1)
        running = running & (ends >= back) & (before == suffix)
        matched = matched + running
    best = torch.where(matched >= min_match, matched * width + ends, 0).amax(dim=1, keepdim=True)
    found_B1, start_B1 = best > 0, best % width

    drafted = torch.arange(num_drafts, device=history.device)
    source = start_B1 + drafted % (length_B1 - start_B1).clamp(min=1)
    count_B1 = (limit_S[req_idx_B].long()[:, None] - length_B1).clamp(0, num_drafts) * found_B1
    drafts = torch.where(drafted < count_B1, history.gather(1, source.clamp(0, width - 1)).long(), 0)
    return drafts, count_B1[:, 0]
