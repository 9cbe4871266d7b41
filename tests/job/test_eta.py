"""The time that a job will still take: jobs on an engine whose clock is made up, with lengths as models write them."""

from __future__ import annotations

import io
import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from specbatch.config import Config, DataSection, EngineSection
from specbatch.counts import EngineStats, SpeculationCounts
from specbatch.job.eta import Forecast, Work
from specbatch.job.generate import FileJob
from specbatch.job.plan import RowPlan
from specbatch.job.pool import LocalPool
from specbatch.job.progress import JobProgress
from specbatch.job.warnings import Remarks
from specbatch.job.worker import Runtime, Worker
from specbatch.results.results import ResultFile
from specbatch.rows.parser import RowParser
from specbatch.rows.shard import Shard, part_of
from specbatch.rows.sources import open_source
from specbatch.types import BatchEngine, Completion, EngineLimits, FinishReason, Request, RngKey, SamplingParams
from tests.stub_engine import resolve
from tests.tiny_models import random_prompts, tiny_device_engine, tiny_engine

Lengths = Callable[[np.random.Generator, int], np.ndarray]
ROUND, PROMPT = 0.25, 0.06  # seconds of a round of a full batch, and of a prompt
SHARES = (0.1, 0.25, 0.5, 0.75, 0.95)


def lognormal(mean: float, sigma: float) -> Lengths:
    return lambda rng, count: rng.lognormal(np.log(mean), sigma, count)


def mixed(rng: np.random.Generator, count: int) -> np.ndarray:
    """Most answers are a sentence, the others an essay."""
    return np.where(
        rng.random(count) < 0.7, rng.lognormal(np.log(30), 0.4, count), rng.lognormal(np.log(400), 0.4, count)
    )


