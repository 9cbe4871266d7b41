"""Rounds as CUDA graphs: one graph, or three if the host takes part: draft, forward pass, accept and extend.

Between the first two of three, the host changes the draft trees. The second and third read them from buffers of their
own. The second gives the target's choices, of which the host makes masks for the third.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specbatch.cache.request_table import BatchView
from specbatch.draft.method import DraftTrees
from specbatch.engine.acceptance import Verified
from specbatch.engine.round import Launched, Round, RoundHook, RoundKey
from specbatch.graphs.runner import GraphRunner

_WHOLE = "round"
_PARTS = ("grammar draft", "grammar forward", "grammar accept")
_TENSORS = (
    "tokens_BN",
    "num_nodes_B",
    "parents_BN",
    "depths_BN",
    "mask_BNW",
    "probs_BDW",
    "is_given_B",
    "num_drafts_B",
)


class RoundGraphs:
    """The CUDA graphs of rounds. `max_batch_size`: the batch size of the buffers for trees, which all smaller sizes
    share."""

    def __init__(self, runner: GraphRunner, max_batch_size: int) -> None:
        self._runner = runner
        self._max_batch_size = max_batch_size
        # keys: item of the schedule, `sampled`, number of nodes
        self._buffers: dict[tuple[int, bool, int | None], DraftTrees] = {}

    def __contains__(self, key: RoundKey) -> bool:
        """Return whether all graphs of this kind of round are captured."""
        return (_last_part(key), *key) in self._runner

    def drop(self, key: RoundKey) -> None:
        """Drop the graphs of this kind of round, as far as there are any."""
        for name in (_WHOLE, *_PARTS):
            self._runner.drop((name, *key))

    def capture(self, round_: Round, req_idx_B: Tensor, key: RoundKey, padding: RoundHook) -> None:
        """Capture the graphs of a kind of round. `padding`: a hook whose batch has no requests. Only what the host
        reads of a round is kept: other sizes can use the memory of everything else that it leaves."""
        if not key.with_host:
            self._runner.capture((_WHOLE, *key), lambda: round_(req_idx_B, key.wanted, key.lane, key.num_verified))
            return
        size, wanted = key.size, key.wanted
        _, drafted = round_.draft(req_idx_B, wanted.sampled)
        trees = dataclasses.replace(padding.reshape(drafted), judged=None)  # the parts after the host's have none
        buffers = self._buffers.setdefault(_kind(key), self._like(trees))
        _copy(trees, buffers, size)
        given = _map(buffers, lambda tensor: tensor[:size])

        def draft() -> DraftTrees:
            _, trees = round_.draft(req_idx_B, wanted.sampled)
            if trees.probs_BDW is not None:
                assert given.probs_BDW is not None
                given.probs_BDW.copy_(trees.probs_BDW)
            # The host reads no more of them. What is kept is memory that other sizes cannot use.
            return dataclasses.replace(trees, depths_BN=None, mask_BNW=None, judged=None, probs_BDW=given.probs_BDW)

        def forward() -> tuple[BatchView, DraftTrees, Verified]:
            view = BatchView.gather(round_.state, req_idx_B, round_.page_size, round_.ops)
            trees = round_.follow(view, given, wanted.edits)
            return view, trees, round_.choose(view, trees, round_.forward(view, trees), wanted)

        def accept() -> Launched:
            return round_.finish(view, followed, verified, wanted)

        names = [(part, *key) for part in _PARTS]
        self._runner.capture(names[0], draft)
        _copy(trees, buffers, size)  # probabilities are drafted by now
        view, followed, verified = self._runner.capture(names[1], forward)
        self._runner.capture(names[2], accept)
        self._runner.replace_output(names[1], verified.choice_BN)

    def begin(self, key: RoundKey, hook: RoundHook) -> tuple[int, Callable[[], Launched]]:
        """Launch a round as `Round.begin` does. The rest must be launched before anything else that could write into
        memory of the first graphs."""
        if not key.with_host:
            launched: Launched = self._runner.replay((_WHOLE, *key))
            return launched.max_path, lambda: launched
        draft, forward, accept = ((part, *key) for part in _PARTS)
        trees = hook.reshape(self._runner.replay(draft))
        _copy(trees, self._buffers[_kind(key)], key.size)
        hook.look_ahead(self._runner.replay(forward))

        def complete() -> Launched:
            hook.check()
            result: Launched = self._runner.replay(accept)
            return result

        return self._runner.output(accept).max_path, complete

    def milliseconds(self, key: RoundKey) -> float:
        """Time one replay of a round in which the host takes no part."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        self._runner.replay((_WHOLE, *key))
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    def _like(self, trees: DraftTrees) -> DraftTrees:
        def zeros(tensor: Tensor) -> Tensor:
            shape = (self._max_batch_size, *tensor.shape[1:])
            return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)

        return _map(trees, zeros)


def _last_part(key: RoundKey) -> str:
    return _PARTS[-1] if key.with_host else _WHOLE


def _kind(key: RoundKey) -> tuple[int, bool, int | None]:
    return key.item, key.wanted.sampled, key.num_nodes


def _map(trees: DraftTrees, function: Callable[[Tensor], Tensor]) -> DraftTrees:
    tensors = {name: getattr(trees, name) for name in _TENSORS}
    made: dict[str, Any] = {name: function(tensor) for name, tensor in tensors.items() if tensor is not None}
    return dataclasses.replace(trees, **made)


def _copy(source: DraftTrees, target: DraftTrees, size: int) -> None:
    for name in _TENSORS:
        if (tensor := getattr(source, name)) is not None:
            getattr(target, name)[:size].copy_(tensor)
