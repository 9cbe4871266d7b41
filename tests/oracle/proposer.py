"""The interface of a draft method in the oracle: it proposes a tree for each sequence, and gets the output of the
target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specbatch.cache.pages import KVCache
from specbatch.engine.sequence import Sequence
from tests.oracle.tree import DraftTree


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """The output of the target for new committed tokens, sequence after sequence.

    Sequence b committed tokens [starts[b], sequences[b].num_computed_tokens).
    """

    starts: list[int]
    hidden_TE: Tensor  # hidden states after the final norm
    aux_hidden_states: list[Tensor]  # (T, E) inputs of the layers `Proposer.aux_layers`


class Proposer(Protocol):
    """A draft method."""

    @property
    def num_lookahead(self) -> int:
        """The slots past the committed ones that a round needs, in either cache."""
        ...

    @property
    def prefix_lookahead(self) -> int:
        """The number of tokens past a page on which the draft's entries in that page depend (see `PrefixIndex`)."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs `extend` needs."""
        ...

    @property
    def cache(self) -> KVCache | None:
        """The draft's cache, which has the same pages as the target's."""
        ...

    def start(self, seq: Sequence) -> None:
        """Note that a sequence was admitted, also after a preemption. Its first `num_computed_tokens` tokens came from
        the prefix cache."""
        ...

    def extend(self, sequences: list[Sequence], output: TargetOutput) -> None:
        """Run draft-extend over the tokens that a prefill chunk or a round committed."""
        ...

    def propose(self, sequences: list[Sequence]) -> DraftTree:
        """Draft one tree for each sequence, each with at least its root."""
        ...
