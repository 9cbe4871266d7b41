"""The factory of the oracle's proposers for a draft method."""

from __future__ import annotations

from specbatch.draft import DraftParts
from specbatch.draft.network import EagleNet, ModelNet
from specbatch.draft.schedule import Schedule
from specbatch.draft.shape import DraftShape
from tests.oracle.neural import NeuralProposer
from tests.oracle.ngram import NgramProposer
from tests.oracle.proposer import Proposer
from tests.oracle.schedule import scheduled


def proposer_of(method: str, schedule: Schedule, parts: DraftParts, vocab_size: int, page_size: int) -> Proposer:
    """Make the proposer of a draft method. `vocab_size`: the target's vocabulary."""

    def make(shape: DraftShape) -> Proposer:
        if method == "ngram":
            return NgramProposer(shape.num_draft_tokens, *parts.ngram_match)
        return neural_proposer(shape, parts, vocab_size, page_size)

    return scheduled(schedule, make)


def neural_proposer(shape: DraftShape, parts: DraftParts, vocab_size: int, page_size: int) -> NeuralProposer:
    assert isinstance(parts.net, ModelNet | EagleNet), "the method drafts one token after the other"
    return NeuralProposer(parts.net, shape, vocab_size, page_size, parts.device, parts.coupled)
