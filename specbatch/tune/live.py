"""Schedules against each other and against plain decoding, live, alternating."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specbatch.draft.schedule import Schedule, shapes_of
from specbatch.rows.tokenizer import TextProcessor
from specbatch.tune.predict import Forecast
from specbatch.tune.profile import Prediction
from specbatch.tune.search import Plan, SearchResult
from specbatch.tune.session import Finished, OutOfTime, Session
from specbatch.tune.start import ROWS
from specbatch.types import Request, RngKey, SamplingParams, StopCheck

MAX_TRIALS = 5
_MAX_PLANS = 3  # plans that run live, in addition to plain decoding
_LIVE_BATCHES = 8  # batches that the rows of a live run fill: few of them are alone at the end; 2 if time is short
_WARM_UP_TOKENS = 8
# Two-sided 90% points of Student's t by degrees of freedom.
_T90 = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86, 9: 1.83, 10: 1.81, 11: 1.80, 12: 1.78}


@dataclass(frozen=True, slots=True)
class Live:
    """A schedule's runs over the same rows, one in each trial."""

    schedule: Schedule
    seconds: tuple[float, ...]
    tokens: tuple[int, ...]  # tokens that each run wrote: sampled chains may end elsewhere
    tokens_per_round: float  # tokens per round in the last run

    @staticmethod
    def of(schedule: Schedule, runs: Sequence[Finished]) -> Live:
        seconds, tokens = tuple(one.seconds for one in runs), tuple(one.num_tokens for one in runs)
        return Live(schedule, seconds, tokens, runs[-1].counts.acceptance_length or 1.0)

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def rates(self) -> list[float]:
        """The tokens per second of each run."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def speedups(live: Sequence[Live]) -> list[tuple[float, float, float]]:
    """Return how many times faster than the last schedule each of the others is: the geometric mean over the trials,
    and its 90% interval.

    What is left of the logarithms without a schedule's mean and a trial's (randomised blocks, Fisher 1935) is the
    noise, the same for all schedules: two trials of four schedules give it 3 degrees of freedom, where each pair alone
    has 1.
    """
    logs_KT = np.log([one.rates for one in live])
    num_schedules, num_trials = logs_KT.shape
    gains = logs_KT[:-1].mean(axis=1) - logs_KT[-1].mean()
    freedom = (num_schedules - 1) * (num_trials - 1)
    if not freedom:
        return [(math.exp(gain), 0.0, math.inf) for gain in gains]
    rest_KT = logs_KT - logs_KT.mean(axis=1, keepdims=True) - logs_KT.mean(axis=0) + logs_KT.mean()
    margin = _T90.get(freedom, 1.65) * math.sqrt(float((rest_KT**2).sum()) / freedom * 2 / num_trials)
    return [(math.exp(gain), math.exp(gain - margin), math.exp(gain + margin)) for gain in gains]


def drift(live: Sequence[Live]) -> float:
    """Return how many times faster the machine was in its fastest trial than in its slowest, over all schedules."""
    per_trial = np.log([one.rates for one in live]).mean(axis=0)
    return math.exp(per_trial.max() - per_trial.min())


def _shortened(request: Request) -> Request:
    return replace(request, params=replace(request.params, max_tokens=min(_WARM_UP_TOKENS, request.params.max_tokens)))


def repeated(
    requests: Sequence[Request], count: int, stop_check: Callable[[SamplingParams], StopCheck | None]
) -> list[Request]:
    """`count` requests: these, again and again, each with its own id, stream of random numbers and stop check. They run
    once: a stop check has a state."""
    made = []
    for i in range(count):
        request = requests[i % len(requests)]
        rng = RngKey(request.rng.seed, i, request.rng.sample)
        made.append(replace(request, request_id=i, rng=rng, check_stop=stop_check(request.params)))
    return made


def run_plans(
    session: Session,
    plans: Sequence[Plan],
    requests: Sequence[Request],
    count: int,
    texts: TextProcessor,
    seconds: float,
    num_warm_up: int,
) -> list[Live]:
    """Each plan once in a trial, in changing order, over `count` of these requests. There are as many trials as there
    is time for, and two in any case: one does not show the noise. A trial after the first that is not finished a tenth
    of the time after its end is dropped.

    What is compiled or loaded first is not timed. `num_warm_up` trials run before, or where that is 0, a few tokens of
    two requests. Prompts on a GPU have graphs by how many requests start together, and the first schedule to meet a
    number would pay for it."""
    began = time.perf_counter()
    schedules = [plan.schedule for plan in plans]
    runs: list[list[Finished]] = [[] for _ in schedules]
    for schedule in schedules:
        session.use(schedule)
        made = repeated(requests, count, texts.stop_check)
        session.run(made if num_warm_up else [_shortened(one) for one in made[:2]])
    for trial in range(MAX_TRIALS):
        until = began + 1.1 * seconds if trial else math.inf
        order = range(len(schedules)) if trial % 2 == 0 else reversed(range(len(schedules)))
        finished: dict[int, Finished] = {}
        try:
            for i in order:
                session.use(schedules[i])
                finished[i] = session.run(repeated(requests, count, texts.stop_check), until=until)
        except OutOfTime:
            break
        for i, one in finished.items():
            runs[i].append(one)
        spent = time.perf_counter() - began
        if trial and spent + spent / (trial + 1 + num_warm_up) > seconds:
            break
    return [Live.of(schedule, own) for schedule, own in zip(schedules, runs, strict=True)]


def plans_to_run(
    result: SearchResult, forecast: Forecast, num_traced: int, num_rows: int, seconds: float, num_warm_up: int
) -> tuple[list[Plan], int]:
    """The best plans and plain decoding, and over how many rows to run them: as in the file, most of them together with
    others, as far as the time allows. `num_warm_up`: trials that are not timed."""
    plans: list[Plan] = []
    for plan in (result.best, *result.fixed):
        # Of n-gram drafts that differ in the lengths of matches alone, some find the same.
        known = {one.prediction.seconds for one in plans}
        if shapes_of(plan.schedule) and plan.prediction.seconds not in known and len(plans) < _MAX_PLANS:
            plans.append(plan)
    plans.append(result.plain)
    batch, few = forecast.limits.max_running, min(num_traced, ROWS)
    least = min(num_rows, max(few, 2 * batch))
    count = min(num_rows, max(few, _LIVE_BATCHES * batch))

    def trial_seconds() -> float:
        return sum(forecast.seconds(plan.schedule, count) for plan in plans)

    while count > least and (num_warm_up + MAX_TRIALS) * trial_seconds() > seconds:
        count = max(least, count * 2 // 3)
    # Two trials should fit in any case: over fewer rows, then of fewer plans.
    for fewest in (8, 4):
        while count > fewest and (num_warm_up + 2.5) * trial_seconds() > seconds:
            count = max(fewest, count * 2 // 3)
        while len(plans) > 2 and (num_warm_up + 2.5) * trial_seconds() > seconds:
            del plans[-2]  # plain decoding is the last
    return plans, count


def file_seconds(plans: list[Plan], live: list[Live], predicted: list[Prediction]) -> list[float]:
    """Return the seconds that these plans, which ran live, take for the whole file: the prediction, corrected by the
    error of the prediction of the live runs."""
    return [
        plan.prediction.seconds * of_live.tokens_per_second / one.tokens_per_second
        for plan, one, of_live in zip(plans, live, predicted, strict=True)
    ]


def winner(plans: list[Plan], live: list[Live], seconds: list[float]) -> Plan | None:
    """Return the plan that is fastest with the whole file (`seconds`), among those that beat plain decoding, the last
    one, outside the noise. Return plain decoding if it beats all others outside the noise. Returns None if it is
    undecided."""
    found = speedups(live)
    paying = [i for i, (_, low, _) in enumerate(found) if low > 1.0]
    if paying:
        return plans[min(paying, key=lambda i: seconds[i])]
    return plans[-1] if all(high < 1.0 for _, _, high in found) else None
