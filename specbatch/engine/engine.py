"""The engine: launches prefill chunks and rounds, and reads what they decided.

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
from dataclasses import dataclass, replace

import torch

from specbatch.batch import MAX_STOP_IDS, Edits, Output
from specbatch.cache.pages import PagePool
from specbatch.cache.prefix import PrefixIndex
from specbatch.cache.request_table import RequestTable
from specbatch.counts import DEVICE, EngineStats, ExpertCounts
from specbatch.draft.host import HostDraftMethod
from specbatch.draft.method import DraftMethod
from specbatch.draft.schedule import ByBatch
from specbatch.engine.batch_groups import BatchGroups
from specbatch.engine.constrained.policy import Grammars, RoomHook
from specbatch.engine.cpu_threads import ThreadGovernor
from specbatch.engine.executor import GraphMode, RoundBatch, RoundExecutor
from specbatch.engine.lockstep import Lockstep, NextRound
from specbatch.engine.logprobs import num_top_of
from specbatch.engine.node_chooser import NodeChooser, RoundCosts, SizedHook
from specbatch.engine.overlap.lanes import Lanes
from specbatch.engine.prefill.admission_batching import ChunkCost, RoundsOfRows
from specbatch.engine.prefill.graphs import PromptGraphs
from specbatch.engine.prefill.models import EAGER, PromptTrunks
from specbatch.engine.prefill.packing import PromptPacker
from specbatch.engine.reports import Report, Scored, read_report
from specbatch.engine.round import MAX_FORCED, NO_HOOK, Round, RoundHook, Wanted
from specbatch.engine.scheduler import PrefillSpan, Scheduler
from specbatch.engine.sequence import Sequence
from specbatch.engine.table_writer import TableWriter
from specbatch.engine.transfers import Transfers
from specbatch.errors import NOT_FINITE, NOT_FINITE_HINT, MemoryShortage, ModelError
from specbatch.kernels.out_of_memory import is_out_of_memory
from specbatch.kernels.trace_marks import marked
from specbatch.matcher import FollowedAutomaton
from specbatch.types import Completion, EngineLimits, FinishReason, Request

# A launch that cannot be made smaller is tried again: other programs may take memory for a moment.
_SMALLEST_CHUNK, _TRIES = 32, 4
DEEP = "its output is nested deeper than its automaton"  # why the host follows a grammar


def check_finite(completions: Iterable[Completion]) -> None:
    """Raise ModelError if one of them is an error: for measurements, which must not hide a row's error."""
    if any(completion.finish_reason is FinishReason.ERROR for completion in completions):
        raise ModelError(NOT_FINITE, hint=NOT_FINITE_HINT)


