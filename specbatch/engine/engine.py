"""The engine: launches prompt chunks and rounds, and reads what they decided.

Rounds read and advance tables on the device. On CUDA the host launches the next one, and only then reads what the one
before it decided, out of a copy that is there by then. So it plans with what it has read: pages for the worst case of
rounds in flight; and a request that ended is noticed a round late, while its line of the table, marked done on the
device, writes nothing. On a CPU nothing is in flight.
"""

from __future__ import annotations

import functools
import gc
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch

from specbatch.batch import Edits
from specbatch.cache.pages import PagePool
from specbatch.cache.prefix import PrefixIndex
from specbatch.cache.request_table import RequestTable
from specbatch.draft.host import HostDraftMethod
from specbatch.draft.method import DraftMethod
from specbatch.draft.schedule import ByBatch
from specbatch.engine.base import EngineBase
from specbatch.engine.batch_groups import BatchGroups
from specbatch.engine.constrained.policy import Grammars
from specbatch.engine.constrained.tree import MAX_FORCED
from specbatch.engine.cpu_threads import ThreadGovernor
from specbatch.engine.executor import GraphMode, RoundExecutor
from specbatch.engine.logprobs import LogprobLayout, num_top_of, with_logprobs
from specbatch.engine.overlap.lanes import Batch, Lanes
from specbatch.engine.prefill.admission_batching import ChunkCost, RoundsOfRows
from specbatch.engine.prefill.graphs import PromptGraphs
from specbatch.engine.prefill.models import EAGER, PromptTrunks
from specbatch.engine.prefill.packing import PromptPacker
from specbatch.engine.reports import Report, Scored, read_report
from specbatch.engine.round import Round
from specbatch.engine.scheduler import PrefillSpan, Scheduler
from specbatch.engine.sequence import Sequence
from specbatch.engine.table_writer import TableWriter
from specbatch.engine.transfers import Transfers
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.kernels.trace_marks import marked
from specbatch.types import Completion, FinishReason

# What cannot be made smaller is tried so often: other programs may take memory for a moment.
_SMALLEST_CHUNK, _TRIES = 32, 4


