"""The policy for batches with grammars: the kind of each round, and the masks of first tokens."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from specbatch.draft.method import DraftMethod
from specbatch.engine.constrained.mask_table import NodeMasks, WantedMasks
from specbatch.engine.constrained.round import GrammarRound
from specbatch.engine.constrained.tree import GrammarTree
from specbatch.engine.round import RoundHook
from specbatch.engine.sequence import Sequence
from specbatch.engine.table_writer import TableWriter
from specbatch.engine.transfers import Transfers

_MEMORY = 0.9  # weight of the old mean when a round is added to it
_TRY_AGAIN = 32  # the method is tried again after this many rounds without it
_WORTH_ROOM = 0.25  # forced tokens for each request and round


class AdaptiveToggle:
    """A switch for a method that pays only at times: the gain of the last rounds decides whether the next one uses it.
    `worth`: the gain of a request and round from which on it pays. It depends on nothing but what was seen, so that
    ranks decide alike."""

    def __init__(self, worth: float) -> None:
        self._worth = worth
        self._mean, self._num_without = 1.0, 0

    def next(self) -> bool:
        """Return whether the next round uses the method."""
        pays = self._mean >= self._worth or self._num_without >= _TRY_AGAIN
        self._num_without = 0 if pays else self._num_without + 1
        return pays

    def saw(self, gain: float, num_requests: int) -> None:
        """Add a round to the mean. `gain`: the sum of the gains of all its requests."""
        if num_requests:
            self._mean += (1 - _MEMORY) * (gain / num_requests - self._mean)


class RoomHook(RoundHook):
    """The hook of a round of plain decoding with room for forced tokens, in which the host takes no part."""

    def __init__(self, method: DraftMethod) -> None:
        self.method = method


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
        self._room = AdaptiveToggle(_WORTH_ROOM)
        self._masks: NodeMasks | None = None  # made for the first request with a grammar

    def wants_room(self, sequences: Seq[Sequence], method: DraftMethod) -> bool:
        """Return whether the next round has room for forced tokens. `method`: its draft method. Plain decoding has room
        only while there are some, because the room makes rounds longer."""
        if not self.may_have_room(method, len(sequences)) or all(seq.make_grammar is None for seq in sequences):
            return False
        return self._room.next()

    def may_have_room(self, method: DraftMethod, batch_size: int) -> bool:
        """Return whether rounds of this size can have room for forced tokens."""
        return not method.has_drafts and self._may_vary and method.with_room(batch_size).num_nodes > 1

    def of_round(self, sequences: Seq[Sequence], method: DraftMethod, read: Callable[[], object]) -> RoundHook:
        """Return the hook of the round of a batch with grammars, or of one whose round is with another rank's grammars.
        `method`: the draft method. `read`: see `GrammarRound`."""
        traits = {"fixed_shapes": self._fixed_shapes, "all_masks": self._all_masks}
        masks = self._cleared_masks()
        return GrammarRound(sequences, method, masks, self._transfers, read, on_record=self._saw, **traits)

    def saw_room(self, num_forced: int, num_requests: int) -> None:
        """Record the forced tokens of a round that had room for them, and in which the host took no part."""
        self._room.saw(num_forced, num_requests)

    def _saw(self, round_: GrammarRound) -> None:
        """Record the gain of a round that was launched."""
        counts, num_requests = round_.counts, round_.num_requests
        if not round_.method.has_drafts and round_.method.num_nodes > 1:
            self._room.saw(counts.forced, num_requests)

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
        rules = self._table.node_masks(self._num_nodes)
        if self._masks is None or self._masks.rules is not rules:
            self._masks = NodeMasks(rules, self._transfers)
        self._masks.clear()
        return self._masks


def has_grammars(sequences: Seq[Sequence]) -> bool:
    return any(seq.grammar is not None for seq in sequences)