def endless(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.full(count, 1e9)


class SimulatedEngine:
    """Each request writes 1 to 3 tokens a round; a round of few requests takes at least `idle` of a full one's time."""

    def __init__(self, batch: int, rows: int, lengths: Lengths, idle: float) -> None:
        self.now = 0.0
        self.limits = EngineLimits(4000, 300)
        self.stats = EngineStats()
        self._rng = np.random.default_rng(1)
        self._lengths = np.maximum(lengths(self._rng, rows), 1)
        self._batch, self._idle = batch, idle
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._written, self._ends = np.zeros(0, int), np.zeros(0, int)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def tokens_so_far(self) -> dict[int, int]:
        return {request.request_id: int(w) for request, w in zip(self._running, self._written, strict=True)}

    def limit_length(self, tokens: int | None) -> int:
        return self.limits.max_prompt_tokens + 1

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def close(self) -> None:
        pass

    def step(self) -> list[Completion]:
        new = [self._waiting.popleft() for _ in range(min(self._batch - len(self._running), len(self._waiting)))]
        if new:
            self._running += new
            self._written = np.append(self._written, np.zeros(len(new), int))
            ends = [min(int(self._lengths[r.request_id]), r.params.max_tokens) for r in new]
            self._ends = np.append(self._ends, ends)
            self.stats.prefill_seconds += PROMPT * len(new)
            self.now += PROMPT * len(new)
            return []
        self.now += ROUND * (self._idle + (1 - self._idle) * len(self._running) / self._batch)
        grown = np.minimum(self._written + self._rng.integers(1, 4, len(self._running)), self._ends)
        self.stats.generated_tokens += int((grown - self._written).sum())
        self._written = grown
        done = np.flatnonzero(grown == self._ends)
        finished = [self._complete(self._running[i], int(grown[i])) for i in done]
        self._running = [request for i, request in enumerate(self._running) if grown[i] < self._ends[i]]
        self._written, self._ends = np.delete(self._written, done), np.delete(self._ends, done)
        return finished

    def _complete(self, request: Request, length: int) -> Completion:
        stopped = length == int(self._lengths[request.request_id])
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return Completion(request.request_id, [97] * length, reason, None, SpeculationCounts())


@dataclass
class Simulation:
    """A file job on such an engine; `etas`: (when shown, seconds left)."""

    folder: Path
    rows: int
    batch: int
    lengths: Lengths
    most: int = 1024
    idle: float = 0.5
    between: str = ""  # lines of the input after each row
    total: bool = True  # whether the number of rows is known
    shards: int = 1  # of the input; one of them runs, and has `rows`
    plan_rows: int = 0
    own_limits: bool = False  # rows may write from an eighth of `most` to all of it
    etas: list[tuple[float, float]] = field(default_factory=list)

    def run(self, stop_after: int | None = None) -> float:
        """Returns the time that it took; `stop_after`: the job is interrupted after so many rows."""
        path = self.folder / "d.jsonl"
        lines = [{"prompt": f"p{i}"} | self._own_limit(i) for i in range(self.shards * self.rows)]
        path.write_text("".join(json.dumps(line) + "\n" + self.between for line in lines))
        source = part_of(open_source(str(path), DataSection()), None, Shard(self.shards - 1, self.shards))
        if not self.total:
            source = replace(source, total=None)
        results = ResultFile(self.folder / "out.jsonl", {"job": 1}, overwrite=False)
        engine = SimulatedEngine(self.batch, self.rows, self.lengths, self.idle)
        log = io.StringIO()
        began, shown = 0.0, 0

        class Watched(JobProgress):
            def show(self, now: object) -> None:
                nonlocal began, shown
                began = began or engine.now
                super().show(now)  # type: ignore[arg-type]
                text = log.getvalue()[shown:]
                shown += len(text)
                if match := re.search(r"ETA (?:(\d+):)??(?:(\d+):)?(\d+)s?\b", text):
                    hours, minutes, seconds = (int(part or 0) for part in match.groups())
                    etas.append((engine.now, 3600 * hours + 60 * minutes + seconds))
                if stop_after is not None and results.totals.rows >= stop_after:
                    job.interrupted = True

        etas = self.etas = []
        config = Config(engine=EngineSection(max_batch_size=self.batch), sampling=SamplingParams(max_tokens=self.most))
        pool = LocalPool(Worker(Runtime(resolve, lambda run, show: engine, lambda _: {})))
        pool.describe(config)
        pool.load(lambda tokens: tokens, lambda step: None)
        watched = Watched(Console(file=log, width=200), clock=lambda: engine.now)
        job = FileJob(source, results, pool, lambda: None, Remarks("stub", columns=False), watched)
        if self.plan_rows:
            parser = RowParser(config.sampling, config.data)
            job.plan = partial(RowPlan, parser=parser, max_rows=self.plan_rows, num_last=self.rows)
        job.run()
        results.close()
        return engine.now

    def _own_limit(self, row: int) -> dict[str, int]:
        return {"max_tokens": self.most * (1 + row * 5 % 8) // 8} if self.own_limits else {}

    def ratios(self) -> list[float]:
        """Shown against true seconds left, at each of SHARES of the time."""
        total = self.run()
        found = []
        for share in SHARES:
            when, left = [eta for eta in self.etas if eta[0] <= share * total][-1]
            found.append(left / (total - when))
        return found


@pytest.mark.parametrize(
    ("batch", "waves", "lengths", "most", "idle"),
    [
        (16, 10, endless, 256, 0.2),
        (16, 20, lognormal(150, 0.6), 256, 0.9),
        (16, 20, lognormal(150, 0.6), 2048, 0.2),
        (16, 30, lognormal(120, 1.0), 2048, 0.9),
        (64, 10, mixed, 1024, 0.5),
        (64, 5, endless, 256, 0.5),
    ],
)
def test_eta_is_within_a_third_of_the_truth(
    tmp_path: Path, batch: int, waves: int, lengths: Lengths, most: int, idle: float
) -> None:
    """From a tenth of the job on, until a few stragglers are left, of whom nobody can know."""
    ratios = Simulation(tmp_path, batch * waves, batch, lengths, most, idle).ratios()
    assert all(1 / 1.3 < ratio < 1.3 for ratio in ratios[:-1]), ratios


def test_the_eta_of_a_shard_is_for_its_own_rows(tmp_path: Path) -> None:
    ratios = Simulation(tmp_path, 320, 16, lognormal(150, 0.6), 1024, shards=4).ratios()
    assert all(1 / 1.3 < ratio < 1.3 for ratio in ratios[:-1]), ratios


@pytest.mark.parametrize("plan_rows", [64, 1000])
def test_the_eta_of_rows_that_start_by_their_limits(tmp_path: Path, plan_rows: int) -> None:
    simulation = Simulation(tmp_path, 240, 16, lognormal(400, 1.0), 400, plan_rows=plan_rows, own_limits=True)
    ratios = simulation.ratios()
    assert all(1 / 1.3 < ratio < 1.3 for ratio in ratios[:-1]), ratios


def test_few_waves_are_forecast_as_a_whole(tmp_path: Path) -> None:
    """The last completion of a small job is one draw from the tail: its end is known within a third."""
    simulation = Simulation(tmp_path, 5 * 64, 64, lognormal(150, 0.6), 1024)
    total = simulation.run()
    late = [when + left for when, left in simulation.etas if when > 0.2 * total]
    assert len(late) > 10
    assert all(total / 1.3 < end < total * 1.3 for end in late), (total, late)


def test_eta_is_there_with_the_first_line(tmp_path: Path) -> None:
    """Long before the first row has finished."""
    simulation = Simulation(tmp_path, 64, 16, endless, 256)
    total = simulation.run()
    when, left = simulation.etas[0]
    assert when < 7
    assert total / 2 < when + left < total * 2


def test_a_resumed_job_knows_the_lengths_from_before(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, 320, 16, mixed, 4096)
    simulation.run(stop_after=240)
    left = simulation.run()
    when, eta = simulation.etas[0]
    assert when < 8
    assert left / 1.3 < when + eta < left * 1.3, (left, simulation.etas)


def test_rows_that_fail_and_blank_lines_take_no_time(tmp_path: Path) -> None:
    ratios = Simulation(tmp_path, 200, 16, endless, 256, between="\n\nbroken\n").ratios()
    assert all(1 / 1.3 < ratio < 1.3 for ratio in ratios), ratios


def test_an_input_of_unknown_length_has_an_eta_once_it_is_read(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, 160, 16, endless, 256, total=False)
    total = simulation.run()
    assert 0.6 * total < simulation.etas[0][0] < 0.95 * total  # when the last look-ahead is under way


def test_without_data_there_is_no_forecast() -> None:
    forecast = Forecast()
    idle = Work(0, 0.0, 0, {}, [], [], 0.0)
    forecast.update(0.0, idle)
    assert (forecast.seconds_left, forecast.tokens_per_second) == (None, None)
    forecast.update(9.0, idle)
    assert (forecast.seconds_left, forecast.tokens_per_second) == (None, 0.0)
    forecast.update(10.0, Work(4, 0.0, 1, {}, [(4, 9)], [9], 0.0))
    forecast.update(12.0, Work(6, 0.0, 1, {}, [], [9], 0.0))  # one of two completions of a row
    assert forecast.seconds_left is not None


def test_speed_is_that_of_the_last_half_minute() -> None:
    forecast = Forecast()
    for second in range(100):
        tokens = 10 * second if second < 50 else 500 + 30 * (second - 50)
        forecast.update(float(second), Work(tokens, 0.0, 2, {}, [(tokens // 2, 9999)] * 2, [], 0.0))
        if second == 49:
            assert forecast.tokens_per_second == pytest.approx(10)
    assert forecast.tokens_per_second == pytest.approx(30)


@pytest.mark.parametrize("make", [tiny_engine, tiny_device_engine])
def test_engines_count_the_tokens_of_what_is_running(make: Callable[..., BatchEngine]) -> None:
    """Those of preempted requests too."""
    engine = make("none", None, num_pages=26)
    for i, prompt in enumerate(random_prompts(8, seed=1, longest=30)):
        engine.submit(Request(i, prompt, SamplingParams(max_tokens=30), RngKey(0, i, 0)))
    assert engine.tokens_so_far() == {}
    finished: dict[int, int] = {}
    most = 0
    while engine.num_running or engine.num_waiting:
        finished |= {completion.request_id: len(completion.token_ids) for completion in engine.step()}
        so_far = engine.tokens_so_far()
        assert not finished.keys() & so_far.keys()
        assert sum(finished.values()) + sum(so_far.values()) == engine.stats.generated_tokens
        most = max(most, len(so_far) - engine.num_running)
    assert finished.keys() == set(range(8))
    assert most > 0, "no request was preempted"