class Engine(EngineBase):
    """Runs requests to completion. See `types.BatchEngine` for what each method promises."""

    def __init__(
        self,
        executor: RoundExecutor,
        pool: PagePool,
        device: torch.device,
        *,
        vocab_size: int,
        max_length: int,
        longest_row: int | None = None,
        max_batch_size: int,
        prefill_chunk_tokens: int,
        prefix_cache: bool,
        eos_token_ids: tuple[int, ...],
        chunk_cost: ChunkCost | None = None,
        threads: ThreadGovernor | None = None,
        shrinks: bool = True,
        trunks: PromptTrunks = EAGER,
        deterministic: bool = False,
    ) -> None:
        """Make an idle engine. `chunk_cost` None: short prompts are not held back. `threads`: the thread governor of a
        CPU. `shrinks`: batches and chunks that run out of memory are made smaller. `trunks`: the models that compute
        prompts. `deterministic`: see `Grammars`."""
        rounds = executor.rounds.items
        self.executor = executor
        self._round: Round = rounds[0]  # used for prompts, which are the same for all draft methods
        self._state: RequestTable = self._round.state
        self._eos = frozenset(eos_token_ids)
        net = self._round.method.net
        prefix = PrefixIndex(pool, 1 - net.draft_kv_offset if net is not None else 0) if prefix_cache else None
        lookahead = max(round_.method.num_lookahead for round_ in rounds)
        scheduler = Scheduler(
            pool, prefix, lookahead, self._start, max_batch_size, prefill_chunk_tokens,
            min_prefill_tokens=1 if chunk_cost is None else chunk_cost.tokens,
        )  # fmt: skip
        super().__init__(scheduler, vocab_size, max_length, longest_row, eos_token_ids)
        self.chunk_cost = chunk_cost
        self.device = device
        self._threads, self._shrinks = threads, shrinks
        self._transfers = Transfers(device)
        self._packer = PromptPacker(pool.page_size, None if net is None else net.draft_kv_offset)
        graph_tokens = 0 if chunk_cost is None else chunk_cost.graph_tokens
        self.prompts = PromptGraphs(
            self._packer, self._transfers, device, max_batch_size, graph_tokens, trunks, shrinks=shrinks
        )
        self._rows = TableWriter(self._state, self._transfers, max_batch_size, vocab_size)
        self._groups = BatchGroups(self._state.groups, pool.page_size, max_batch_size)
        self._max_batch_size = max_batch_size
        sizes = executor.lanes
        self._lanes = None if sizes is None else Lanes(sizes, pads=self._round.fixed_shapes)
        self.max_forced = 0 if self._round.fixed_shapes else MAX_FORCED
        traits = {
            "fixed_shapes": self._round.fixed_shapes,
            "simulates": self._round.simulates,
            "deterministic": deterministic,
        }
        self._grammars = Grammars(self._rows, self._transfers, lookahead + self.max_forced, **traits)
        self._forget_rounds()
        self._in_flight: deque[Report] = deque()  # the oldest first; only the last one can be open
        self._failed = 0  # launches in a row that ran out of memory
        self._last_read = time.perf_counter()
        self.start_seconds: dict[str, float] = {}
        self.start_bytes: dict[str, int] = {}  # bytes of the device that were measured and reserved at the start

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        if self._threads is not None:
            self._threads.update()
        self._last_read = time.perf_counter()  # The time that the caller took in between is not the engine's.
        finished: list[Completion] = []
        graphs, seconds = self._captured()
        launched = self._launch(finished)
        graphs_now, seconds_now = self._captured()
        self._stats.late_graphs += max(0, graphs_now - graphs)
        self._stats.late_graph_seconds += max(0.0, seconds_now - seconds)
        while len(self._in_flight) > (self.executor.async_depth if launched else 0):
            finished += self._read()
            if not launched:
                break  # A result that was read may have made room, so launch before more results are read.
        if not (self.num_running or self.num_waiting):
            self._forget_open()  # all of its requests have ended: it is not needed, and it holds graphs and tensors
            if self._threads is not None:
                self._threads.rest()
        return finished

    def _captured(self) -> tuple[int, float]:
        """CUDA graphs, and the seconds that capturing them took."""
        runners = [runner for runner in (self.executor.runner, self.prompts.runner) if runner is not None]
        return sum(map(len, runners)), sum(runner.seconds for runner in runners)

    def _launch(self, finished: list[Completion]) -> bool:
        """Launch a prompt chunk or a round, if there is anything to run."""
        spans = self._scheduler.plan_prefill()
        if spans:
            return self._fits(lambda: self._prefill(spans), lambda: self._give_up(spans), finished)
        if self._in_flight and self._scheduler.would_preempt():
            finished += self.drain()  # Read all results first, so that the choice of the request to preempt uses them.
        rows = [seq for seq in self._scheduler.plan_round() if seq.can_go_on]
        if not rows:
            return False
        return self._fits(
            lambda: self._run(rows, finished), lambda: self._lower_batch(len(rows) // 2, finished), finished
        )

    def _fits(self, launch: Callable[[], None], relieve: Callable[[], bool], finished: list[Completion]) -> bool:
        """Launch; where the device's memory does not suffice, nothing has happened, and `relieve` makes the next
        attempt smaller, if it can be. If it cannot, the graphs give their memory back. Returns whether something was
        launched."""
        try:
            launch()
            if not self._has_open:  # A round that was begun can still run out of memory.
                self._failed = 0
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            shortage = self._shortage(error)
        if not self._shrinks:
            raise shortage
        # Only here the failed launch's tensors are gone, which the error's traceback held.
        self._stats.memory_shortages += 1
        self._failed += 1
        if not relieve() and not self._release_graphs(finished) and self._failed >= _TRIES:
            raise shortage
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return False

    def _release_graphs(self, finished: list[Completion]) -> bool:
        finished += self.drain()  # a graph that runs must not go
        return self.release_graphs()

    def release_graphs(self) -> bool:
        """Give the memory of all graphs back; nothing may run on the device. Returns whether there were graphs."""
        self._forget_open()  # it would replay one
        released = [self.executor.release_graphs(), self.prompts.release_graphs()]
        gc.collect()  # they can be in cycles
        return any(released)

    def _give_up(self, spans: list[PrefillSpan]) -> bool:
        """Compute these pieces of prompts later, from the beginning, and in smaller chunks. Nobody reads what the
        failed launch wrote: slots are set anew when requests are admitted again, and pages are written first."""
        self._rows.forget_started()
        is_last = sum(span.end - span.start for span in spans) <= _SMALLEST_CHUNK
        self._scheduler.give_up(spans, _SMALLEST_CHUNK)
        return not is_last

    def _lower_batch(self, size: int, finished: list[Completion]) -> bool:
        """Run at most `size` requests from now on. The failed round has left all slots as they were."""
        if size < 1:
            return False
        finished += self.drain()  # Read all results first, so that the choice of the request to preempt uses them.
        self._max_batch_size = size
        self._scheduler.lower_batch(size)
        return True

    def _run(self, rows: list[Sequence], finished: list[Completion]) -> None:
        params = [seq.request.params for seq in rows]
        method, padded_size = self.executor.rounds.at(len(rows)).method, self.executor.padded_size(len(rows))
        method = self._grammars.method(rows, method, padded_size)
        sampled, num_top = any(p.temperature > 0 for p in params), num_top_of(p.logprobs for p in params)
        edits, groups = self._edits(rows), self._groups.of(rows, method.num_nodes)
        self._complete_round()
        self._set_back()
        self._rows.upload_pages(rows)
        if isinstance(method, HostDraftMethod):
            self._rows.upload_host_trees(rows, method.pack(method.host_draft(rows)))
        # After a part of a round with grammars is launched: they follow all tokens.
        grammar = self._grammars.of_round(rows, method, lambda: finished.extend(self.drain()))
        # A batch with grammars waits for the host: it is one lane.
        batch = Batch(rows) if self._lanes is None or grammar is not None else self._lanes.divide(rows)
        slots = [self._state.padding if seq is None else seq.req_idx for seq in batch.sequences]
        self.executor.write_groups(groups)
        begun = self.executor.run(slots, sampled, num_top, edits, grammar, batch.lane)
        self._in_flight.append(Report.of_round(batch.sequences, begun, grammar))
        if begun.is_whole:
            self._complete_round()

    @property
    def _has_open(self) -> bool:
        """Return whether a round was begun and not completed."""
        return bool(self._in_flight) and self._in_flight[-1].is_open

    def _complete_round(self) -> None:
        """Launch the rest of the round that was begun last, before anything else is launched."""
        if not self._has_open:
            return
        round_ = self._in_flight.pop()
        round_.complete(self._transfers)
        self._in_flight.append(round_)
        self._stats.rounds += 1
        if round_.grammar is not None:
            self._failed = 0
            self._stats.grammar.add(round_.grammar.counts)
            self._grammars.saw(round_.grammar)

    def _forget_open(self) -> None:
        """Drop a round that was begun and not completed."""
        if self._has_open:
            self._in_flight.pop()

    def _set_back(self) -> None:
        """Set the lines of requests back that began a round with a token that their grammar refuses."""
        if going_back := [seq for seq in self._scheduler.running if seq.goes_back]:
            self._rows.set_back(going_back)
            for seq in going_back:
                seq.goes_back = False

    def _prefill(self, spans: list[PrefillSpan]) -> None:
        self._complete_round()
        self._set_back()
        self._rows.upload_started()
        self._rows.upload_pages([s.seq for s in spans])
        packed = self._packer.pack(spans)
        ready = [s.seq for s in spans if s.end == s.seq.num_prefill_tokens]
        params = [seq.request.params for seq in ready]
        sampled, num_top = any(p.temperature > 0 for p in params), num_top_of(p.logprobs for p in params)
        self._grammars.write_first_masks(ready)
        with marked("prompts"):
            tokens, logprobs, scores = self.prompts.run(
                self._round, packed, sampled, num_top, self.executor.mode, self._edits(ready)
            )
        chosen = self._transfers.download(with_logprobs(tokens, logprobs))
        for s in spans:
            self._count_prefill(s)
            s.seq.num_computed_tokens = s.end
            # The next owner of these pages reads them after this chunk.
            self._scheduler.share(s.seq)
        first_tokens: list[Sequence | None] = []
        for seq in ready:
            # A request that is computed again after a preemption has its root already.
            first_tokens.append(seq if len(seq.tokens) == seq.num_computed_tokens else None)
            seq.rounds_in_flight += first_tokens[-1] is not None
        layout = None if logprobs is None else LogprobLayout.of(logprobs)
        scored = None if scores is None else Scored.start(packed.scored, scores, self._transfers)
        self._in_flight.append(Report(first_tokens, None, chosen, layout, scored))
        # Launching a chunk takes the host longer than many a round.
        now = time.perf_counter()
        self._stats.prefill_seconds += now - self._last_read
        self._last_read = now

    def _edits(self, sequences: Iterable[Sequence]) -> Edits:
        """Return the kinds of edits that the rules of a batch make. Where rounds may be graphs, it is one of few
        combinations."""
        # Each kind once: to join flags takes as long as all else that a round does for a row.
        kinds = {int(seq.rules.edits) for seq in sequences if seq.rules is not None}
        edits = functools.reduce(operator.or_, map(Edits, kinds), Edits.NONE)
        return edits.family if self._round.fixed_shapes else edits

    def _read(self) -> list[Completion]:
        """Wait for the oldest report and do what it says."""
        if self._in_flight[0].is_open:
            finished: list[Completion] = []
            size = len(self._in_flight[0].sequences) // 2
            if not self._fits(self._complete_round, lambda: self._lower_batch(size, finished), finished):
                return finished
        report = self._in_flight.popleft()
        began = time.perf_counter()
        rows = report.wait()
        now = time.perf_counter()
        self.waited_seconds += now - began
        if report.max_path is None:
            self._stats.prefill_seconds += now - self._last_read
        else:
            self._stats.decode_seconds += now - self._last_read
        self._last_read = now
        ended = read_report(report, rows, self._eos, self._stats)
        return [self._complete(seq, reason) for seq, reason in ended]

    def _forget_rounds(self) -> None:
        """Before any request has ended, short prompts are held for a sixteenth of the request indices."""
        self._rounds_of_rows = RoundsOfRows()
        if self.chunk_cost is not None:
            self._scheduler.min_free_requests = max(1, self._max_batch_size // 16)

    def _complete(self, seq: Sequence, reason: FinishReason) -> Completion:
        self._rounds_of_rows.add(seq.counts.rounds)
        if self.chunk_cost is not None:
            self._scheduler.min_free_requests = self.chunk_cost.min_free_requests(
                self._max_batch_size, self._rounds_of_rows.mean
            )
        return super()._complete(seq, reason)

    def _start(self, seq: Sequence) -> None:
        """A request was admitted: give it a slot. A slot whose last round is still under way may be taken: what is
        launched for the new request comes after that round."""
        self._rows.start(seq, self._scheduler.running)
        self._groups.forget(seq.req_idx)
        seq.num_draft_computed = seq.num_computed_tokens
        seq.num_in_flight = seq.rounds_in_flight = 0
        seq.goes_back = False

    @torch.inference_mode()
    def set_methods(
        self,
        methods: ByBatch[DraftMethod],
        mode: GraphMode,
        sampled: bool = False,
        on_progress: Callable[[str], None] = lambda progress: None,
        ahead: bool = True,
    ) -> None:
        """Use other draft methods from now on, with the same draft network or none, and with other graphs. `sampled`:
        capture graphs of rounds with sampled requests too. `ahead`: capture all graphs now; False: when the first batch
        of a size comes. The engine must be idle, and must have been built for the largest draft shape. The entries of
        its prefix cache are of use only to the draft network that computed them."""
        assert not self._scheduler.running, "requests are running"
        assert not self._scheduler.waiting, "requests are waiting"
        self.drain()  # the round in which the last request was seen to have ended
        lookahead = max(method.num_lookahead for method in methods.items)
        assert lookahead <= self._scheduler.num_lookahead, "wider than what the engine was built for"
        columns = max(method.num_host_columns for method in methods.items)
        assert columns <= self._state.host_trees_SZ.shape[1], "the engine was built without room for such drafts"
        has_tokens = self._state.tokens_SL.shape[1] > 0
        assert has_tokens or not any(method.reads_tokens for method in methods.items), "no tokens are on the device"
        device, size = self._state.ints_SF.device, self._max_batch_size
        self.executor = RoundExecutor(methods.map(self._round.drafting), size, device, mode, self.executor.lanes)
        self._round = self.executor.rounds.items[0]
        self._forget_rounds()  # rows take another number now, and what runs next must not depend on what ran before
        if ahead and self.executor.runner is not None:
            for kind in [False, True] if sampled else [False]:
                self.executor.capture(kind, on_progress)

    @torch.inference_mode()
    def drain(self) -> list[Completion]:
        """Wait for everything that was launched; returns the requests that finished with it."""
        finished: list[Completion] = []
        while self._in_flight:
            finished += self._read()
        return finished

    def prepare_round(self) -> list[int]:
        """The request indices of the next round, whose page tables are on the device then: to run it by hand."""
        sequences = self._scheduler.plan_round()
        self._rows.upload_pages(sequences)
        num_queries = self.executor.rounds.at(len(sequences)).method.num_nodes
        self.executor.write_groups(self._groups.of(sequences, num_queries))
        return [seq.req_idx for seq in sequences]

    def abort_all(self) -> None:
        self.drain()  # The rounds in flight write to pages that are freed next.
        super().abort_all()
        self._rows.forget_started()

    def check_integrity(self) -> None:
        """Assert that every page is accounted for, and every slot too. For tests, between steps."""
        super().check_integrity()
        slots = [seq.req_idx for seq in self._scheduler.running]
        assert len(set(slots)) == len(slots), "two requests share a slot"
