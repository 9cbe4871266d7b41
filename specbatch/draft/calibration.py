"""Calibrates estimates of drafts: how often drafts of a source were right, against how often they were expected to be.

An estimate is the probability that a draft is right if all before it in its chain are. Drafts fall into buckets, by the
source of their chain, the estimate of its first draft, their place in the chain, and whether another chain of the
request has the same tokens so far: drafts on which two sources agree are right more often. A bucket has the sum of the
estimates of its last drafts, and the number of those that were right; an estimate is multiplied by their quotient. So
sources can be compared: sampled texts repeat less than greedy ones, and a network that guesses a random draw is right
less often than its probability says.

The place matters because a chain that was right for long is one that repeats a text: its next draft is right more often
than the same estimate says elsewhere. So the product along a chain is what came out of such chains (as in the survival
curves of Kaplan and Meier 1958).

The drafts of all sources count, whether they were verified or not: the tokens that the round committed say which of
them were right. So a source that is not chosen can come back. Drafts that were drawn at random count only if they were
verified (`hybrid.py`).

Of several chains the one that is chosen is often one whose estimate is too high. So chains of texts are corrected once
more, by how often the drafts of those that were chosen were right. Chains of a network, the usual alternative, are not:
those that were drawn at random would be known only if they were verified.

No draft is accepted for its estimate, so texts are as likely as in plain decoding, whatever the estimates.

Shape suffixes: B requests, C chains of a request, D drafts, M new tokens, Q buckets of all sources.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from specbatch.kernels.corpus import ESTIMATE_UNIT

_EDGES = (0.15, 0.3, 0.45, 0.6, 0.75, 0.87, 0.94, 0.975)  # between buckets of the first estimate; most are large
_PLACES = (1, 2, 4, 8, 16)  # the last place of all groups of places but the last
# Each source has these buckets. Half of them are of drafts that others agree with.
_NUM_BUCKETS = 2 * (len(_EDGES) + 1) * (len(_PLACES) + 1)
_PRIOR_WEIGHT = 32.0  # right drafts, as many as expected, with which each bucket begins
_REMEMBERED = 1000.0  # expected right drafts of a bucket that are remembered
_PRIOR_OF_CHOSEN, _REMEMBERED_OF_CHOSEN = 64.0, 400.0
_CHOSEN_AT_FIRST = 0.6  # This and both above were found by replays of sampled texts.
_MOST = 0.995  # the largest estimate
NUM_TEXTS = 2  # The first chains of a request are from texts: its own, and those of all rows.


class Chains(NamedTuple):
    """Chains of each request, of which one is to be chosen."""

    tokens_BCD: Tensor  # int64
    # float32, the estimate that a draft is right if those before it are, before calibration; 0: there is no draft.
    estimates_BCD: Tensor
    sources_BC: Tensor  # int64, the number of each chain's source


class Judged(NamedTuple):
    """Chains and the buckets of their drafts, of all sources. `factors_Q`: how often drafts of all chains were right,
    against how often they were expected to be (float32)."""

    chains: Chains
    buckets_BCD: Tensor  # int64
    factors_Q: Tensor


class Calibration:
    """The buckets of all sources. They live as long as the engine: graphs hold their addresses."""

    def __init__(self, num_sources: int, num_texts: int, device: torch.device, ops: ModuleType) -> None:
        """`num_texts`: the number of sources of texts, which come first, if there are others; 0: there are none."""
        self._edges_E = torch.tensor(_EDGES, dtype=torch.float32, device=device)
        self._places_P = torch.tensor(_PLACES, device=device)
        num_buckets = num_sources * _NUM_BUCKETS
        # Expected and right drafts, of all chains and of chosen ones. All are updated together.
        self._sums_22Q = torch.zeros(2, 2, num_buckets, dtype=torch.float32, device=device)
        self.sums_2Q, self.chosen_2Q = self._sums_22Q.unbind(dim=1)
        self._new_2Q2 = torch.zeros(2, num_buckets, 2, dtype=torch.int64, device=device)
        # Each bucket begins with these. First drafts of texts are taken to be right less often, if they are chosen.
        self._priors_22Q = torch.full_like(self._sums_22Q, _PRIOR_WEIGHT)
        self._priors_22Q[:, 1] = _PRIOR_OF_CHOSEN
        of_first = torch.arange(num_buckets, device=device) % (len(_PLACES) + 1) == 0
        of_text = torch.arange(num_buckets, device=device) < num_texts * _NUM_BUCKETS
        self._priors_22Q[1, 1, of_first & of_text] *= _CHOSEN_AT_FIRST
        self._remembered_21 = torch.tensor([[_REMEMBERED], [_REMEMBERED_OF_CHOSEN]], device=device)
        self._units_211 = torch.tensor([[[1.0 / ESTIMATE_UNIT]], [[1.0]]], device=device)
        self._ops = ops

    def judge(self, chains: Chains) -> tuple[Tensor, Judged]:
        """Return (B, C, D) float32, the probability that a draft and all before it are right (0: there is no draft),
        and what `learn` reads."""
        expected_2Q, right_2Q = self._sums_22Q + self._priors_22Q
        factors_2Q = right_2Q / expected_2Q
        probabilities_BCD, buckets_BCD = self._ops.judge_chains(
            *chains, factors_2Q.prod(dim=0), self._edges_E, self._places_P, _MOST
        )
        return probabilities_BCD, Judged(chains, buckets_BCD, factors_2Q[0])

    def learn(
        self,
        judged: Judged,
        chosen_B: Tensor,
        tokens_BM: Tensor,
        num_new_B: Tensor,
        num_drawn_B: Tensor | None = None,
    ) -> None:
        """Take note of what a round committed: the first `num_new_B` of `tokens_BM`. 0: the request was done.
        `chosen_B`: the index of each request's chain. `num_drawn_B`: the last two chains of each request were drawn at
        random, and these drafts of them count; None: all drafts of all chains count."""
        tokens_BCD, estimates_BCD, _ = judged.chains
        new_2Q2 = self._ops.count_right(
            tokens_BCD, estimates_BCD, judged.buckets_BCD, judged.factors_Q, chosen_B, tokens_BM, num_new_B,
            self._new_2Q2.zero_(), NUM_TEXTS, num_drawn_B,
        )  # fmt: skip
        sums_22Q = self._sums_22Q + new_2Q2.permute(2, 0, 1) * self._units_211
        self._sums_22Q.copy_(sums_22Q * (self._remembered_21 / sums_22Q[:1]).clamp(max=1.0))
