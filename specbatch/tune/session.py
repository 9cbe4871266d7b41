"""An engine that is asked to draft in many ways, one after the other: to trace, to time, to compare.

Prefix caching must be off: pages computed without the draft network would be of no use to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specbatch.draft import DraftMethod, NoDraft, make_method
from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.engine.base import check_finite
from specbatch.engine.build import Built
from specbatch.engine.device_engine import DeviceEngine
from specbatch.engine.executor import GraphMode
from specbatch.oracle.engine import Engine
from specbatch.oracle.factory import neural_proposer, proposer_of
from specbatch.oracle.neural import NeuralProposer
from specbatch.oracle.ngram import NoProposer
from specbatch.oracle.proposer import Proposer
from specbatch.tune.trace import RowTrace, Trace
from specbatch.tune.tracing import Drafted, TracingDrafter, TracingProposer
from specbatch.types import Completion, Request, SpeculationCounts


class OutOfTime(Exception):
    """Not all requests were finished in time."""


@dataclass(frozen=True)
class Finished:
    """Requests that were run to their end."""

    completions: list[Completion]  # in the requests' order
    seconds: float  # from the first submit to the last completion
    counts: SpeculationCounts
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Tracing:
    wide: DraftShape
    drafter: TracingDrafter


class Session:
    """`graphs`: of the device engine; `sampled`: for sampled rows, too. `show` is told what is being done."""

    def __init__(
        self, built: Built, graphs: GraphMode, sampled: bool = False, show: Callable[[str], None] = lambda doing: None
    ) -> None:
        self.engine = built.engine
        self.method, self.parts = built.method, built.parts
        self._graphs: GraphMode = graphs
        self._sampled = sampled
        self._show = show
        self._in_use: tuple[Schedule, tuple[int, int] | None] | _Tracing | None = None

    @property
    def is_on_device(self) -> bool:
        return isinstance(self.engine, DeviceEngine)

    def use(self, schedule: Schedule, matches: tuple[int, int] | None = None) -> None:
        """Draft so from now on. Where it never drafts, this is plain decoding without a draft network. `matches`: the
        shortest and longest of lookups; None: those of the configuration."""
        if (schedule, matches) == self._in_use:
            return
        parts = self.parts if matches is None else replace(self.parts, ngram_match=matches)
        drafts_at_all = any(shape is not None for shape in schedule.items)
        if isinstance(self.engine, DeviceEngine):
            plain: ByBatch[DraftMethod] = ByBatch.always(NoDraft())
            methods = schedule.map(lambda shape: make_method(self.method, shape, parts)) if drafts_at_all else plain
            self.engine.set_methods(methods, self._graphs, self._sampled, self._show)
        else:
            sizes = self.engine.limits.vocab_size, self.engine.page_size
            proposer = proposer_of(self.method, schedule, parts, *sizes) if drafts_at_all else NoProposer()
            self.engine.set_methods(proposer)
        self._in_use = schedule, matches

    def use_proposer(self, proposer: Proposer) -> None:
        """As `use`, of the oracle engine."""
        assert isinstance(self.engine, Engine)
        self._in_use = None
        self.engine.set_methods(proposer)

    def proposer(self, shape: DraftShape) -> NeuralProposer:
        """Of the oracle engine and the draft network."""
        return neural_proposer(shape, self.parts, self.engine.limits.vocab_size, self.engine.page_size)

    def run(
        self,
        requests: Sequence[Request],
        behind_round: Callable[[], None] | None = None,
        until: float = math.inf,
    ) -> Finished:
        """All of them, submitted at once. `behind_round` is called when a round was launched. Raises OutOfTime where
        they are not finished when the clock (`time.perf_counter`) shows `until`; the engine is idle then;
        ModelError where one of them failed: what is measured of a broken model says nothing."""
        began = time.perf_counter()
        for request in requests:
            self.engine.submit(request)
        done: dict[int, Completion] = {}
        while len(done) < len(requests):
            rounds = self.engine.stats.rounds
            done |= {c.request_id: c for c in self.engine.step()}
            if behind_round is not None and self.engine.stats.rounds > rounds:
                behind_round()
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
        """What trees of `topk` branches and chains, both of `depth` steps, would have drafted at every place of these
        requests' own texts. Lookups need the texts alone: topk 0. The requests' noise streams must differ. Raises
        OutOfTime as `run` does."""
        sampled = any(request.params.temperature > 0 for request in requests)
        if self.parts.net is None:
            self.use(ByBatch.always(None))
            completions = self.run(requests, until=until).completions
            return Trace(tuple(_row(r, c, None) for r, c in zip(requests, completions, strict=True)), 0, 0, sampled)
        streams = {request.rng.stream: i for i, request in enumerate(requests)}
        assert len(streams) == len(requests), "two requests share a stream of noise"
        records = [_Record() for _ in requests]

        def record(drafted: Drafted) -> None:
            for b, (stream, root) in enumerate(zip(drafted.streams_B, drafted.roots_B, strict=True)):
                own = (drafted.chain_BS[b], drafted.tokens_BC[b], drafted.scores_BC[b], drafted.parents_BC[b])
                records[streams[int(stream)]].rounds[int(root)] = own

        wide = DraftShape(depth, topk, 2 if topk > 1 else depth + 1)  # no tree is verified: of any size
        behind_round: Callable[[], None] | None = None
        if isinstance(self.engine, DeviceEngine):
            drafter = self._tracing_drafter(self.engine, wide)

            def behind_round() -> None:
                if drafted := drafter.read():
                    record(drafted)
        else:
            self._in_use = None
            self.engine.set_methods(TracingProposer(self.proposer(wide), record))
        completions = self.run(requests, behind_round, until).completions
        rows = [_row(r, c, records[i]) for i, (r, c) in enumerate(zip(requests, completions, strict=True))]
        return Trace(tuple(rows), topk, depth, sampled)

    def _tracing_drafter(self, engine: DeviceEngine, wide: DraftShape) -> TracingDrafter:
        """In use from now on, or from the rows traced before, with the graphs that were captured for those."""
        if isinstance(self._in_use, _Tracing) and self._in_use.wide == wide:
            return self._in_use.drafter
        drafter = TracingDrafter(wide, self.parts)
        # A graph of each size that comes up: few do, and they are large.
        engine.set_methods(ByBatch.always(drafter), self._graphs, ahead=False)
        self._in_use = _Tracing(wide, drafter)
        return drafter


@dataclass(slots=True)
class _Record:
    # By the root's place in the request's tokens: chain (S,); tokens, scores and parents of the candidates, (C,) each.
    rounds: dict[int, tuple[np.ndarray, ...]] = field(default_factory=dict)


def _row(request: Request, completion: Completion, record: _Record | None) -> RowTrace:
    num_prompt = len(request.prompt_token_ids)
    tokens = np.array([*request.prompt_token_ids, *completion.token_ids], dtype=np.int32)
    if record is None or not record.rounds:
        return RowTrace(num_prompt, tokens)
    first = next(iter(record.rounds.values()))
    columns = [np.full((len(completion.token_ids), len(part)), -1, dtype=part.dtype) for part in first]
    for root, parts in record.rounds.items():
        # The device engine may run a round past the end of a row that a stop string cut short.
        if 0 <= root - num_prompt < len(completion.token_ids):
            for column, part in zip(columns, parts, strict=True):
                column[root - num_prompt] = part
    return RowTrace(num_prompt, tokens, *columns)
