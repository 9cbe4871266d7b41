"""Options against each other and against plain decoding, live and in turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specbatch.speculation.schedule import ByBatch, Schedule
from specbatch.speculation.tree import DraftShape
from specbatch.tuning.candidates import Candidate, NgramShape, label
from specbatch.tuning.schedule import Schedule as Chosen
from specbatch.tuning.session import Session
from specbatch.types import NoiseKey, Request

# Two-sided 90% points of Student's t by degrees of freedom.
_T90 = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86, 9: 1.83}


def _told(chosen: Chosen) -> tuple[Schedule, tuple[int, int] | None]:
    """As an engine is told: shapes by the number of rows, and of lookups the shortest and longest match."""
    lookups = [c for c in chosen.candidates if isinstance(c, NgramShape)]
    matches = (lookups[0].min_match, lookups[0].max_match) if lookups else None
    bounds = tuple(entry.max_batch for entry in chosen.entries)
    return ByBatch(bounds, tuple(_shape(entry.candidate) for entry in chosen.entries)), matches


def _shape(candidate: Candidate | None) -> DraftShape | None:
    if isinstance(candidate, NgramShape):
        return DraftShape(candidate.num_draft_tokens - 1, 1, candidate.num_draft_tokens)
    return candidate


@dataclass(frozen=True, slots=True)
class Live:
    """An option's runs over the same rows, one in each turn."""

    chosen: Chosen
    seconds: tuple[float, ...]
    tokens_per_round: float
    num_tokens: int

    @property
    def name(self) -> str:
        entries = self.chosen.entries
        return label(entries[0].candidate) if len(entries) == 1 else str(self.chosen)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / statistics.mean(self.seconds)

    def speedup(self, other: Live) -> tuple[float, float, float]:
        """How many times faster than `other`: geometric mean over the turns, and its 90% interval."""
        logs = [math.log(b / a) for a, b in zip(self.seconds, other.seconds, strict=True)]
        mean = statistics.mean(logs)
        if len(logs) == 1:
            return math.exp(mean), 0.0, math.inf
        margin = _T90.get(len(logs) - 1, 1.65) * statistics.stdev(logs) / math.sqrt(len(logs))
        return math.exp(mean), math.exp(mean - margin), math.exp(mean + margin)


def repeated(requests: Sequence[Request], count: int) -> list[Request]:
    """`count` requests: these, again and again, each with an id and a stream of noise of its own."""
    made = []
    for i in range(count):
        request = requests[i % len(requests)]
        made.append(replace(request, request_id=i, noise=NoiseKey(request.noise.seed, i, request.noise.sample)))
    return made


def confirm(
    session: Session,
    options: Sequence[Chosen],
    requests: Sequence[Request],
    out_of_time: Callable[[int], bool],
    most_turns: int = 5,
) -> list[Live]:
    """Each option once in a turn, in changing order; as many turns as there is time for, one at least. `out_of_time`
    is asked after each turn, with the number of turns so far."""
    seconds: list[list[float]] = [[] for _ in options]
    tokens_per_round = [1.0] * len(options)
    num_tokens = 0
    for turn in range(most_turns):
        order = range(len(options)) if turn % 2 == 0 else reversed(range(len(options)))
        for i in order:
            session.use(*_told(options[i]))
            if turn == 0:
                session.run(requests[:2])  # what is compiled or touched first
            finished = session.run(requests)
            seconds[i].append(finished.seconds)
            tokens_per_round[i] = finished.counts.acceptance_length or 1.0
            num_tokens = finished.num_tokens
        if out_of_time(turn + 1):
            break
    return [
        Live(option, tuple(times), tokens, num_tokens)
        for option, times, tokens in zip(options, seconds, tokens_per_round, strict=True)
    ]
