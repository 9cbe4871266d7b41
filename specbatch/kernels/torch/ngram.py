"""N-gram drafts, in plain torch: from the text of a request, and from the corpus that all requests share. Chains of
both, and of a network, are put side by side.

Shape suffixes as in `sampling.py`; D drafts, O sizes of contexts, H words of the corpus, M new tokens of a request or
tokens of a match, C chains of a request, N nodes of a network's chain, W draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specbatch.kernels.chains import CORPUS, FORECAST, JOB, NETWORK, OF_NETWORK, ROW, UNKNOWN
from specbatch.kernels.corpus import (
    CHECK_BITS,
    CHECK_SHIFT,
    FACTOR,
    HASH_SHIFT,
    LOADED,
    MAX_SCORE,
    MAX_SIZE,
    MIXER,
    SCORE_SHIFT,
    SIZES,
    TOKEN_BITS,
    TOKEN_SHIFT,
)

_ONE_SCORE, _TOKENS = 1 << SCORE_SHIFT, 1 << TOKEN_BITS


def ngram_lookup(
    tokens_SL: Tensor,
    predicted_SL: Tensor,
    req_idx_B: Tensor,
    num_tokens_B: Tensor,
    num_predicted_B: Tensor,
    limit_B: Tensor,
    min_match: int,
    max_match: int,
    num_drafts: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draft by n-grams (prompt lookup, Saxena 2023). The drafts are the continuation of the last earlier occurrence of
    the longest suffix of min_match to max_match tokens. At the end of the text they go on with the drafts themselves.
    An occurrence in the prediction comes after all occurrences in the text.

    `tokens_SL`, `predicted_SL`: int32, the tokens and predictions of all requests. `req_idx_B`: the request index of
    each sequence, of whose tokens the first `num_tokens_B` count, and of whose prediction the first `num_predicted_B`.
    `limit_B`: the maximum length of each text, which limits the drafts.

    Return (drafts_BD, num_drafts_B, matched_B), int64, D = num_drafts: drafts padded with 0, and none if there is no
    occurrence; the number of tokens that the suffix has, or 0.
    """
    if tokens_SL.device.type == "cpu":
        # The search reads all columns, and those past the longest text hold nothing.
        tokens_SL = tokens_SL[:, : int(num_tokens_B.amax())]
        predicted_SL = predicted_SL[:, : int(num_predicted_B.amax())]
    # The text and the prediction after it.
    history = torch.cat((tokens_SL[req_idx_B], predicted_SL[req_idx_B]), dim=1)
    length_B1 = num_tokens_B.long()[:, None]
    width, text_width = history.shape[1], tokens_SL.shape[1]
    predicted_end_B1 = text_width + num_predicted_B.long()[:, None]
    ends = torch.arange(width, device=history.device)  # the end of an occurrence: the index of the token after it
    index = ends - text_width * (ends >= text_width)  # the same in the text, or in the prediction
    # (B, L): the number of tokens before `end` that equal the text's last ones, up to max_match.
    matched = torch.zeros_like(history, dtype=torch.int64)
    running = (ends < length_B1) | ((ends >= text_width) & (ends < predicted_end_B1))
    for back in range(1, max_match + 1):
        suffix = history.gather(1, (length_B1 - back).clamp(0, width - 1))
        before = history.roll(back, dims=1)
        running = running & (index >= back) & (length_B1 >= back) & (before == suffix)
        matched = matched + running
    best = torch.where(matched >= min_match, matched * width + ends, 0).amax(dim=1, keepdim=True)
    found_B1, start_B1 = best > 0, best % width

    drafted = torch.arange(num_drafts, device=history.device)
    last_B1 = torch.where(start_B1 < text_width, length_B1, predicted_end_B1)
    source = start_B1 + drafted % (last_B1 - start_B1).clamp(min=1)
    count_B1 = (limit_B.long()[:, None] - length_B1).clamp(0, num_drafts) * found_B1
    drafts = torch.where(drafted < count_B1, history.gather(1, source.clamp(0, width - 1)).long(), 0)
    return drafts, count_B1[:, 0], (best // width)[:, 0]


def _contexts(window_BM: Tensor) -> tuple[Tensor, Tensor]:
    """Hash the last tokens of each text, the nearest last, for all sizes of contexts. Return (B, O) hashes, and whether
    the text has that number of tokens. -1: the text has no token there."""
    # They are made on the device, so that a CUDA graph can hold this.
    powers = torch.full((MAX_SIZE,), FACTOR, device=window_BM.device)
    powers[:1].fill_(1)
    sums = ((window_BM.flip(1) + 1) * powers.cumprod(0)).cumsum(1)
    mixed = torch.stack([sums[:, size - 1] for size in SIZES], dim=1)
    mixed = (mixed ^ ((mixed >> 31) & ((1 << 33) - 1))) * MIXER
    has_tokens = torch.stack([window_BM[:, -size] >= 0 for size in SIZES], dim=1)
    return mixed ^ ((mixed >> 29) & ((1 << 35) - 1)), has_tokens


def corpus_updates(
    words_H: Tensor,
    tokens_SL: Tensor,
    req_idx_B: Tensor,
    starts_B: Tensor,
    counts_B: Tensor,
    max_new: int,
    eos_K: Tensor,
    is_loaded: bool,
) -> tuple[Tensor, Tensor]:
    """Find the words of a corpus that new tokens change, see `kernels.corpus`. `words_H`: int64, a power of two of
    words and one more, which is of no context. The new tokens of each sequence are the `counts_B` ones (at most
    `max_new`) from `starts_B` on in its line of `tokens_SL` (int32). A token after one of `eos_K` is not predicted.
    `is_loaded`: they come from a file.

    Return (places, words), int64, B * M * O of them, M = max_new: the place of each word, and its new value. What
    changes no word has the last place. All are found from the present words, so of several values for one place, the
    largest is to be written: then the order of requests does not matter.
    """
    offset = torch.arange(max_new, device=words_H.device)
    index_BM = starts_B.long()[:, None] + offset
    is_new = (offset < counts_B[:, None]) & (index_BM < tokens_SL.shape[1])
    back = torch.arange(MAX_SIZE, 0, -1, device=words_H.device)
    source = index_BM[:, :, None] - back
    last = tokens_SL.shape[1] - 1
    window = torch.where(source >= 0, tokens_SL[req_idx_B[:, None, None], source.clamp(0, last)].long(), -1)
    token_T1 = tokens_SL[req_idx_B[:, None], index_BM.clamp(max=last)].long().reshape(-1, 1)
    is_new &= ~(window[:, :, -1:] == eos_K).any(dim=2)
    hash_TO, has_tokens = _contexts(window.flatten(0, 1))
    is_new_TO = is_new.reshape(-1, 1) & has_tokens & (token_T1 < _TOKENS)

    place_TO = hash_TO & (words_H.shape[0] - 2)
    old_TO = words_H[place_TO]
    check_TO = (hash_TO >> HASH_SHIFT) & ((1 << CHECK_BITS) - 1)
    known = (old_TO >> CHECK_SHIFT == check_TO) & (old_TO != 0)
    score_TO = (old_TO >> SCORE_SHIFT) & MAX_SCORE
    is_right = known & ((old_TO >> TOKEN_SHIFT) & (_TOKENS - 1) == token_T1)
    first_TO = (check_TO << CHECK_SHIFT) | (token_T1 << TOKEN_SHIFT) | (LOADED if is_loaded else 0)
    new_TO = torch.where(known, first_TO, first_TO + _ONE_SCORE)
    new_TO = torch.where(known & ~is_right & (score_TO > 0), old_TO - _ONE_SCORE, new_TO)
    new_TO = torch.where(is_right, old_TO + _ONE_SCORE * (score_TO < MAX_SCORE), new_TO)
    unused = words_H.shape[0] - 1
    return torch.where(is_new_TO, place_TO, unused).view(-1), torch.where(is_new_TO, new_TO, 0).view(-1)


def corpus_drafts(
    words_H: Tensor,
    estimates_OS: Tensor,
    tokens_SL: Tensor,
    req_idx_B: Tensor,
    lengths_B: Tensor,
    limit_B: Tensor,
    least: float,
    num_drafts: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft what a corpus predicts after the first `lengths_B` tokens of each sequence's line of `tokens_SL`, and then
    after each draft, from the largest context that has a word. A draft ends where there is none, where the text has
    `limit_B` tokens, or where the probability that all of it is right is less than `least`. `estimates_OS`: float32,
    the probability of each prediction by the size of its context and its score.

    Return (drafts_BD, num_drafts_B, probabilities_BD, loaded_B), D = num_drafts: int64 drafts padded with 0, and their
    number; float32, the probability that a draft and all before it are right, padded with 0; bool, whether the first
    comes from a file.
    """
    batch, device = len(req_idx_B), words_H.device
    room_B = limit_B - lengths_B
    source = lengths_B.long()[:, None] - torch.arange(MAX_SIZE, 0, -1, device=device)
    context = tokens_SL[req_idx_B[:, None], source.clamp(0, tokens_SL.shape[1] - 1)].long()
    text = torch.cat((torch.where(source >= 0, context, -1), source.new_zeros(batch, num_drafts)), dim=1)
    counts_B, loaded_B = torch.zeros_like(req_idx_B), torch.zeros(batch, dtype=torch.bool, device=device)
    probabilities_BD = torch.zeros(batch, num_drafts, dtype=torch.float32, device=device)
    all_B, alive_B = torch.ones(batch, dtype=torch.float32, device=device), room_B > 0
    for step in range(num_drafts):
        if device.type == "cpu" and not alive_B.any():
            break
        hash_BO, has_tokens = _contexts(text[:, step : step + MAX_SIZE])
        word_BO = words_H[hash_BO & (words_H.shape[0] - 2)]
        check_BO = (hash_BO >> HASH_SHIFT) & ((1 << CHECK_BITS) - 1)
        found_BO = (word_BO >> CHECK_SHIFT == check_BO) & (word_BO != 0) & has_tokens
        which_B1 = (found_BO * torch.arange(1, len(SIZES) + 1, device=device)).amax(dim=1, keepdim=True) - 1
        word_B = word_BO.gather(1, which_B1.clamp(min=0))[:, 0]
        all_B = all_B * estimates_OS[which_B1.clamp(min=0)[:, 0], (word_B >> SCORE_SHIFT) & MAX_SCORE]
        alive_B = alive_B & (which_B1[:, 0] >= 0) & (all_B >= least) & (room_B > step)
        text[:, MAX_SIZE + step] = torch.where(alive_B, (word_B >> TOKEN_SHIFT) & (_TOKENS - 1), 0)
        probabilities_BD[:, step] = torch.where(alive_B, all_B, 0.0)
        counts_B = counts_B + alive_B
        if step == 0:
            loaded_B = alive_B & (word_B & LOADED).bool()
    return text[:, MAX_SIZE:].clone(), counts_B, probabilities_BD, loaded_B


# Chains, see `draft/suffix.py` and `draft/hybrid.py`


def join_chains(
    row_BD: Tensor,
    num_row_B: Tensor,
    matched_B: Tensor,
    match_estimates_MD: Tensor,
    shared_BD: Tensor,
    probabilities_BD: Tensor,
    is_loaded_B: Tensor,
    network_BN: Tensor | None = None,
    scores_BN: Tensor | None = None,
    lengths_B: Tensor | None = None,
    limit_B: Tensor | None = None,
    likely_B: Tensor | None = None,
    target_ids_W: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Put the chains of each request side by side: that of its own text, that of the texts that all requests share, and
    that of a network, if there is one.

    `row_BD`, `num_row_B`, `matched_B`: what `ngram_lookup` returns. `match_estimates_MD`: see `kernels.corpus`; it may
    have more columns. `shared_BD`, `probabilities_BD`, `is_loaded_B`: what `corpus_drafts` returns, without its counts.

    `network_BN`: int64, the root and the drafts of the network, at most D. `scores_BN`: float32, 0 and the logarithms
    of the probability that a draft and all before it are right. The drafts end at `limit_B` tokens, of which
    `lengths_B` come before the root. `likely_B`: the network's chain was drawn, and the most likely first draft is
    this, in the draft vocabulary, whose tokens are `target_ids_W` (None: the same as the target's). Then a forecast
    comes before the network's chain: the same drafts, each with the estimate of the first one. None: it was not drawn.

    Return (tokens_BCD, estimates_BCD, sources_BC, known_BCD): int64; float32, the estimate that a draft is right if
    those before it are (0: there is no draft); int64, see `kernels.chains`; int64, the tokens without what was drawn
    (None: nothing was)."""
    num_drafts = row_BD.shape[1]
    index_D = torch.arange(num_drafts, device=row_BD.device)
    of_row_BD = match_estimates_MD[matched_B, :num_drafts] * (index_D < num_row_B[:, None])
    source_B = torch.where(is_loaded_B, CORPUS, JOB)
    sources_BC = torch.stack((torch.full_like(source_B, ROW), source_B), dim=1)
    tokens, estimates = [row_BD, shared_BD], [_steps_of(of_row_BD), _steps_of(probabilities_BD)]
    if network_BN is None:
        return torch.stack(tokens, dim=1), torch.stack(estimates, dim=1), sources_BC, None
    assert scores_BN is not None
    assert lengths_B is not None
    assert limit_B is not None
    num_steps = network_BN.shape[1] - 1
    more = (0, num_drafts - num_steps)
    has_room_BS = index_D[:num_steps] < (limit_B - lengths_B - 1)[:, None]
    of_network_BS = _steps_of(scores_BN[:, 1:].exp() * has_room_BS)
    network_BD = pad(network_BN[:, 1:], more)
    if likely_B is not None:
        tokens.append(network_BD)
        estimates.append(pad(of_network_BS[:, :1] * has_room_BS, more))
        sources_BC = pad(sources_BC, (0, 1), value=FORECAST)
    tokens_BCD = torch.stack((*tokens, network_BD), dim=1)
    estimates_BCD = torch.stack((*estimates, pad(of_network_BS, more)), dim=1)
    sources_BC = pad(sources_BC, (0, 1), value=NETWORK)
    if likely_B is None:
        return tokens_BCD, estimates_BCD, sources_BC, None
    known_BCD = tokens_BCD.clone()
    known_BCD[:, -2, 1:], known_BCD[:, -1] = UNKNOWN, OF_NETWORK
    known_BCD[:, -2, 0] = likely_B if target_ids_W is None else target_ids_W[likely_B]
    return tokens_BCD, estimates_BCD, sources_BC, known_BCD


def _steps_of(probabilities_BD: Tensor) -> Tensor:
    """Return the probability of each step of chains, of which `probabilities_BD` are those of all steps up to each. A
    chain ends at a probability of 0."""
    before_BD = pad(probabilities_BD, (1, 0), value=1.0)[:, :-1]
    return torch.where(probabilities_BD > 0, probabilities_BD / before_BD, 0.0)
