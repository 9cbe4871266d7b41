"""Chains of drafts from several sources, side by side, in plain torch.

Shape suffixes: B requests, C chains of a request, D drafts, M tokens of a match, N nodes of the network's chain, W
draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specbatch.kernels.chains import CORPUS, FORECAST, JOB, NETWORK, OF_NETWORK, ROW, UNKNOWN


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
