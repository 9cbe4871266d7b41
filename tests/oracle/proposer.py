"""What a draft method is to the engine: something that proposes a tree for each sequence, and that is told what the
target computed.
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
    """What the target computed for new committed tokens, sequence after sequence.

    Sequence b committed tokens [starts[b], sequences[b].num_computed_tokens).
    """

    starts: list[int]
    hidden_TE: Tensor  # after the final norm
    aux_hidden_states: list[Tensor]  # (T, E) inputs of the layers `Proposer.aux_layers`


class Proposer(Protocol):
    """A draft method."""

    @property
    def num_lookahead(self) -> int:
        """Slots past the committed ones that a round needs, in either cache."""
        ...

    @property
    def prefix_lookahead(self) -> int:
        """Tokens past a page on which the draft's entries in that page depend (see `PrefixIndex`)."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers whose inputs `extend` needs."""
        ...

    @property
    def cache(self) -> KVCache | None:
        """The draft's own cache, addressed by the same pages as the target's."""
        ...

    def start(self, seq: Sequence) -> None:
        """A sequence was admitted: its first `num_computed_tokens` tokens came from the prefix cache. Also after a
        preemption."""
        ...

    def extend(self, sequences: list[Sequence], output: TargetOutput) -> None:
        """Draft-extend: follow what was committed, by a prefill chunk or a round."""
        ...

    def propose(self, sequences: list[Sequence]) -> DraftTree:
        """Draft one tree for each sequence, each with at least its root."""
        ...
