"""Acceptance: the drafts that the target keeps, and the token that it adds itself. It is lossless: the output has the
target's distribution, and if drafts are a deterministic choice, it equals plain sampling token for token.

- Greedy: the longest path of argmax matches.
- Sampled, deterministic drafts (trees, n-grams): draw a token from the target's distribution at a node; if a child
  holds it, go there, else it is the bonus token. This is multi-branch rejection with the residual distribution
  (SpecInfer, Miao et al. 2023; EAGLE) for branches that are proposed with certainty: the child x is accepted with
  probability p(x), and other tokens follow p without the children. It draws the same numbers as plain sampling, so the
  text is the same, too.
- Sampled, chain of a sampling draft (Leviathan et al. 2023; Chen et al. 2023): accept x ~ q with probability
  min(1, p(x) / q(x)); at the first rejection draw from max(p - q, 0), normalised. A draft whose q is NaN is rejected,
  and the token drawn from p.

Where the target's logits are not finite at the end of a path, the token is NO_TOKEN. At nodes off the path they do not
matter.

Shape suffixes: T packed tree nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbatch.batch import NO_TOKEN
from specbatch.draft.rng import Draw
from specbatch.engine.sequence import Sequence
from specbatch.kernels.torch.sampling import argmax
from tests.oracle.rng import uniform
from tests.oracle.sampling import distribution, draw, is_broken
from tests.oracle.tree import DraftTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """The part of one sequence's tree that a round keeps."""

    path: list[int]  # accepted nodes, the root first
    next_token: int  # the bonus token, drawn at the last node: the root of the next tree; or NO_TOKEN
    num_broken: int = 0  # drafts of a sampled chain whose probabilities are NaN


def sample_token(logits_V: Tensor, seq: Sequence, position: int) -> int:
    """Decide the token at `position` as in plain decoding: argmax, or a draw from the target's distribution."""
    params = seq.request.params
    if params.temperature == 0:
        return int(argmax(logits_V[None], NO_TOKEN))
    p = distribution(logits_V, params)
    return NO_TOKEN if is_broken(p) else draw(p, uniform(seq.request.rng, position, Draw.SAMPLE))


def verify(sequences: list[Sequence], tree: DraftTree, logits_TV: Tensor) -> list[Accepted]:
    """Accept drafts. `logits_TV`: the target's logits at every real node, sequence after sequence."""
    best = argmax(logits_TV, NO_TOKEN).tolist()
    tokens, parents = tree.tokens_BN.tolist(), tree.parents_BN.tolist()
    accepted, first = [], 0
    for b, seq in enumerate(sequences):
        n = tree.num_nodes[b]
        logits = logits_TV[first : first + n]
        probs = tree.draft_probs[b]
        if probs is not None and seq.request.params.temperature > 0:
            accepted.append(_accept_chain(seq, tokens[b][:n], logits, probs))
        else:
            children: list[dict[int, int]] = [{} for _ in range(n)]
            for node in range(1, n):
                children[parents[b][node]][tokens[b][node]] = node
            accepted.append(_walk_tree(seq, children, logits, best[first : first + n]))
        first += n
    return accepted


def _walk_tree(seq: Sequence, children: list[dict[int, int]], logits_NV: Tensor, best: list[int]) -> Accepted:
    path = [0]
    while True:
        node = path[-1]
        if seq.request.params.temperature == 0:
            token = best[node]
        else:
            token = sample_token(logits_NV[node], seq, seq.num_computed_tokens + len(path))
        child = children[node].get(token)
        if child is None:
            return Accepted(path, token)
        path.append(child)


def _accept_chain(seq: Sequence, tokens: list[int], logits_NV: Tensor, draft_probs: Tensor) -> Accepted:
    params, rng = seq.request.params, seq.request.rng
    num_broken = int(draft_probs[: len(tokens) - 1, 0].isnan().sum())
    for node in range(1, len(tokens)):
        position = seq.num_computed_tokens + node
        p, q = distribution(logits_NV[node - 1], params), draft_probs[node - 1]
        if is_broken(p):
            return Accepted(list(range(node)), NO_TOKEN, num_broken)
        if is_broken(q):
            return Accepted(list(range(node)), draw(p, uniform(rng, position, Draw.RESIDUAL)), num_broken)
        token = tokens[node]
        # The condition is u < p/q without a division by q = 0. u is never 1, so p = q always accepts.
        if uniform(rng, position, Draw.ACCEPT) * float(q[token]) < float(p[token]):
            continue
        residual = torch.clamp(p - q, min=0.0)
        if float(residual.sum()) <= 0.0:  # p = q up to rounding, where a rejection has probability zero
            residual = p
        return Accepted(list(range(node)), draw(residual, uniform(rng, position, Draw.RESIDUAL)), num_broken)
    last = sample_token(logits_NV[-1], seq, seq.num_computed_tokens + len(tokens))
    return Accepted(list(range(len(tokens))), last, num_broken)
