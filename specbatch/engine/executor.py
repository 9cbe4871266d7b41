"""Launches rounds: pads the batch to a captured size and replays its graphs, or launches every kernel from the host."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specbatch.batch import ALL_EDITS
from specbatch.cache.prefix_groups import Group
from specbatch.draft.host import HostDraftMethod
from specbatch.draft.method import DraftMethod
from specbatch.draft.schedule import ByBatch
from specbatch.engine.budget_graphs import BudgetGraphs, RoundSize, timed_rounds
from specbatch.engine.logprobs import MAX_TOP_LOGPROBS
from specbatch.engine.overlap.lanes import LaneSizes
from specbatch.engine.reports import Report
from specbatch.engine.round import GREEDY, NO_HOOK, Launched, Round, RoundHook, RoundKey, Wanted
from specbatch.engine.round_graphs import RoundGraphs
from specbatch.engine.sequence import Sequence
from specbatch.engine.transfers import Transfers
from specbatch.engine.verify_budget import VerifyBudget
from specbatch.graphs.runner import GraphRunner, ladder
from specbatch.kernels.out_of_memory import is_out_of_memory

GraphMode = Literal["round", "none"]
_TIMED = 5  # repeats of a round that is timed


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


class RoundBatch(NamedTuple):
    """The requests of a round in the order of its lines, and what they want of it."""

    sequences: Seq[Sequence | None]  # None: padding
    wanted: Wanted = GREEDY
    hook: RoundHook = NO_HOOK
    lane: int = 0  # lines of the first of two lanes; 0: there is one
    num_requests: int | None = None  # the number for which the round is made; None: those of the batch


class RoundExecutor:
    """Launches the rounds of batches, with the draft method for the number of their requests.

    A batch size whose graphs do not fit into memory runs eagerly from then on. An eager round that runs out of memory
    raises, and leaves the request table as it was before it.
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
        budget: VerifyBudget | None = None,
    ) -> None:
        """`lanes` None: rounds have one. `shrinks`: a batch size whose graph does not fit into memory runs eagerly.
        `budget`: the nodes that rounds verify; None: all."""
        self.budget = budget
        self.shrinks = shrinks
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
        # The graphs for a budget that changes, by item of the schedule and what requests want.
        self._budget_graphs: dict[tuple[int, Wanted], BudgetGraphs] = {}
        self._uncaptured: set[RoundKey] = set()  # keys whose graphs did not fit into memory
        self.runner: GraphRunner | None = GraphRunner(device) if self.mode != "none" else None
        self._graphs: RoundGraphs | None = None  # made at the first capture

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

    def key_of(self, batch_size: int, wanted: Wanted, method: DraftMethod) -> RoundKey:
        """Return the key of the graphs of a round of this number of requests, in one lane, with a draft method that is
        not the schedule's."""
        size = self.padded_size(batch_size)
        return RoundKey(size, self.rounds.index(batch_size), wanted, num_nodes=method.num_nodes)

    def is_captured(self, key: RoundKey) -> bool:
        """Return whether there are graphs of this kind of round."""
        return self._graphs is not None and key in self._graphs

    def fits(self, key: RoundKey) -> bool:
        """Return whether memory has not run out for the graphs of this kind of round."""
        return key not in self._uncaptured

    def release_graphs(self) -> bool:
        """Give the memory of all graphs back; from now on rounds run eagerly. Nothing may be in flight. Returns whether
        there were graphs."""
        had_graphs, self.runner, self._graphs, self.mode = self.runner is not None, None, None, "none"
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
            self._capture(*self._kind_of(size, i, Wanted(sampled, num_top), lane, NO_HOOK))

    def capture_kind(self, wanted: Wanted, hook_of: Callable[[DraftMethod, int], RoundHook | None]) -> None:
        """Capture all sizes of a kind of batch that are not captured yet. `hook_of`: the hook of its rounds, given the
        draft method and the size; None: it has no such rounds of this size."""
        for (size, lane), i in self._captures:
            if (hook := hook_of(self.rounds.items[i].method, size)) is not None:
                if hook.takes_part and lane:  # The host takes part in rounds of one lane.
                    size, lane = self.padded_size(min(size, self._sizes[-1])), 0
                self._graphs_of(*self._kind_of(size, i, wanted, lane, hook), hook)

    def _kind_of(self, size: int, item: int, wanted: Wanted, lane: int, hook: RoundHook) -> tuple[RoundKey, Round]:
        """Return the key of a round's graphs, and the round."""
        round_, key = self.rounds.items[item], RoundKey(size, item, wanted, lane)
        if hook.method is None:
            return key._replace(num_verified=self._num_verified(key, round_, hook)), round_
        key = key._replace(num_nodes=hook.method.num_nodes, with_host=hook.takes_part)
        return key, round_.drafting(hook.method)

    def _num_verified(self, key: RoundKey, round_: Round, hook: RoundHook) -> int | None:
        """Return the number of nodes that a round verifies if its budget is fixed; None: all."""
        if self.budget is None or not self._shares(key, round_, hook):
            return None
        return self.budget.num_verified(key.size, round_.method.num_nodes)

    def _shares(self, key: RoundKey, round_: Round, hook: RoundHook) -> bool:
        """Return whether the chains of a round can share a budget. Rounds in two lanes verify all nodes."""
        can_share = not (key.lane or hook.method is not None or hook.takes_part)
        return can_share and self.can_share(key.wanted, round_.method)

    @staticmethod
    def can_share(wanted: Wanted, method: DraftMethod) -> bool:
        """Return whether chains of these requests can share a budget. With rules for tokens or with grammars they
        cannot, and draft methods need scores."""
        return not wanted.edits and method.scored

    def _within_budget(self, key: RoundKey, round_: Round, count: int) -> RoundKey:
        """Return the key of the round that `count` requests take by a budget that changes. `key`: that of all nodes."""
        assert self.budget is not None
        choice = self._graphs_for_budget(key, round_).choose(key.size, count)
        taken, best = (self._sized(key, round_, one) for one in (choice.taken, choice.best))
        if self.runner is None:  # An eager round needs no graph.
            return best
        # Whole chains may need a new graph, too: the start captures graphs of one kind of round alone.
        needs_graph = taken.num_verified is None and not self.is_captured(taken)
        if (choice.is_due or needs_graph) and self._capture_shared(key, round_, choice.best):
            return best
        return taken

    def _graphs_for_budget(self, key: RoundKey, round_: Round) -> BudgetGraphs:
        assert self.budget is not None
        assert self.budget.times is not None
        kind = key.item, key.wanted
        if kind not in self._budget_graphs:
            self._budget_graphs[kind] = BudgetGraphs(self.budget, round_.method.num_nodes)
        return self._budget_graphs[kind]

    def _sized(self, key: RoundKey, round_: Round, one: RoundSize) -> RoundKey:
        is_whole = one.nodes == one.size * round_.method.num_nodes
        return key._replace(size=one.size, num_verified=None if is_whole else one.nodes)

    def _capture_shared(self, key: RoundKey, round_: Round, one: RoundSize) -> bool:
        """Capture a graph for a budget that changes. Return whether there was memory for it."""
        if self._graphs_of(self._sized(key, round_, one), round_, NO_HOOK) is None:
            return False
        self._graphs_for_budget(key, round_).add(one)
        return True

    def capture_for_budget(self, wanted: Wanted) -> None:
        """Capture the graphs with which rounds of this kind start to follow a budget that changes."""
        for key, round_, sizes in self._sharing(wanted):
            for one in self._graphs_for_budget(key, round_).at_start(sizes):
                self._capture_shared(key, round_, one)

    def measure(self, wanted: Wanted) -> list[tuple[int, int, float]]:
        """Time the captured rounds of this kind whose chains could share a budget: the size of the batch, the nodes of
        all chains, and milliseconds. The rounds are of padding."""
        keys = [
            (key._replace(size=size), size * round_.method.num_nodes)
            for key, round_, sizes in self._sharing(wanted)
            for size in sizes
        ]
        return [(key.size, nodes, self._milliseconds(key)) for key, nodes in keys if self.is_captured(key)]

    def measure_sharing(self, wanted: Wanted) -> list[tuple[int, int, float]]:
        """Capture rounds of each draft method that share a budget (see `timed_rounds`), and time them as `measure`
        does."""
        found = []
        for key, round_, sizes in self._sharing(wanted):
            for one in timed_rounds(sizes, round_.method.num_nodes):
                shared = self._sized(key, round_, one)
                if self._graphs_of(shared, round_, NO_HOOK) is not None:
                    found.append((one.size, one.nodes, self._milliseconds(shared)))
        return found

    def _sharing(self, wanted: Wanted) -> list[tuple[RoundKey, Round, list[int]]]:
        """List the rounds whose chains can share a budget, with the sizes of their batches. The keys have no size."""
        found = []
        for item, round_ in enumerate(self.rounds.items):
            key, sizes = RoundKey(0, item, wanted), [n for (n, lane), i in self._captures if i == item and not lane]
            if sizes and self._shares(key, round_, NO_HOOK):
                found.append((key, round_, sizes))
        return found

    def _milliseconds(self, key: RoundKey) -> float:
        assert self._graphs is not None
        self._uploaded = []
        self._req_idx_B.fill_(self._padding)
        return statistics.median(self._graphs.milliseconds(key) for _ in range(_TIMED))

    def saw(self, output_BZ: NDArray[np.int32], sequences: Seq[Sequence | None]) -> None:
        """Take note of the output of a round (see `Output`), for a budget that changes."""
        if self.budget is not None and self.budget.changes and self.budget.record(output_BZ):
            lengths = [seq.num_computed_tokens for seq in sequences if seq is not None]
            self.budget.cached_tokens = statistics.mean(lengths) if lengths else 0.0

    def capture_largest(self) -> None:
        """Capture what takes the most memory: for a trial, which wants to know how much. There is a table of rules."""
        largest = {i: size for size, i in reversed(self._captures)}
        for i, (size, lane) in largest.items():
            for key in (
                RoundKey(size, i, GREEDY, lane),
                RoundKey(size, i, Wanted(True, MAX_TOP_LOGPROBS, ALL_EDITS), lane),
            ):
                self._capture(key, self.rounds.items[i])

    def _capture(self, key: RoundKey, round_: Round, hook: RoundHook = NO_HOOK) -> None:
        """Capture a round. If memory runs out, this kind of batch stays uncaptured."""
        assert self.runner is not None
        if self._graphs is None:
            self._graphs = RoundGraphs(self.runner, len(self._req_idx_B))
        saved, groups = self._uploaded, self.groups
        self._uploaded = []
        self.write_groups([])  # they may be of a larger batch
        req_idx_B = self._req_idx_B[: key.size].fill_(self._padding)
        try:
            self._graphs.capture(round_, req_idx_B, key, hook.of_padding())
        except Exception as error:
            if not self.shrinks or not is_out_of_memory(error):
                raise
            self._uncaptured.add(key)
            self._graphs.drop(key)
        if saved:
            self._upload(saved)
        self.write_groups(groups)

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

    def run(self, batch: RoundBatch) -> Report:
        """Begin a round. `Report.complete` launches the rest: at once, unless the round's hook takes part."""
        padding, hook = self._padding, batch.hook
        lines = [padding if seq is None else seq.req_idx for seq in batch.sequences]
        count = len(lines) - lines.count(padding) if batch.num_requests is None else batch.num_requests
        size, i = self.padded_size(batch.num_requests or len(lines), batch.lane), self.rounds.index(count)
        key, round_ = self._kind_of(size, i, batch.wanted, batch.lane, hook)
        if self.budget is not None and self.budget.changes and self._shares(key, round_, hook):
            key = self._within_budget(key, round_, batch.num_requests or len(lines))
        self._upload(lines + [padding] * (key.size - len(lines)))
        if (graphs := self._graphs_of(key, round_, hook)) is not None:
            return Report.of_round(batch.sequences, *graphs.begin(key, hook), hook)
        max_path, complete = round_.begin(self._req_idx_B[: key.size], batch.wanted, batch.lane, hook, key.num_verified)
        return Report.of_round(batch.sequences, max_path, lambda: _restoring(round_, complete), hook)

    def _graphs_of(self, key: RoundKey, round_: Round, hook: RoundHook) -> RoundGraphs | None:
        """Return the graphs with this kind of round, captured for the first batch of the kind. None: such rounds run
        eagerly."""
        if self.runner is None or key in self._uncaptured:
            return None
        if self._graphs is None or key not in self._graphs:
            self._capture(key, round_, hook)
        return None if key in self._uncaptured else self._graphs

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
        # After the commit, the request table has advanced, and nobody would ever read how far. Everything else that a
        # round writes is after the committed slots of each request: the next round writes it again.
        if is_out_of_memory(error):
            restore()
        raise
