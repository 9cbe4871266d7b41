"""Makes proposers and drafters of one method, for any shape."""

from __future__ import annotations

from types import ModuleType

import torch

from specbatch.draft.drafters import Drafter, NeuralDrafter, NgramDrafter, NoDrafter
from specbatch.draft.network import DraftNet
from specbatch.draft.schedule import Schedule
from specbatch.draft.shape import DraftShape
from specbatch.oracle.neural import NeuralProposer
from specbatch.oracle.ngram import NgramProposer
from specbatch.oracle.proposer import Proposer
from specbatch.oracle.schedule import scheduled


class DraftFactory:
    """`net` None: lookups of `ngram` (shortest and longest match). `ops`: of the device engine's kernels."""

    def __init__(
        self,
        net: DraftNet | None,
        ngram: tuple[int, int],
        target_vocab_size: int,
        page_size: int,
        device: torch.device,
        ops: ModuleType,
    ) -> None:
        self.net = net
        self._ngram = ngram
        self._vocab_size = target_vocab_size
        self._page_size = page_size
        self._device = device
        self._ops = ops

    def looking_up(self, min_match: int, max_match: int) -> DraftFactory:
        """With other lengths of matches."""
        ngram = min_match, max_match
        return DraftFactory(self.net, ngram, self._vocab_size, self._page_size, self._device, self._ops)

    def neural_proposer(self, shape: DraftShape) -> NeuralProposer:
        assert self.net is not None, "lookups have no network"
        return NeuralProposer(self.net, shape, self._vocab_size, self._page_size, self._device)

    def neural_drafter(self, shape: DraftShape) -> NeuralDrafter:
        assert self.net is not None, "lookups have no network"
        return NeuralDrafter(self.net, shape, self._ops)

    def proposer(self, schedule: Schedule) -> Proposer:
        """Of the oracle engine."""
        return scheduled(schedule, self._proposer)

    def _proposer(self, shape: DraftShape) -> Proposer:
        if self.net is None:
            return NgramProposer(shape.num_draft_tokens, *self._ngram)
        return self.neural_proposer(shape)

    def drafter(self, shape: DraftShape | None) -> Drafter:
        """Of the device engine. Plain rounds lead the network on, too."""
        if shape is None:
            return NoDrafter(self.net)
        if self.net is None:
            return NgramDrafter(shape.num_draft_tokens, *self._ngram, self._ops)
        return self.neural_drafter(shape)
