"""An engine that drafts in many ways, one after the other: to trace, to time, to compare.

Prefix caching must be off: pages computed without the draft network would be of no use to it.

Shape suffixes: B requests, C candidates of a tree, M nodes of a chain (the root included), S steps of a chain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specbatch.batch import Field
from specbatch.cache.request_table import BatchView, RequestTable
from specbatch.counts import SpeculationCounts
from specbatch.draft import DraftMethod, DraftParts, NoDraft, make_method
from specbatch.draft.method import DraftTrees
from specbatch.draft.schedule import ByBatch, Schedule, shapes_of
from specbatch.draft.shape import DraftShape
from specbatch.engine.engine import Engine, check_finite
from specbatch.engine.executor import GraphMode
from specbatch.tune.trace import RowTrace, Trace
from specbatch.types import Completion, Request


class OutOfTime(Exception):
    """Not all requests were finished in time."""


@dataclass(frozen=True)
class Finished:
    """Requests that were run to their end."""

    completions: list[Completion]  # completions in the requests' order
    seconds: float  # from the first submit to the last completion
    counts: SpeculationCounts
    num_tokens: int


# What is recorded of a round, of each request that goes on: its `rng.stream`, the index of the root in its tokens, the
# chain, and of trees the tokens, scores and parents, as in `RowTrace`.
_RECORD_DTYPES = (np.int64, np.int64, np.int32, np.int32, np.float32, np.int16)


class Session:
    """An engine that runs the rows of a tuning. `sampled`: graphs are captured for sampled requests, too."""

    def __init__(
        self,
        engine: Engine,
        method: str,
        parts: DraftParts,
        graphs: GraphMode,
        sampled: bool = False,
    ) -> None:
        self.engine = engine
        self.method, self.parts = method, parts
        self._graphs: GraphMode = graphs
        self._sampled = sampled
        self._in_use: Schedule | TracingDraft | None = None
        self.texts: Sequence[Sequence[int]] = ()  # texts of the file, of which timed requests are made

    @property
    def on_cuda(self) -> bool:
        return self.engine.device.type == "cuda"

    def make(self, shape: DraftShape | None) -> DraftMethod:
        """Make the draft method of rounds with this shape."""
        match = None if shape is None else shape.ngram_match
        return make_method(self.method, shape, self.parts if match is None else replace(self.parts, ngram_match=match))

    def use(self, schedule: Schedule) -> None:
        """Draft so from now on. Where it never drafts, this is plain decoding without a draft network."""
        if schedule == self._in_use:
            return
        self._set(schedule.map(self.make) if shapes_of(schedule) else ByBatch.always(NoDraft()))
        self._in_use = schedule

    def _set(self, methods: ByBatch[DraftMethod], ahead: bool = True) -> None:
        self.engine.set_methods(methods, self._graphs, self._sampled, ahead=ahead)

    def run(
        self,
        requests: Sequence[Request],
        after_round: Callable[[], None] | None = None,
        until: float = math.inf,
    ) -> Finished:
        """All of them, submitted at once. `after_round` is called when a round was launched.

        Raises OutOfTime where they are not finished when the clock (`time.perf_counter`) shows `until`; the engine is
        idle then. Raises ModelError where one of them failed: measurements of a broken model mean nothing.
        """
        began = time.perf_counter()
        for request in requests:
            self.engine.submit(request)
        done: dict[int, Completion] = {}
        while len(done) < len(requests):
            rounds = self.engine.stats.rounds
            done |= {c.request_id: c for c in self.engine.step()}
            if after_round is not None and self.engine.stats.rounds > rounds:
                after_round()
            if len(done) < len(requests) and time.perf_counter() > until:
                self.engine.abort_all()
                raise OutOfTime
        seconds = time.perf_counter() - began
        completions = [done[request.request_id] for request in requests]
        check_finite(completions)
        counts = SpeculationCounts()
        for completion in completions:
            counts.add(completion.speculation)
        return Finished(completions, seconds, counts, sum(len(c.token_ids) for c in completions))

    def trace(self, requests: Sequence[Request], topk: int, depth: int, until: float = math.inf) -> Trace:
        """Record the drafts of trees of `topk` branches and of chains, both of `depth` steps, at every position of
        these requests' own texts. `topk` 1: chains alone. N-gram drafts need the texts alone: topk 0. The requests'
        `rng.stream` must differ. Raises OutOfTime as `run` does."""
        sampled = any(request.params.temperature > 0 for request in requests)
        if self.parts.net is None:
            self.use(ByBatch.always(None))
            completions, topk, depth = self.run(requests, until=until).completions, 0, 0
            rounds: list[dict[int, Sequence[np.ndarray]]] = [{} for _ in requests]
        else:
            completions, rounds = self._trace_drafts(requests, topk, depth, until)
        rows = [_row(r, c, drafts) for r, c, drafts in zip(requests, completions, rounds, strict=True)]
        return Trace(tuple(rows), topk, depth, sampled)

    @property
    def draws_chains(self) -> bool:
        """Return whether rounds draw the drafts of sampled requests from the draft network's distribution. A trace has
        its most likely tokens instead, so it does not show how many of the drawn drafts are accepted."""
        return self.parts.net is not None and not self.parts.coupled

    def count_drawn(self, requests: Sequence[Request], depth: int, until: float = math.inf) -> NDArray[np.int64]:
        """Run the requests with chains of `depth` steps, and return the counts of `Trace.drawn`. Raises OutOfTime as
        `run` does."""
        self._set(ByBatch.always(self.make(DraftShape(depth, 1, depth + 1))), ahead=False)
        self._in_use = None
        counts = self.run(requests, until=until).counts
        found = np.zeros(1 + depth, dtype=np.int64)
        found[0], found[1 : 1 + len(counts.accepted_at)] = counts.rounds, counts.accepted_at
        return found

    def _trace_drafts(
        self, requests: Sequence[Request], topk: int, depth: int, until: float
    ) -> tuple[list[Completion], list[dict[int, Sequence[np.ndarray]]]]:
        """The completions, and of each the drafts by the index of their root."""
        index_of = {request.rng.stream: i for i, request in enumerate(requests)}
        assert len(index_of) == len(requests), "two requests share a stream of random numbers"
        rounds: list[dict[int, Sequence[np.ndarray]]] = [{} for _ in requests]
        wide = DraftShape(depth, topk, 2 if topk > 1 else depth + 1)
        tracing = self._in_use
        if not isinstance(tracing, TracingDraft) or tracing.wide != wide:  # else with the graphs of the last trace
            tracing = TracingDraft(self.method, wide, self.parts)
            # A graph of each size that comes up: few do, and they are large.
            self._set(ByBatch.always(tracing), ahead=False)
            self._in_use = tracing

        def record() -> None:
            for stream, root, *drafts in zip(*tracing.read(), strict=True):
                rounds[index_of[int(stream)]][int(root)] = drafts

        return self.run(requests, record, until).completions, rounds


class TracingDraft(DraftMethod):
    """Records what a draft network would draft, token after token, along the target's own text.

    Rounds draft a chain, and a wide tree if there are branches, and then verify the root alone: each commits one token,
    the text is that of plain decoding, and every position where a round could begin is seen once. The chain is greedy,
    unless drafts are coupled: then it is what a round from that position would draft. What a narrower shape would have
    gained is computed from the record (`specbatch.tune.replay`). Rounds may be graphs: they leave their record on the
    device, where the host reads it before the next round.
    """

    num_nodes = max_path = 1

    def __init__(self, method: str, wide: DraftShape, parts: DraftParts) -> None:
        assert parts.net is not None, "without a draft network nothing is traced"
        self.wide = wide
        self._tree = None if wide.is_chain else make_method(method, wide, parts)
        self._chain = make_method(method, DraftShape(wide.num_steps, 1, wide.num_steps + 1), parts)
        self._coupled = parts.coupled
        self._last: list[Tensor] | None = None  # whether each request goes on, then the record
        self.net, self.reads_tokens = parts.net, self._chain.reads_tokens
        self.num_lookahead = max(one.num_lookahead for one in (self._chain, self._tree) if one is not None)

    def draft(self, view: BatchView, table: RequestTable, sampled: bool) -> DraftTrees:
        candidates = () if self._tree is None else self._tree.candidates(view, table)
        chains = self._chain.draft(view, table, sampled and self._coupled).tokens_BN
        is_running = view.field(Field.DONE) == 0  # neither padding nor a request that ended in the round before
        parts = (is_running, view.field(Field.STREAM), view.length_B, chains[:, 1:], *candidates)
        if self._last is None:  # Graphs of all sizes write to these buffers.
            self._last = [part.new_zeros(len(table.ints_SF), *part.shape[1:]) for part in parts]
        self._last[0].zero_()
        for buffer, part in zip(self._last, parts, strict=True):
            buffer[: len(part)] = part
        return DraftTrees(view.field(Field.ROOT)[:, None])

    def read(self) -> list[np.ndarray]:
        """The record of the round that was launched last, of the requests that go on; waits for it."""
        assert self._last is not None, "no round was launched"
        is_running, *parts = [part.cpu() for part in self._last]
        return [part[is_running].numpy().astype(d) for part, d in zip(parts, _RECORD_DTYPES, strict=False)]


def _row(request: Request, completion: Completion, rounds: dict[int, Sequence[np.ndarray]]) -> RowTrace:
    num_prompt, num_output = len(request.prompt_token_ids), len(completion.token_ids)
    tokens = np.array([*request.prompt_token_ids, *completion.token_ids], dtype=np.int32)
    if not rounds:
        return RowTrace(num_prompt, tokens)
    columns = [np.full((num_output, len(part)), -1, dtype=part.dtype) for part in next(iter(rounds.values()))]
    for root, parts in rounds.items():
        # A round may run past the end of a row that a stop string cut short.
        if 0 <= root - num_prompt < num_output:
            for column, part in zip(columns, parts, strict=True):
                column[root - num_prompt] = part
    return RowTrace(num_prompt, tokens, *columns)
