"""Launches rounds: pads the batch to a captured size and replays its graph, or runs the round eagerly.

With `graphs: round` one graph is a whole round; with `none` every kernel is launched by the host. A round of requests
with grammars is three graphs, because the host takes part in it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbatch.batch import ALL_EDITS, Edits
from specbatch.cache.prefix_groups import Group
from specbatch.draft.host import HostDraftMethod
from specbatch.draft.schedule import ByBatch
from specbatch.engine.constrained.graphs import PARTS, GrammarGraphs
from specbatch.engine.constrained.round import GrammarRound
from specbatch.engine.logprobs import MAX_TOP_LOGPROBS, LogprobLayout, with_logprobs
from specbatch.engine.overlap.lanes import LaneSizes
from specbatch.engine.round import Round
from specbatch.engine.round_key import RoundKey
from specbatch.engine.round_results import Verified
from specbatch.engine.transfers import Transfers
from specbatch.graphs.runner import GraphRunner, ladder
from specbatch.kernels.out_of_memory import is_out_of_memory

GraphMode = Literal["round", "none"]


class PaddedSize(NamedTuple):
    """The size of a padded batch. `lane`: the number of its requests that are in the first of two lanes; 0: there is
    one lane."""

    size: int
    lane: int = 0


def padded_sizes(
    items: ByBatch[Any], max_batch_size: int, lanes: LaneSizes | None = None
) -> list[tuple[PaddedSize, int]]:
    """Each size that batches are padded to with the index of each item that is run so, the largest first."""
    sizes = ladder(max_batch_size)

    def padded(batch_size: int) -> PaddedSize:
        lane = 0 if lanes is None else lanes.of(batch_size)
        return PaddedSize(2 * lane or next(size for size in sizes if size >= batch_size), lane)

    return sorted(
        {(padded(batch_size), i) for i in range(len(items.items)) for batch_size in items.batches(i, max_batch_size)},
        reverse=True,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """The result of a round that has been launched. It is valid until the next launch."""

    output_BZ: Tensor  # laid out as in `Committed` and `with_logprobs`
    logprobs: LogprobLayout | None
    max_path: int  # tokens that the round may commit

    @staticmethod
    def of(verified: Verified) -> Launched:
        committed, logprobs = verified.committed, verified.logprobs
        layout = None if logprobs is None else LogprobLayout.of(logprobs)
        return Launched(with_logprobs(committed.output_BZ, logprobs), layout, committed.path_BM.shape[1])


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """A round whose target runs. `complete` launches the rest. Where grammars take part, the host waits in it for the
    target's choices; until then nothing else may be launched that a round reads, nor another round or prompt chunk."""

    max_path: int  # see `Launched`
    complete: Callable[[], Launched]
    is_whole: bool = False  # everything is launched already

    @staticmethod
    def whole(launched: Launched) -> Begun:
        return Begun(launched.max_path, lambda: launched, is_whole=True)