def memory_shortage(error: Exception, num_running: int) -> MemoryShortage:
    """Return the error for a user whose memory ran out while that number of rows ran."""
    where = "GPU's" if isinstance(error, RuntimeError) and "CUDA" in str(error) else "machine's"
    return MemoryShortage(
        f"the {where} memory ran out while {num_running} rows ran: {str(error).split('. ', 1)[0].strip()}",
        hint="finished rows are kept: free memory, or lower engine.max_batch_size, engine.prefill_chunk_tokens or "
        "engine.memory_fraction, and run the same command again to go on",
    )


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The sizes of an engine, as memory allows them."""

    num_pages: int  # pages of the KV cache
    page_size: int
    capacity: int  # tokens of the longest sequence (prompt and output) that the model and the cache can hold
    max_batch_size: int
    prefill_chunk_tokens: int
    longest_row: int | None = None  # the longest sequence that a new job allows; None: it is `capacity`


class Engine:
    """Runs requests to completion. See `types.BatchEngine` for what each method promises."""

    def __init__(
        self,
        executor: RoundExecutor,
        sizes: EngineSizes,
        *,
        prefix_cache: bool,
        chunk_cost: ChunkCost | None = None,
        threads: ThreadGovernor | None = None,
        trunks: PromptTrunks = EAGER,
        deterministic: bool = False,
        lockstep: Lockstep | None = None,
        costs: RoundCosts | None = None,
    ) -> None:
        """Make an idle engine. `chunk_cost`: the cost by which short prompts are held back; None: they are not.
        `threads`: the thread governor of a CPU. `trunks`: the models that compute prompts. `deterministic`: see
        `Grammars`. `lockstep`: the agreement of ranks that have requests of their own; None: there are none. `costs`:
        the costs by which rounds choose among the sizes of a draft method; None: they have those of the schedule. Where
        the executor shrinks, batches and chunks that run out of memory are made smaller, too."""
        rounds = executor.rounds.items
        self.executor = executor
        self._round: Round = rounds[0]  # used for prompts, which are the same for all draft methods
        self._state: RequestTable = self._round.state
        self.device = self._round.device
        self._eos = frozenset(self._round.eos_token_ids)
        self._sizes, self._max_batch_size = sizes, sizes.max_batch_size
        net = self._round.method.net
        pool = PagePool(sizes.num_pages, sizes.page_size)
        states = self._round.states
        prefix = None
        # Without a checkpoint, a hybrid's request can take no page, and would only wait for those that share some.
        if prefix_cache and (states is None or states.checkpoints):
            checkpoints = None if states is None else states.checkpoints
            prefix = PrefixIndex(pool, 1 - net.draft_kv_offset if net is not None else 0, checkpoints)
        lookahead = max(round_.method.num_lookahead for round_ in rounds)
        self._scheduler = Scheduler(
            pool, prefix, lookahead, self._start, sizes.max_batch_size, sizes.prefill_chunk_tokens,
            min_prefill_tokens=1 if chunk_cost is None else chunk_cost.tokens,
        )  # fmt: skip
        self._stats = EngineStats()
        self._has_new_counts = False  # rounds have run whose counts on the device were not read
        self.forget_routing()  # trials and measurements at the start have counted
        self.limits = EngineLimits(0, self._round.vocab_size, eos_token_ids=self._round.eos_token_ids)
        self.limit_length(None)
        self.chunk_cost = chunk_cost
        self._threads, self._shrinks, self._lockstep = threads, executor.shrinks, lockstep
        self._nodes: NodeChooser | None = None
        if costs is not None and lockstep is None and executor.lanes is None:
            self._nodes = NodeChooser(costs, max(round_.method.num_nodes for round_ in rounds))
        self._transfers = Transfers(self.device)
        self._packer = PromptPacker(sizes.page_size, None if net is None else net.draft_kv_offset)
        graph_tokens = 0 if chunk_cost is None else chunk_cost.graph_tokens
        self.prompts = PromptGraphs(
            self._packer,
            self._transfers,
            self.device,
            sizes.max_batch_size,
            graph_tokens,
            trunks,
            shrinks=self._shrinks,
        )
        self._table = TableWriter(
            self._state,
            self._transfers,
            sizes.max_batch_size,
            self._round.vocab_size,
            self._round.eos_token_ids,
            states,
        )
        self._groups = BatchGroups(self._state.groups, sizes.page_size, sizes.max_batch_size)
        self._lanes = None if executor.lanes is None else Lanes(executor.lanes, pads=self._round.fixed_shapes)
        self.max_forced = 0 if self._round.fixed_shapes else MAX_FORCED  # nodes that a grammar may add to a draft tree
        traits = {
            "fixed_shapes": self._round.fixed_shapes,
            "simulates": self._round.simulates,
            "deterministic": deterministic,
        }
        self._grammars = Grammars(self._table, self._transfers, lookahead + self.max_forced, **traits)
        self._forget_rounds()
        # The needs of requests with grammars, and whether the graphs for them are captured.
        self._grammar_kinds: dict[Wanted, bool] = {}
        self._in_flight: deque[Report] = deque()  # the oldest first; only the last one can be open
        self._finished: list[Completion] = []  # what `step` or `drain` returns next
        self._failed = 0  # launches in a row that ran out of memory
        self._last_read = time.perf_counter()
        self.waited_seconds = 0.0  # the host waited for the device; the rest of the time is the host's own
        self.start_seconds: dict[str, float] = {}
        self.start_bytes: dict[str, int] = {}  # bytes of the device that were measured and reserved at the start

    @property
    def stats(self) -> EngineStats:
        self._stats.preemptions = self._scheduler.num_preemptions
        self._stats.device_wait_seconds = self.waited_seconds
        if self._has_new_counts and not (self.num_running or self.num_waiting):
            # These wait for the device, which an idle engine can do.
            if self._round.routing is not None:
                self._stats.experts = self._round.routing.read()
            for round_ in self.executor.rounds.items:
                round_.method.record(self._stats)
            self._has_new_counts = False
        return self._stats

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def num_pages(self) -> int:
        return self._sizes.num_pages

    @property
    def page_size(self) -> int:
        return self._sizes.page_size

    @property
    def num_lookahead(self) -> int:
        """Slots past the committed ones that a round may write."""
        return self._scheduler.num_lookahead

    @property
    def is_prefilled(self) -> bool:
        """Return whether the prompts of all running requests are computed."""
        return all(seq.prefill_done for seq in self._scheduler.running)

    def tokens_so_far(self) -> dict[int, int]:
        begun = [*self._scheduler.running, *(seq for seq in self._scheduler.waiting if seq.was_admitted)]
        return {seq.request.request_id: len(seq.tokens) - seq.num_prompt for seq in begun}

    def limit_length(self, tokens: int | None) -> int:
        capacity, longest_row = self._sizes.capacity, self._sizes.longest_row
        if tokens is None:
            tokens = capacity if longest_row is None else longest_row
        if tokens > capacity:
            raise ModelError(
                f"the first run of this job allowed rows of {tokens} tokens, and the KV cache of this one holds "
                f"{capacity}",
                hint="go on where as much memory is free, lower engine.max_batch_size or engine.prefill_chunk_tokens, "
                "or start again with --overwrite",
            )
        self._max_length = tokens
        self.limits = replace(self.limits, max_prompt_tokens=tokens - 1)
        return tokens

    def submit(self, request: Request) -> None:
        automaton = self._automaton_of(request)
        seq = Sequence.of(request, self.limits, self._max_length, automaton)
        if seq.has_grammar:
            seq.num_forced_room = self.max_forced
            self._note_grammar(seq)
        self._scheduler.waiting.append(seq)

    @property
    def follows_newest(self) -> bool:
        """Return whether the device follows the grammar of the request that was submitted last."""
        return self._scheduler.waiting[-1].automaton is not None

    def _automaton_of(self, request: Request) -> FollowedAutomaton | None:
        """Return the automaton with which the device follows the request's grammar; None: the host does."""
        if request.matcher is None:
            return None
        found = request.matcher.automaton
        if not isinstance(found, str):
            if found.leaves_Q[found.state_after(())]:
                found = DEEP
            elif len(request.params.stop_token_ids) > MAX_STOP_IDS:
                found = f"the request has more than {MAX_STOP_IDS} stop tokens"
            else:
                found = self._table.grammars().acquire(found) or found
        self._stats.grammar.requests[found if isinstance(found, str) else DEVICE] += 1
        return None if isinstance(found, str) else found

    def _note_grammar(self, seq: Sequence) -> None:
        """Note a request with a grammar, for which all graphs are captured at once, before it is admitted."""
        wanted = self._wanted([seq])
        if wanted in self._grammar_kinds or self.executor.runner is None or self._lockstep is not None:
            return
        for kind in [wanted, *self._grammar_kinds]:
            self._grammar_kinds.setdefault(kind.with_other(wanted), False)

    def _capture_for_grammars(self) -> None:
        """Capture the graphs for the kinds of requests with grammars that are new, so that none is captured later."""
        if all(self._grammar_kinds.values()):
            return
        self._complete_round()
        for wanted in [wanted for wanted, is_captured in self._grammar_kinds.items() if not is_captured]:
            self._grammar_kinds[wanted] = True
            self._table.make_rules(wanted.edits)
            for has_room in (False, True):
                self.executor.capture_kind(wanted, functools.partial(self._grammar_hook, wanted.edits, has_room))

    def _grammar_hook(self, edits: Edits, has_room: bool, method: DraftMethod, size: int) -> RoundHook | None:
        """Return the hook of a round of such requests. None: there are no such rounds."""
        if has_room:
            if not self._grammars.may_have_room(method, size):
                return None
            method = method.with_room(size)
        if edits & Edits.NODE_MASK:
            return self._grammars.of_round([], method, self._read_all)
        return RoomHook(method) if has_room else NO_HOOK

    def _restart_leaving(self) -> None:
        """Start requests again that have left their automata: the host follows their grammars now."""
        if not any(seq.leaves_automaton for seq in self._scheduler.running):
            return
        self._read_all()  # Nothing in flight may have them.
        for seq in [seq for seq in self._scheduler.running if seq.leaves_automaton]:
            self._release(seq)
            self._stats.grammar.requests[DEVICE] -= 1
            self._stats.grammar.requests[DEEP] += 1
            seq.leave_automaton()
            self._note_grammar(seq)
            self._scheduler.restart(seq)

    def _release(self, seq: Sequence) -> None:
        """Give up what an ended request holds of the tables."""
        if seq.automaton is not None:
            self._table.grammars().release(seq.automaton)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Launch a prefill chunk or a round, then read the oldest result that is due."""
        self._begin_step()
        has_launched = self._launch()
        while len(self._in_flight) > (self.executor.async_depth if has_launched else 0):
            self._read()
            if not has_launched:
                break  # A result that was read may have made room, so launch before more results are read.
        self._end_step()
        return self._take_finished()

    def _begin_step(self) -> None:
        if self._threads is not None:
            self._threads.update()
        self._last_read = time.perf_counter()  # The time that the caller took in between is not the engine's.

    def _end_step(self) -> None:
        if not (self.num_running or self.num_waiting):
            self._forget_open()  # all of its requests have ended: it is not needed, and it holds graphs and tensors
            if self._threads is not None:
                self._threads.rest()

    def forget_routing(self) -> None:
        """Set the counts of the experts that tokens choose to zero."""
        if self._round.routing is not None:
            self._round.routing.reset()
        self._stats.experts, self._has_new_counts = ExpertCounts(), False

    def _take_finished(self) -> list[Completion]:
        finished, self._finished = self._finished, []
        return finished

    def _launch(self) -> bool:
        """Launch a prefill chunk or a round, if there is anything to run. Return whether something was launched."""
        graphs, seconds = self._captured()
        self._restart_leaving()
        self._capture_for_grammars()
        spans = self._scheduler.plan_prefill()
        has_launched = self._launch_prompts(spans) if self._has_prompts(spans) else self._launch_round()
        graphs_now, seconds_now = self._captured()
        self._stats.late_graphs += max(0, graphs_now - graphs)
        self._stats.late_graph_seconds += max(0.0, seconds_now - seconds)
        return has_launched

    def _has_prompts(self, spans: list[PrefillSpan]) -> bool:
        """Return whether the next launch computes prompts, of this rank or of others."""
        return bool(spans) if self._lockstep is None else self._lockstep.any_of(bool(spans))

    def _launch_prompts(self, spans: list[PrefillSpan]) -> bool:
        """Launch a prefill chunk, or take part in that of other ranks. Return whether there was one here."""
        if not spans:  # Another rank computes prompts: those that are held here cost nothing now.
            spans = self._scheduler.plan_prefill(now=True)
        lanes = self._round.two_lanes
        has_lanes = lanes is not None and sum(span.end - span.start for span in spans) // 2 >= lanes.min_prompt_lane
        if self._lockstep is not None and lanes is not None:
            has_lanes = self._lockstep.all_of(has_lanes)
        if not spans:
            self._round.take_part()
            return False
        return self._fits(lambda: self._prefill(spans, has_lanes), lambda: self._give_up(spans))

    def _launch_round(self) -> bool:
        """Launch a round, if there is anything to run. Return whether something was launched."""
        if self._in_flight and self._scheduler.would_preempt():
            self._read_all()  # so that the choice of the request to preempt uses all results
        rows = [seq for seq in self._scheduler.plan_round() if seq.can_go_on]
        next_round = self._next_round(rows)
        if not next_round.num_requests:
            return False
        if not rows and not self._round.fixed_shapes:
            self._round.take_part()
            return False
        return self._fits(lambda: self._run(rows, next_round), lambda: self._lower_batch(len(rows) // 2))

    def _next_round(self, rows: list[Sequence]) -> NextRound:
        """Return what the next round is, for all ranks."""
        count = len(rows)
        method = self.executor.rounds.at(count).method if rows else None
        has_room = method is not None and self._grammars.wants_room(rows, method)
        has_lanes = self._lanes is not None and self._lanes.divides(count)
        if self._round.fixed_shapes:  # lanes follow from the number of requests, which is the same on all ranks
            has_lanes = self._lanes is not None
        mine = NextRound.of(rows, self._wanted(rows), has_room=has_room, has_lanes=has_lanes)
        return mine if self._lockstep is None else self._lockstep.round(mine)

    def _captured(self) -> tuple[int, float]:
        """CUDA graphs, and the seconds that capturing them took."""
        runners = [runner for runner in (self.executor.runner, self.prompts.runner) if runner is not None]
        return sum(map(len, runners)), sum(runner.seconds for runner in runners)

    def _fits(self, launch: Callable[[], None], relieve: Callable[[], bool]) -> bool:
        """Launch; if the device's memory does not suffice, nothing has happened, and `relieve` makes the next attempt
        smaller, if it can be. If it cannot, the graphs give their memory back. Return whether something was
        launched."""
        try:
            launch()
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            shortage = memory_shortage(error, self.num_running)
        if not self._shrinks:
            raise shortage
        # Only here the failed launch's tensors are gone, which the error's traceback held.
        self._stats.memory_shortages += 1
        self._failed += 1
        if not relieve() and not self._release_graphs() and self._failed >= _TRIES:
            raise shortage
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return False

    def _release_graphs(self) -> bool:
        self._read_all()  # a graph that runs must not go
        return self.release_graphs()

    def release_graphs(self) -> bool:
        """Give the memory of all graphs back; nothing may run on the device. Returns whether there were graphs."""
        self._forget_open()  # it would replay one
        released = [self.executor.release_graphs(), self.prompts.release_graphs()]
        gc.collect()  # they can be in cycles
        return any(released)

    def _give_up(self, spans: list[PrefillSpan]) -> bool:
        """Compute these pieces of prompts later, from the beginning, and in smaller chunks. Nobody reads what the
        failed launch wrote: lines of the request table are set anew when requests are admitted again, and pages are
        written first."""
        self._table.forget_started()
        is_last = sum(span.end - span.start for span in spans) <= _SMALLEST_CHUNK
        self._scheduler.give_up(spans, _SMALLEST_CHUNK)
        return not is_last

    def _lower_batch(self, size: int) -> bool:
        """Run at most `size` requests from now on. The failed round has left the request table as it was."""
        if size < 1:
            return False
        self._read_all()  # so that the choice of the request to preempt uses all results
        self._max_batch_size = size
        self._scheduler.lower_batch(size)
        return True

    def _run(self, rows: list[Sequence], next_round: NextRound) -> None:
        """Launch a round of these requests."""
        # Where shapes are fixed, all ranks run the same round. Otherwise this one runs its own.
        count = next_round.num_requests if self._round.fixed_shapes else len(rows)
        method = self.executor.rounds.at(count).method
        if next_round.has_room:
            method = method.with_room(self.executor.padded_size(count))
        wanted = next_round.wanted if self._round.fixed_shapes else self._wanted(rows)
        # The hook reads the results before this round after a part of it is launched: grammars follow all tokens.
        hook: RoundHook = RoomHook(method) if next_round.has_room else NO_HOOK
        if self._nodes is not None and self._chooses_nodes(method, next_round.has_grammars, wanted):
            hook = self._sized_hook(self._nodes, rows, method, wanted)
            method = hook.method or method
        groups = self._groups.of(rows, method.num_nodes)
        self._complete_round()
        self._table.upload_pages(rows)
        if isinstance(method, HostDraftMethod) and rows:
            self._table.upload_host_trees(rows, method.pack(method.host_draft(rows)))
        if next_round.has_grammars:
            hook = self._grammars.of_round(rows, method, self._read_all)
        if wanted.edits:
            self._table.make_rules(wanted.edits)
        batch = RoundBatch(rows, wanted, hook, num_requests=count)
        if self._lanes is not None and next_round.has_lanes and not hook.takes_part:
            sequences, lane = self._lanes.divide(rows, count)
            batch = batch._replace(sequences=sequences, lane=lane)
        self.executor.write_groups(groups)
        self._in_flight.append(self.executor.run(batch))
        if not hook.takes_part:
            self._complete_round()

    def _chooses_nodes(self, method: DraftMethod, has_grammars: bool, wanted: Wanted) -> bool:
        """Return whether the number of nodes is chosen for a round. A budget decides in place of it, if there is
        one."""
        has_budget = self.executor.budget is not None and self.executor.can_share(wanted, method)
        return bool(method.sizes) and not has_grammars and not has_budget

    def _sized_hook(self, nodes: NodeChooser, rows: list[Sequence], method: DraftMethod, wanted: Wanted) -> RoundHook:
        """Return the hook of a round with the number of nodes that pays most now."""
        executor, count = self.executor, len(rows)
        if executor.runner is None:
            return NO_HOOK
        hook = nodes.hook(
            method,
            lambda other: executor.key_of(count, wanted, other),
            executor.is_captured,
            executor.padded_size(count),
            sum(seq.num_computed_tokens for seq in rows),
        )
        fits = hook.method is None or executor.fits(executor.key_of(count, wanted, hook.method))
        return hook if fits else NO_HOOK

    @property
    def _has_open(self) -> bool:
        """Return whether a round was begun and not completed."""
        return bool(self._in_flight) and self._in_flight[-1].is_open

    def _complete_round(self) -> None:
        """Launch the rest of the round that was begun last, before anything else is launched."""
        if not self._has_open:
            return
        report = self._in_flight.pop()
        report.complete(self._transfers)
        self._in_flight.append(report)
        self._failed = 0
        self._has_new_counts = True
        self._stats.rounds += 1
        report.hook.record(self._stats)

    def _forget_open(self) -> None:
        """Drop a round that was begun and not completed."""
        if self._has_open:
            self._in_flight.pop()

    def _prefill(self, spans: list[PrefillSpan], has_lanes: bool) -> None:
        """Launch a prefill chunk. `has_lanes`: it has two lanes, unless it is one graph."""
        self._complete_round()
        self._table.upload_started()
        self._table.upload_pages([s.seq for s in spans])
        packed = self._packer.pack(spans)
        ready = [s.seq for s in spans if s.end == s.seq.num_prefill_tokens]
        wanted = self._wanted(ready)
        if wanted.edits:
            self._table.make_rules(wanted.edits)
        self._grammars.write_first_masks(ready)
        with marked("prompts"):
            launched, scores = self.prompts.run(self._round, packed, wanted, self.executor.mode, has_lanes)
        first_words = self._transfers.download(launched.output_BZ)
        for s in spans:
            s.record(self._stats)
            s.seq.num_computed_tokens = s.end
            # The next owner of these pages reads them after this chunk.
            self._scheduler.share(s.seq, s.checkpoint)
        first_tokens: list[Sequence | None] = []
        for seq in ready:
            # A request that is computed again after a preemption has its root already.
            first_tokens.append(seq if len(seq.tokens) == seq.num_computed_tokens else None)
            seq.rounds_in_flight += first_tokens[-1] is not None
        scored = None if scores is None else Scored.start(packed.scored, scores, self._transfers)
        self._in_flight.append(Report(first_tokens, None, first_words, launched.logprobs, scored))
        self._failed = 0
        # Launching a chunk takes the host longer than many a round.
        now = time.perf_counter()
        self._stats.prefill_seconds += now - self._last_read
        self._last_read = now

    def _wanted(self, sequences: list[Sequence]) -> Wanted:
        """Return what these requests want of a launch. Where rounds may be graphs, it is one of few combinations."""
        # Each kind once: to join flags takes as long as all else that a round does for a row.
        kinds = {seq.needs for seq in sequences}
        edits = functools.reduce(operator.or_, (Edits(needs.edits) for needs in kinds), Edits.NONE)
        edits = edits.family if self._round.fixed_shapes else edits
        is_sampled = any(needs.is_sampled for needs in kinds)
        return Wanted(is_sampled, num_top_of(needs.num_logprobs for needs in kinds), edits)

    def _read(self) -> None:
        """Wait for the oldest report and do what it says."""
        if self._in_flight[0].is_open:
            size = len(self._in_flight[0].sequences) // 2
            if not self._fits(self._complete_round, lambda: self._lower_batch(size)):
                return
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
        if isinstance(report.hook, SizedHook) and self._nodes is not None and report.max_path is not None:
            self._nodes.saw(rows[: len(report.sequences), Output.NUM_NEW], report.max_path)
        if isinstance(report.hook, RoomHook):
            num_new_B = rows[: len(report.sequences), Output.NUM_NEW]
            self._grammars.saw_room(int((num_new_B - 1).clip(min=0).sum()), len(report.sequences))
        if report.max_path is not None:
            self.executor.saw(rows[: len(report.sequences)], report.sequences)
        for seq, reason in read_report(report, rows, self._eos, self._stats):
            self._finish(seq, reason)

    def _read_all(self) -> None:
        while self._in_flight:
            self._read()

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a request. Its completion is returned by the step."""
        seq.is_finished = True
        self._release(seq)
        self._scheduler.finish(seq, failed=reason is FinishReason.ERROR)
        self._rounds_of_rows.add(seq.counts.rounds)
        if self.chunk_cost is not None:
            self._scheduler.min_free_requests = self.chunk_cost.min_free_requests(
                self._max_batch_size, self._rounds_of_rows.mean
            )
        self._stats.speculation.add(seq.counts)
        self._finished.append(seq.completion(reason))

    def _forget_rounds(self) -> None:
        """Before any request has ended, short prompts are held for a sixteenth of the request indices."""
        self._rounds_of_rows = RoundsOfRows()
        if self.chunk_cost is not None:
            self._scheduler.min_free_requests = max(1, self._max_batch_size // 16)

    def _start(self, seq: Sequence) -> None:
        """Give an admitted request a request index. The index of a request whose last round is still under way may be
        taken: what is launched for the new request comes after that round."""
        self._table.start(seq, self._scheduler.running)
        self._groups.forget(seq.req_idx)
        seq.num_draft_computed = seq.num_computed_tokens
        seq.num_in_flight = seq.rounds_in_flight = 0

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
        rounds, size, lanes = methods.map(self._round.drafting), self._max_batch_size, self.executor.lanes
        self.executor = RoundExecutor(
            rounds, size, self.device, mode, lanes, shrinks=self._shrinks, budget=self.executor.budget
        )
        self._round = self.executor.rounds.items[0]
        self._grammar_kinds.clear()
        self._forget_rounds()  # rows take another number now, and what runs next must not depend on what ran before
        if ahead and self.executor.runner is not None:
            for kind in [False, True] if sampled else [False]:
                self.executor.capture(kind, on_progress)

    @torch.inference_mode()
    def drain(self) -> list[Completion]:
        """Wait for everything that was launched; return the requests that finished with it."""
        self._read_all()
        return self._take_finished()

    def prepare_round(self) -> list[int]:
        """The request indices of the next round, whose page tables are on the device then: to run it by hand."""
        sequences = self._scheduler.plan_round()
        self._table.upload_pages(sequences)
        num_queries = self.executor.rounds.at(len(sequences)).method.num_nodes
        self.executor.write_groups(self._groups.of(sequences, num_queries))
        return [seq.req_idx for seq in sequences]

    def close(self) -> None:
        """Nothing is shared with other processes."""

    def abort_all(self) -> None:
        """Drop all requests without a result, for measurements, or to give up."""
        self.drain()  # The rounds in flight write to pages that are freed next.
        for seq in list(self._scheduler.running):
            seq.is_finished = True
            self._release(seq)
            self._scheduler.finish(seq)
        for seq in self._scheduler.waiting:
            self._release(seq)
        self._scheduler.waiting.clear()
        self._table.forget_started()

    def check_integrity(self) -> None:
        """Assert that every page is accounted for, and every request index. For tests, between steps."""
        self._scheduler.check_integrity()
        indices = [seq.req_idx for seq in self._scheduler.running]
        assert len(set(indices)) == len(indices), "two requests share a request index"
