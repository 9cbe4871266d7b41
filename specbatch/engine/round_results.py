"""The results that the parts of a round give each other.

Shape suffixes: B requests, N tree nodes, M longest path (root included), T computed tokens, E hidden size, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specbatch.batch import Committed
from specbatch.cache.request_table import BatchView
from specbatch.engine.logprobs import Logprobs


@dataclass(frozen=True, slots=True)
class Forwarded:
    """The target's output for the T nodes of a round: their logits, or the best token of each (int64) with its margin,
    if no more is wanted and ranks find it without the logits."""

    hidden_TE: Tensor
    aux_hidden_states: list[Tensor]
    logits_TV: Tensor | None
    best: tuple[Tensor, Tensor] | None
    index_T: Tensor | None  # int64, (B * N) the index of each node's computed token; None: all nodes are computed
    # With grammars: the logits under all rules but the masks of nodes, and what a greedy request chooses by them.
    edited_TV: Tensor | None = None
    choice_BN: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """The parts of a verification that draft-extend needs."""

    view: BatchView
    committed: Committed
    accept_index_T: Tensor  # int64, (B * M) computed tokens of the path's nodes
    hidden_TE: Tensor
    aux_hidden_states: list[Tensor]
    logprobs: Logprobs | None
    num_reusable: int  # see `DraftMethod`
