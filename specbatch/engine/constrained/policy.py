"""The policy for batches with grammars: the kind of each round, and the masks of first tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from specbatch.draft.method import DraftMethod
from specbatch.engine.constrained.adaptive_toggle import RunningChoice
from specbatch.engine.constrained.mask_table import NodeMasks, WantedMasks
from specbatch.engine.constrained.optimistic_round import UncheckedRound
from specbatch.engine.constrained.round import GrammarRound
from specbatch.engine.constrained.tree import GrammarTree
from specbatch.engine.sequence import Sequence
from specbatch.engine.table_writer import TableWriter
from specbatch.engine.transfers import Transfers

_WORTH_ROOM = 0.25  # forced tokens for each request and round
_WORTH_NO_CHECKS = 0.85  # share of a round's requests that begin it with a token that their grammar allows


class Grammars:
    """The grammars of an engine's requests. `num_nodes`: the number of nodes of the largest tree. `fixed_shapes`:
    rounds have fixed shapes. `simulates`: rounds commit tokens that the target does not choose, so its choices cannot
    show which masks are needed. `deterministic`: the number of rounds of a request must not depend on its batch."""

    def __init__(
        self,
        table: TableWriter,
        transfers: Transfers,
        num_nodes: int,
        *,
        fixed_shapes: bool,
        simulates: bool,
        deterministic: bool,
    ) -> None:
        self._table = table
        self._transfers = transfers
        self._num_nodes = num_nodes
        self._fixed_shapes = fixed_shapes
        self._all_masks = simulates
        self._may_vary = fixed_shapes and not deterministic  # the number of a request's rounds, in plain decoding
        self._room, self._unchecked = RunningChoice(_WORTH_ROOM), RunningChoice(_WORTH_NO_CHECKS)
        self._masks: NodeMasks | None = None  # made for the first request with a grammar

    def method(self, sequences: Seq[Sequence], method: DraftMethod, padded_size: int) -> DraftMethod:
        """Return the draft method for the next round. `method` is the one without grammars. Plain decoding gets room
        for forced tokens only while there are some, because the room makes rounds longer."""
        if method.has_drafts or not self._may_vary or not _has_grammars(sequences):
            return method
        return method.with_room(padded_size) if self._room.next() else method

    def of_round(
        self, sequences: Seq[Sequence], method: DraftMethod, read: Callable[[], object]
    ) -> GrammarRound | None:
        """Return the grammar round of a batch; None: no request of it has a grammar. `method`: the result of `method`.
        `read`: see `GrammarRound`."""
        if not _has_grammars(sequences):
            return None
        traits = {"fixed_shapes": self._fixed_shapes, "all_masks": self._all_masks}
        may_be_unchecked = self._may_vary and not (method.has_drafts or method.net is not None or self._all_masks)
        is_unchecked = may_be_unchecked and self._unchecked.next()
        kind = UncheckedRound if is_unchecked else GrammarRound
        return kind(sequences, method, self._cleared_masks(), self._transfers, read, **traits)

    def saw(self, round_: GrammarRound) -> None:
        """Record the gain of a round that was launched."""
        counts, num_requests = round_.counts, round_.num_requests
        if not round_.method.has_drafts and round_.method.num_nodes > 1:
            self._room.saw(counts.forced, num_requests)
        if isinstance(round_, UncheckedRound):
            self._unchecked.saw(round_.num_greedy - round_.num_going_back, round_.num_greedy)

    def write_first_masks(self, ready: Seq[Sequence]) -> None:
        """Write the masks for the first tokens of prompts that end. A request that is computed again already has its
        first token."""
        roots = [
            WantedMasks(seq.req_idx, seq.grammar, GrammarTree.of([0], None), [0])
            for seq in ready
            if seq.grammar is not None and len(seq.tokens) == seq.num_prompt
        ]
        if any(seq.grammar is not None for seq in ready):
            self._cleared_masks().write(roots)

    def _cleared_masks(self) -> NodeMasks:
        rules = self._table.node_masks(self._num_nodes, with_forced=self._may_vary)
        if self._masks is None or self._masks.rules is not rules:
            self._masks = NodeMasks(rules, self._transfers)
        self._masks.clear()
        return self._masks


def _has_grammars(sequences: Seq[Sequence]) -> bool:
    return any(seq.grammar is not None for seq in sequences)
