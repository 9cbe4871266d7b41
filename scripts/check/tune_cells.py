"""A cell of `check_tune.py`: rows that run with one draft shape and one batch size, and the prediction."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from specbatch.draft.schedule import ByBatch, label
from specbatch.draft.shape import DraftShape
from specbatch.tune.command import Tuned
from specbatch.tune.live import repeated
from specbatch.tune.profile import Limits
from specbatch.tune.session import Session
from specbatch.types import Completion, Request


def run_cell(tuned: Tuned, shape: DraftShape | None, batch: int, count: int) -> dict[str, Any]:
    """Run `count` of the traced rows, `batch` at a time, and predict the same."""
    schedule, session = ByBatch.always(shape), tuned.session
    session.use(schedule)
    engine = session.engine
    forecast = replace(tuned.forecast, limits=replace(tuned.forecast.limits, max_running=batch))
    # Plain decoding has no replay: each token after the first has a round.
    rounds_R = [row.num_output - 1 for row in tuned.forecast.trace.rows]
    if shape is not None:
        rounds_R = tuned.forecast.replays[shape].rounds_R.tolist()
    gathered = Gathered.of(forecast.limits, statistics.mean(rounds_R))
    requests = repeated(tuned.requests, count, tuned.texts.stop_check)
    # This run compiles, loads and captures what the cell needs: prompt chunks have algorithms and graphs by their size,
    # the first chunk of a cell and those that come as rows end.
    session.run(repeated(tuned.requests, batch, tuned.texts.stop_check))
    prompts = [replace(r, params=replace(r.params, max_tokens=1), check_stop=None) for r in requests]
    run_at_once(session, prompts, gathered.places, gathered, forecast.limits.async_depth)
    waited, before = engine.waited_seconds, replace(engine.stats)
    steady, seconds, completions = run_at_once(session, requests, batch, gathered, forecast.limits.async_depth)
    after = engine.stats
    live = {
        "steady_seconds": steady.seconds,
        "steady_tokens": steady.tokens,
        "seconds": seconds,
        "tokens": sum(len(c.token_ids) for c in completions),
        "rounds_of_rows": sum(c.speculation.rounds for c in completions),
        "prefill_seconds": after.prefill_seconds - before.prefill_seconds,
        "rounds": after.rounds - before.rounds,
        "waited_seconds": engine.waited_seconds - waited,
    }
    said = forecast.predict(schedule, count)
    predicted = {
        "steady_seconds": said.prefill_seconds + said.steady_seconds,
        "steady_tokens": said.steady_tokens,
        "seconds": said.seconds,
        "tokens": said.output_tokens,
        "rounds_of_rows": sum(rounds_R[i % len(rounds_R)] for i in range(count)),
        "prefill_seconds": said.prefill_seconds,
        "rounds": said.rounds,
    }
    speeds = [said.steady_tokens_per_second, steady.tokens / steady.seconds]
    to_the_end = [part["tokens"] / part["seconds"] for part in (predicted, live)]
    return {
        "batch": batch,
        "what": label(shape),
        "rows": count,
        "predicted_tok_s": round(speeds[0], 1),
        "live_tok_s": round(speeds[1], 1),
        "error": round(speeds[0] / speeds[1] - 1, 4),
        "error_to_the_end": round(to_the_end[0] / to_the_end[1] - 1, 4),
        "predicted": {name: round(value, 4) for name, value in predicted.items()},
        "live": {name: round(value, 4) for name, value in live.items()},
    }


@dataclass(frozen=True, slots=True)
class Gathered:
    """The limits until which requests wait in an engine of this batch size: free request indices, or prompt tokens."""

    places: int
    tokens: int

    @staticmethod
    def of(limits: Limits, mean_rounds: float) -> Gathered:
        cost = limits.chunk_cost
        return (
            Gathered(1, 1)
            if cost is None
            else Gathered(cost.min_free_requests(limits.max_running, mean_rounds), cost.tokens)
        )

    def is_worth_a_chunk(self, waiting: deque[Request], free: int) -> bool:
        if free >= min(self.places, len(waiting)):
            return True
        return sum(len(request.prompt_token_ids) for request in islice(waiting, free)) >= self.tokens


@dataclass(frozen=True, slots=True)
class Steady:
    """The time and the tokens until the last row was admitted. After that, fewer and fewer rows run."""

    seconds: float
    tokens: int


def run_at_once(
    session: Session, requests: list[Request], most: int, gathered: Gathered, async_depth: int
) -> tuple[Steady, float, list[Completion]]:
    """Run requests, `most` at a time in an engine that has room for more. Return the steady part, the seconds and the
    completions. The engine reports the result of a step `async_depth` steps later."""
    engine, waiting, done = session.engine, deque(requests), list[Completion]()
    steady: Steady | None = None
    before, began, since = engine.stats.generated_tokens, time.perf_counter(), 0
    while len(done) < len(requests):
        free = most - (len(requests) - len(waiting) - len(done))
        if waiting and free and gathered.is_worth_a_chunk(waiting, free):
            for _ in range(min(free, len(waiting))):
                engine.submit(waiting.popleft())
        done += engine.step()
        if not waiting and not engine.num_waiting and engine.is_prefilled:
            if since == async_depth:
                steady = Steady(time.perf_counter() - began, engine.stats.generated_tokens - before)
            since += 1
    end = Steady(time.perf_counter() - began, engine.stats.generated_tokens - before)
    return steady or end, end.seconds, done
