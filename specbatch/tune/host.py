"""Tuning with the oracle engine, which runs where the attention is `torch`: it records and times what the other engine
does in its own way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from specbatch.draft.network import TargetOutput
from specbatch.draft.schedule import ByBatch, Schedule, shapes_of
from specbatch.draft.shape import DraftShape
from specbatch.engine.base import check_finite
from specbatch.engine.build import Built
from specbatch.engine.device_engine import DeviceEngine
from specbatch.engine.executor import GraphMode
from specbatch.engine.sequence import Sequence
from specbatch.oracle.engine import Engine
from specbatch.oracle.factory import neural_proposer, proposer_of
from specbatch.oracle.neural import NeuralProposer
from specbatch.oracle.ngram import NoProposer
from specbatch.oracle.proposer import Proposer
from specbatch.oracle.schedule import ScheduledProposer
from specbatch.oracle.tree import DraftTree
from specbatch.tune.session import Record, Session, new_record
from specbatch.tune.timing import dummy_requests

_ROUNDS = 3  # for each shape; after one to warm up


def new_session(built: Built, graphs: GraphMode, sampled: bool = False) -> Session:
    kind = Session if isinstance(built.engine, DeviceEngine) else HostSession
    return kind(cast(Any, built.engine), built.method, built.parts, graphs, sampled)


class HostSession(Session):
    @property
    def on_cuda(self) -> bool:
        return False

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.engine.limits.vocab_size, self.engine.page_size

    @property
    def _host(self) -> Engine:
        return cast(Engine, self.engine)

    def use(self, schedule: Schedule) -> None:
        self._in_use = schedule
        if not (shapes := shapes_of(schedule)):
            self._host.set_methods(NoProposer())
            return
        match = shapes[0].ngram_match or self.parts.ngram_match
        parts = replace(self.parts, ngram_match=match)
        self._host.set_methods(proposer_of(self.method, schedule, parts, *self._sizes))

    def _record_rounds(self, wide: DraftShape, record: Callable[[Record | None], None]) -> Callable[[], None] | None:
        self._host.set_methods(TracingProposer(neural_proposer(wide, self.parts, *self._sizes), record))
        return None

    def time_rounds(
        self, batch: int, context: int, shapes: list[DraftShape]
    ) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Milliseconds of each part of a plain round, and of a round of each shape."""
        net, engine = self.parts.net, self._host
        proposers: list[Proposer] = [
            _FixedProposer(s) if net is None else neural_proposer(s, self.parts, *self._sizes) for s in shapes
        ]
        switch = _Switch(NoProposer() if net is None else proposers[0])
        engine.set_methods(switch)
        for request in dummy_requests(engine.limits.vocab_size, batch, context, timed_tokens(shapes)):
            engine.submit(request)
        while engine.num_waiting or not engine.is_prefilled:
            check_finite(engine.step())
        assert engine.num_running == batch, "the cache does not hold that many requests"

        def timed(proposer: Proposer) -> dict[str, float]:
            switch.current = proposer
            parts: dict[str, list[float]] = {"draft": [], "verify": [], "extend": [], "round": []}
            for number in range(_ROUNDS + 1):
                began = time.perf_counter()
                check_finite(engine.step())
                values = (*engine.phase_seconds, time.perf_counter() - began)
                if number:
                    for name, value in zip(parts, values, strict=True):
                        parts[name].append(1e3 * value)
            return {name: statistics.median(values) for name, values in parts.items()}

        found = timed(NoProposer()), [timed(proposer) for proposer in proposers]
        engine.abort_all()
        return found


def timed_tokens(shapes: list[DraftShape]) -> int:
    """More than a timed request may write."""
    return (len(shapes) + 2) * (_ROUNDS + 1) * (1 + max((shape.num_steps for shape in shapes), default=0))


class TracingProposer:
    """Around a proposer of the widest shape."""

    def __init__(self, wide: NeuralProposer, record: Callable[[Record | None], None]) -> None:
        self._wide = wide
        self._record = record
        self.num_lookahead, self.prefix_lookahead = wide.num_lookahead, wide.prefix_lookahead
        self.aux_layers, self.cache = wide.aux_layers, wide.cache

    def start(self, seq: Sequence) -> None:
        self._wide.start(seq)

    def extend(self, sequences: list[Sequence], output: TargetOutput) -> None:
        self._wide.extend(sequences, output)

    def propose(self, sequences: list[Sequence]) -> DraftTree:
        candidates = self._wide.candidates(sequences)
        chains = self._wide.chain(sequences, greedy=True).tokens_BN
        streams = torch.tensor([seq.request.rng.stream for seq in sequences])
        roots = torch.tensor([len(seq.tokens) - 1 for seq in sequences])
        self._record(new_record(streams, roots, chains[:, 1:], *candidates))
        return DraftTree.chain([[seq.tokens[-1]] for seq in sequences])


class _Switch(ScheduledProposer):
    """Drafts as `current` does; the leader follows what is committed."""

    def __init__(self, leader: Proposer) -> None:
        super().__init__(ByBatch.always(leader), leader)
        self.current = leader

    def propose(self, sequences: list[Sequence]) -> DraftTree:
        return self.current.propose(sequences)


class _FixedProposer(NoProposer):
    """Chains of full length whatever the text offers: what verifying them costs, not what they are worth."""

    def __init__(self, shape: DraftShape) -> None:
        self._count = shape.num_draft_tokens - 1
        self.num_lookahead = shape.num_draft_tokens

    def propose(self, sequences: list[Sequence]) -> DraftTree:
        return DraftTree.chain([[seq.tokens[-1], *[0] * self._count] for seq in sequences])
