"""Changes to logits by the rules of a request, one token after the other: `kernels.torch.edits` in plain Python.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbatch.engine.sequence import Sequence
from tests.oracle.tree import DraftTree


def path_tokens(tree: DraftTree, b: int) -> list[list[int]]:
    """Return for each node of a sequence's tree the drafts that lead to it, itself included."""
    paths: list[list[int]] = [[]]
    for node in range(1, tree.num_nodes[b]):
        paths.append([*paths[int(tree.parents_BN[b, node])], int(tree.tokens_BN[b, node])])
    return paths


def edited_logits(logits_V: Tensor, seq: Sequence, path: list[int], eos: frozenset[int]) -> Tensor:
    """Return the edited logits of the token after `path`, which comes after the sequence's tokens."""
    params, text = seq.request.params, [*seq.tokens, *path]
    output, forbidden = text[seq.num_prompt :], set[int]()
    if params.allowed_token_ids is not None:
        forbidden |= set(range(len(logits_V))) - set(params.allowed_token_ids)
    if len(output) < params.min_tokens:
        forbidden |= {*eos, *params.stop_token_ids}
    if (matcher := seq.request.matcher) is not None:
        num_legal = next((i for i, token in enumerate(output) if not matcher.advance(token)), len(output))
        if num_legal == len(output):  # otherwise no path comes here
            words, ends = matcher.mask(), {*eos, *params.stop_token_ids}
            allowed = {token for token in range(len(logits_V)) if words[token >> 5] >> (token & 31) & 1} - eos
            forbidden |= set(range(len(logits_V))) - allowed - (ends if matcher.is_complete() else set())
        matcher.back(num_legal)
    for *start, last in seq.request.bad_words:
        if not start or output[-len(start) :] == start:
            forbidden.add(last)
    edited = logits_V.clone()
    for token, bias in (params.logit_bias or {}).items():
        edited[token] += bias
    for token in set(text):
        x, count = float(edited[token]), output.count(token)
        x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        edited[token] = x - params.frequency_penalty * count - params.presence_penalty * (count > 0)
    edited[list(forbidden)] = -torch.inf
    return edited
