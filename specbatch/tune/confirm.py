"""Options against each other and against plain decoding, live and in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.tune.candidates import Candidate, NgramShape
from specbatch.tune.schedule import Schedule as Chosen
from specbatch.tune.session import Finished, OutOfTime, Session
from specbatch.types import Request, RngKey, SamplingParams, StopCheck

MOST_TURNS = 5
_WARM_UP_TOKENS = 8
# Two-sided 90% points of Student's t by degrees of freedom.
_T90 = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86, 9: 1.83, 10: 1.81, 11: 1.80, 12: 1.78}


def told(chosen: Chosen) -> tuple[Schedule, tuple[int, int] | None]:
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
    tokens: tuple[int, ...]  # that each of them wrote: sampled chains may end elsewhere
    tokens_per_round: float

    @property
    def name(self) -> str:
        return self.chosen.name

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each run."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def speedups(live: Sequence[Live]) -> list[tuple[float, float, float]]:
    """How many times faster than the last one each of the others is: geometric mean over the turns, and its 90%
    interval.

    What is left of the logarithms behind an option's mean and a turn's (randomised blocks, Fisher 1935) is the noise,
    the same for all options: two turns of four options give it 3 degrees of freedom, where each pair alone has 1.
    """
    logs_KT = np.log([one.rates for one in live])
    num_options, num_turns = logs_KT.shape
    gains = logs_KT[:-1].mean(axis=1) - logs_KT[-1].mean()
    freedom = (num_options - 1) * (num_turns - 1)
    if not freedom:
        return [(math.exp(gain), 0.0, math.inf) for gain in gains]
    rest_KT = logs_KT - logs_KT.mean(axis=1, keepdims=True) - logs_KT.mean(axis=0) + logs_KT.mean()
    margin = _T90.get(freedom, 1.65) * math.sqrt(float((rest_KT**2).sum()) / freedom * 2 / num_turns)
    return [(math.exp(gain), math.exp(gain - margin), math.exp(gain + margin)) for gain in gains]


def drift(live: Sequence[Live]) -> float:
    """How many times faster the machine was in its fastest turn than in its slowest; options take part alike."""
    per_turn = np.log([one.rates for one in live]).mean(axis=0)
    return math.exp(per_turn.max() - per_turn.min())


def _shortened(request: Request) -> Request:
    return replace(request, params=replace(request.params, max_tokens=min(_WARM_UP_TOKENS, request.params.max_tokens)))


def repeated(
    requests: Sequence[Request], count: int, stop_check: Callable[[SamplingParams], StopCheck | None]
) -> list[Request]:
    """`count` requests: these, again and again, each with an id, a stream of noise and a stop check of its own. To be
    run once: stop checks remember."""
    made = []
    for i in range(count):
        request = requests[i % len(requests)]
        rng = RngKey(request.rng.seed, i, request.rng.sample)
        made.append(replace(request, request_id=i, rng=rng, check_stop=stop_check(request.params)))
    return made


def confirm(
    session: Session,
    options: Sequence[Chosen],
    make_requests: Callable[[], list[Request]],
    out_of_time: Callable[[int], bool],
    whole_first: bool,
    until: float = math.inf,
) -> list[Live]:
    """Each option once in a turn, in changing order; as many turns as there is time for, one at least. `out_of_time`
    is asked after each turn, with the number of turns so far. A further turn that is not finished when the clock shows
    `until` is dropped.

    What is compiled or touched first is not timed. `whole_first`: all requests run before, not a few tokens of two of
    them. Prompts on a GPU have graphs by how many rows start together, and the first option to meet a number would pay
    for it."""
    seconds: list[list[float]] = [[] for _ in options]
    tokens: list[list[int]] = [[] for _ in options]
    tokens_per_round = [1.0] * len(options)
    for option in options:
        session.use(*told(option))
        session.run(make_requests() if whole_first else [_shortened(one) for one in make_requests()[:2]])
    for turn in range(MOST_TURNS):
        order = range(len(options)) if turn % 2 == 0 else reversed(range(len(options)))
        runs: dict[int, Finished] = {}
        try:
            for i in order:
                session.use(*told(options[i]))
                runs[i] = session.run(make_requests(), until=until if turn else math.inf)
        except OutOfTime:
            break
        for i, finished in runs.items():
            seconds[i].append(finished.seconds)
            tokens_per_round[i] = finished.counts.acceptance_length or 1.0
            tokens[i].append(finished.num_tokens)
        if out_of_time(turn + 1):
            break
    return [Live(option, tuple(seconds[i]), tuple(tokens[i]), tokens_per_round[i]) for i, option in enumerate(options)]