class RoundExecutor:
    """Runs rounds on lists of slots, each by the number of them.

    A batch size whose graph does not fit into memory runs eagerly from then on. An eager round that runs out of memory
    raises, and leaves all slots as they were before it.
    """

    def __init__(
        self,
        rounds: ByBatch[Round],
        max_batch_size: int,
        device: torch.device,
        mode: GraphMode,
        lanes: LaneSizes | None = None,
        *,
        shrinks: bool = True,
    ) -> None:
        """`lanes` None: rounds have one. `shrinks`: a batch size whose graph does not fit into memory runs eagerly."""
        self._shrinks = shrinks
        self.rounds = rounds
        self.lanes = lanes
        self._sizes = ladder(max_batch_size)
        self._captures = padded_sizes(rounds, max_batch_size, lanes)
        self.mode: GraphMode = mode if device.type == "cuda" else "none"
        self._transfers = Transfers(device)
        self._padding = rounds.items[0].state.padding
        # Two lanes of an odd number of requests have one row more.
        most = max(max_batch_size, self._captures[0][0].size)
        self._req_idx_B = torch.full((most,), self._padding, dtype=torch.int64, device=device)
        self._uploaded: list[int] = []
        self._uncaptured: set[RoundKey] = set()  # keys whose graphs did not fit into memory
        self.runner: GraphRunner | None = GraphRunner(device) if self.mode != "none" else None
        self._grammars: GrammarGraphs | None = None  # made for the first batch with a grammar

    @property
    def async_depth(self) -> int:
        """Results that may be unread when the next round is launched: none where the host drafts, from all tokens, and
        none on a CPU, which computes nothing meanwhile."""
        rounds = self.rounds.items
        host_drafts = any(isinstance(round_.method, HostDraftMethod) for round_ in rounds)
        return 1 if rounds[0].fixed_shapes and not host_drafts else 0

    @property
    def num_graphs(self) -> int:
        return 0 if self.runner is None else len(self.runner)

    def release_graphs(self) -> bool:
        """Give the memory of all graphs back; from now on rounds run eagerly. Nothing may be in flight. Returns whether
        there were graphs."""
        had_graphs, self.runner, self._grammars, self.mode = self.runner is not None, None, None, "none"
        return had_graphs

    def capture(
        self,
        sampled: bool,
        on_progress: Callable[[str], None] = lambda progress: None,
        num_top: int | None = None,
    ) -> None:
        """Capture all sizes, for batches with sampled requests or without. No request may run."""
        gc.collect()  # graphs of a round that is no more keep memory: once, for it takes as long as a capture
        for number, ((size, lane), i) in enumerate(self._captures, start=1):
            on_progress(f"capturing CUDA graphs: {number} of {len(self._captures)}, {size} rows{', sampled' * sampled}")
            self._capture(RoundKey(size, i, sampled, num_top, lane=lane))

    def capture_largest(self) -> None:
        """Capture what takes the most memory: for a trial, which wants to know how much. There is a table of rules."""
        largest = {i: size for size, i in reversed(self._captures)}
        for i, (size, lane) in largest.items():
            for key in (
                RoundKey(size, i, sampled=False, lane=lane),
                RoundKey(size, i, True, MAX_TOP_LOGPROBS, ALL_EDITS, lane=lane),
            ):
                self._capture(key)

    def _capture(self, key: RoundKey, grammar: GrammarRound | None = None) -> None:
        """Capture a round. If memory runs out, this kind of batch stays uncaptured. `grammar`: the grammar round of a
        batch that has one."""
        assert self.runner is not None
        saved, groups = self._uploaded, self.groups
        self._uploaded = []
        self.write_groups([])  # they may be of a larger batch
        self._req_idx_B[: key.size].fill_(self._padding)
        try:
            self._capture_round(self.runner, key, grammar)
        except Exception as error:
            if not self._shrinks or not is_out_of_memory(error):
                raise
            self._uncaptured.add(key)
            for name in ("round", *PARTS):
                self.runner.drop((name, *key))
        if saved:
            self._upload(saved)
        self.write_groups(groups)

    def _capture_round(self, runner: GraphRunner, key: RoundKey, grammar: GrammarRound | None) -> None:
        req_idx_B, round_ = self._req_idx_B[: key.size], self.rounds.items[key.item]
        if grammar is not None:
            round_ = round_.drafting(grammar.method)
            if self._grammars is None:
                self._grammars = GrammarGraphs(runner, len(self._req_idx_B))
            self._grammars.capture(round_, req_idx_B, key, grammar.of_padding(), Launched.of)
            return
        wanted = key.sampled, key.num_top, key.edits
        # Only the report is kept: other sizes can use the memory of everything else that a round leaves.
        runner.capture(("round", *key), lambda: Launched.of(round_(req_idx_B, *wanted, lane=key.lane)))

    @property
    def groups(self) -> list[Group]:
        """Return the groups that the last call of `write_groups` wrote."""
        table = self.rounds.items[0].state.groups
        return [] if table is None else table.written

    def write_groups(self, groups: list[Group]) -> None:
        """Write the groups of requests, by index in the next round's batch, whose common keys are read once. Do nothing
        if rounds do not read groups."""
        table = self.rounds.items[0].state.groups
        if table is not None:
            table.write(groups, self._transfers.upload)

    def _upload(self, padded: list[int]) -> None:
        if padded != self._uploaded:
            self._req_idx_B[: len(padded)].copy_(self._transfers.upload(np.array(padded, dtype=np.int64)))
            self._uploaded = padded

    def run(
        self,
        slots: list[int],
        sampled: bool,
        num_top: int | None = None,
        edits: Edits = Edits.NONE,
        grammar: GrammarRound | None = None,
        lane: int = 0,
    ) -> Begun:
        """Launch a round of these slots, among which padding may be. `sampled`, `num_top`, `edits`, `lane`: see
        `Round`. `grammar`: the hook of requests that have one; then the caller completes the round."""
        size, i = self.padded_size(len(slots), lane), self.rounds.index(len(slots) - slots.count(self._padding))
        self._upload(slots + [self._padding] * (size - len(slots)))
        req_idx_B = self._req_idx_B[:size]
        round_, key = self.rounds.items[i], RoundKey(size, i, sampled, num_top, edits, lane)
        if grammar is not None:
            round_, key = round_.drafting(grammar.method), key._replace(num_nodes=grammar.method.num_nodes)
        if self.runner is None:
            return self._eager(round_, req_idx_B, key, grammar)
        name = PARTS[0] if grammar is not None else "round"
        if (name, *key) not in self.runner and key not in self._uncaptured:  # the first batch of its kind
            self._capture(key, grammar)
        if key in self._uncaptured:
            return self._eager(round_, req_idx_B, key, grammar)
        if grammar is None:
            return Begun.whole(self.runner.replay(("round", *key)))
        assert self._grammars is not None
        max_path = self._grammars.begin(key, grammar).max_path
        return Begun(max_path, functools.partial(self._grammars.complete, key, grammar))

    def _eager(self, round_: Round, req_idx_B: Tensor, key: RoundKey, grammar: GrammarRound | None = None) -> Begun:
        wanted = req_idx_B, key.sampled, key.num_top, key.edits
        if grammar is None:
            return Begun.whole(_restoring(round_, lambda: Launched.of(round_(*wanted, key.lane))))
        max_path, complete = round_.begin(*wanted, grammar)
        return Begun(max_path, lambda: _restoring(round_, lambda: Launched.of(complete())))

    def padded_size(self, batch_size: int, lane: int = 0) -> int:
        """The size that a batch is padded to where shapes are fixed: of the ladder, or that of two equal lanes."""
        if not self.rounds.items[0].fixed_shapes:
            return batch_size
        if lane:
            return 2 * lane
        return next(size for size in self._sizes if size >= batch_size)


def _restoring(round_: Round, launch: Callable[[], Launched]) -> Launched:
    restore = round_.state.saved()
    try:
        return launch()
    except Exception as error:
        # Past the commit, the slots have moved on, and nobody would ever read where to. What else a round writes lies
        # past the committed slots of each row: the next one writes it again.
        if is_out_of_memory(error):
            restore()
        raise
