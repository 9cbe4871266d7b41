"""Rounds with grammars as CUDA graphs: one to draft, one for the target's forward pass, one to accept and extend.

Between the first two the host changes the draft trees. The second and third read them from buffers of their own. The
second gives the target's choices, of which the host makes masks for the third.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specbatch.cache.request_table import BatchView
from specbatch.draft.method import DraftTrees
from specbatch.engine.constrained.round import GrammarRound
from specbatch.engine.round import Round
from specbatch.engine.round_key import RoundKey
from specbatch.engine.round_results import Verified
from specbatch.graphs.runner import GraphRunner

PARTS = ("grammar draft", "grammar forward", "grammar accept")
_TENSORS = ("tokens_BN", "num_nodes_B", "parents_BN", "depths_BN", "mask_BNW", "probs_BDW", "num_drafts_B")


class GrammarGraphs:
    """The CUDA graphs of rounds with grammars. `max_batch_size`: the batch size of the buffers, which all smaller sizes
    share."""

    def __init__(self, runner: GraphRunner, max_batch_size: int) -> None:
        self._runner = runner
        self._max_batch_size = max_batch_size
        # keys: item of the schedule, `sampled`, number of nodes
        self._buffers: dict[tuple[int, bool, int | None], DraftTrees] = {}

    def capture(
        self,
        round_: Round,
        req_idx_B: Tensor,
        key: RoundKey,
        padding: GrammarRound,
        report: Callable[[Verified], Any],
    ) -> None:
        """Capture the graphs of a kind of round. `padding`: a grammar round whose batch has no requests. `report`:
        makes the tensors that are kept of a round."""
        size, sampled = key.size, key.sampled
        _, drafted = round_.draft(req_idx_B, sampled)
        trees = padding.reshape(drafted)
        buffers = self._buffers.setdefault(_kind(key), self._like(trees))
        _copy(trees, buffers, size)
        given = _map(buffers, lambda tensor: tensor[:size])

        def draft() -> DraftTrees:
            _, trees = round_.draft(req_idx_B, sampled)
            if trees.probs_BDW is not None:
                assert given.probs_BDW is not None
                given.probs_BDW.copy_(trees.probs_BDW)
            # The host reads no more of them. What is kept is memory that other sizes cannot use.
            return dataclasses.replace(trees, depths_BN=None, mask_BNW=None, probs_BDW=given.probs_BDW)

        def forward() -> Any:
            view = BatchView.gather(round_.state, req_idx_B, round_.page_size, round_.ops)
            return view, round_.choose(view, given, round_.forward(view, given), key.num_top, key.edits)

        def accept() -> Any:
            return report(round_.finish(view, given, forwarded, sampled, key.num_top, key.edits))

        names = [(part, *key) for part in PARTS]
        self._runner.capture(names[0], draft)
        _copy(trees, buffers, size)  # probabilities are drafted by now
        view, forwarded = self._runner.capture(names[1], forward)
        self._runner.capture(names[2], accept)
        self._runner.replace_output(names[1], forwarded.choice_BN)

    def begin(self, key: RoundKey, grammar: GrammarRound) -> Any:
        """A round of the captured kind, but for its last part; returns what `report` made of it, whose tensors mean
        nothing until that part has run."""
        draft, forward, accept = ((part, *key) for part in PARTS)
        trees = grammar.reshape(self._runner.replay(draft))
        _copy(trees, self._buffers[_kind(key)], key.size)
        grammar.look_ahead(self._runner.replay(forward))
        return self._runner.output(accept)

    def complete(self, key: RoundKey, grammar: GrammarRound) -> Any:
        """The last part, before anything else is launched that could write into memory of the others."""
        grammar.check()
        return self._runner.replay((PARTS[2], *key))

    def _like(self, trees: DraftTrees) -> DraftTrees:
        def zeros(tensor: Tensor) -> Tensor:
            shape = (self._max_batch_size, *tensor.shape[1:])
            return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)

        return _map(trees, zeros)


def _kind(key: RoundKey) -> tuple[int, bool, int | None]:
    return key.item, key.sampled, key.num_nodes


def _map(trees: DraftTrees, function: Callable[[Tensor], Tensor]) -> DraftTrees:
    tensors = {name: getattr(trees, name) for name in _TENSORS}
    made: dict[str, Any] = {name: function(tensor) for name, tensor in tensors.items() if tensor is not None}
    return dataclasses.replace(trees, **made)


def _copy(source: DraftTrees, target: DraftTrees, size: int) -> None:
    for name in _TENSORS:
        if (tensor := getattr(source, name)) is not None:
            getattr(target, name)[:size].copy_(tensor)
