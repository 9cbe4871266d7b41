"""A pool of workers for one file job: which worker gets which rows, and when.

The pool has no thread and starts no process: a `Transport` carries its calls, and everything happens within a call of
one of its methods. Two exchanges are at each worker that has rows, so that no engine pauses between them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from specbatch.config import Config
from specbatch.counts import EngineStats
from specbatch.job.pool import PoolState
from specbatch.job.runner import Load
from specbatch.job.worker import Description, Slice
from specbatch.results.fingerprint import ModelRecord
from specbatch.results.finished import Finished
from specbatch.results.partial import RowDeaths
from specbatch.results.results import ResultFile
from specbatch.rows.sources import RawRow
from specbatch.scaleout.rows import PoolRows
from specbatch.scaleout.transport import Transport
from specbatch.scaleout.worker_manager import Handlers, PoolLimits, PoolWorker, WorkerManager, merged

_CREDIT_BATCHES = 3  # batches of rows at a worker: one that runs, and two that wait
_CREDIT_SLICES = 3  # slices of rows at a worker, if more rows finish in a slice: else the engine would run out of rows
_MAX_EXCHANGES = 2  # at a worker
_DRAIN_SECONDS = 10.0
_LATE_SECONDS = 5.0  # after the end of a slice without an answer: a worker is slow
_SLOW = 0.5  # tokens a second, as a share of the fastest worker's: a worker is slow below this
_SUMS_SECONDS = 0.2  # while rows run, sums over workers are at most this old


class Pool:
    """A `WorkerPool` over a transport.

    Raises SpecbatchError for what the user can mend, and WorkerFailed for an error in a worker. Before `collect`
    raises, it has returned all rows that have finished.
    """

    def __init__(
        self,
        transport: Transport,
        num_workers: int,
        limits: PoolLimits | None = None,
        *,
        log: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: the transport's clock, in seconds."""
        self._transport = transport
        self._limits = limits or PoolLimits()
        self._clock = clock
        handlers = Handlers(self._open, self._take, self._give_back)
        self._manager = WorkerManager(transport, num_workers, self._limits, handlers, log, clock)
        self._rows = PoolRows()
        self._results: ResultFile | None = None  # the file that records deaths
        self._is_ending = False
        self._finished = Finished()
        self._past = Load()  # sums over workers that are gone
        self._sums, self._sums_at = Load(), float("-inf")
        self.models: ModelRecord = _RemoteModels(self._manager)

    def describe(self, config: Config) -> Description:
        """Start all workers. Waits until the first has described the job; all others must describe the same one."""
        return self._manager.describe(config)

    def load(self, settle: Callable[[int], int], on_progress: Callable[[str], None]) -> Sequence[str]:
        """Waits until one engine is built, and those of all workers that have described the job by then."""
        return self._manager.load(settle, on_progress)

    @property
    def has_room(self) -> bool:
        return self._rows.has_room

    @contextmanager
    def recording(self, results: ResultFile) -> Iterator[None]:
        self._results = results
        yield
        self._results = None

    def submit(self, row: RawRow, deaths: int = 0) -> None:
        self._rows.submit(row, deaths)

    @property
    def is_idle(self) -> bool:
        return not self._rows.num_rows and self._manager.error is None

    def collect(self, last: bool) -> Finished:
        """Hand out rows, wait for events for a moment, and return the rows that have finished."""
        self._manager.raise_failure()
        if last:
            self._find_slow()
        for worker in self._manager.workers.values():
            if worker.holding is not None and len(worker.calls) < _MAX_EXCHANGES:
                self._exchange(worker, last)
        self._manager.advance()
        return self._taken() if self._manager.error is None else self.drain()

    def stop_waiting(self) -> None:
        """Workers answer at the end of a slice; `drain` waits for a bounded time."""

    def drain(self) -> Finished:
        """Wait for the running slices, and return the rows that have finished."""
        self._is_ending = True
        running = {
            worker.id for worker in self._manager.workers.values() if worker.holding is not None and worker.calls
        }
        end = self._clock() + _DRAIN_SECONDS
        while running and not self._manager.is_cut_off and (left := end - self._clock()) > 0:
            running -= {event.worker for event in self._manager.handle_events(left)}
        return self._taken()

    @property
    def stats(self) -> EngineStats:
        return self._sum().stats

    def state(self) -> PoolState:
        now = self._clock()
        lines = [member.line(now) for member in self._manager.members]
        return PoolState(self._sum(), sum(line.state == "running" for line in lines), lines)

    def close(self) -> None:
        self._transport.close()

    def _exchange(self, worker: PoolWorker, last: bool) -> None:
        holding = worker.holding
        assert holding is not None
        rows = self._rows.hand_out(holding, last)
        while holding.num_rows and len(worker.calls) < _MAX_EXCHANGES:
            self._manager.call(worker, "exchange", rows, holding.take_drop(), self._limits.slice_seconds)
            rows = []

    def _find_slow(self) -> None:
        now, speeds = self._clock(), dict[PoolWorker, float]()
        for worker in self._manager.workers.values():
            if worker.holding is not None:
                # Not rows: a worker whose rows are long finishes few of them.
                tokens = worker.load.stats.prefill_tokens + worker.load.stats.generated_tokens
                seconds = now - worker.member.ready_at
                speeds[worker] = tokens / seconds if seconds else 0.0
        for worker, speed in speeds.items():
            assert worker.holding is not None
            is_late = bool(worker.calls) and now - worker.began > self._limits.slice_seconds + _LATE_SECONDS
            worker.holding.is_slow = is_late or speed < _SLOW * max(speeds.values())

    def _open(self, worker: PoolWorker) -> None:
        assert worker.description is not None
        batch = worker.description.config.engine.rows_at_once
        worker.holding = self._rows.open(_CREDIT_BATCHES * batch)

    def _take(self, worker: PoolWorker, answer: Slice) -> None:
        holding = worker.holding
        assert holding is not None
        holding.started = answer.started
        totals = answer.finished.totals
        first, again = self._rows.finish(holding, answer.finished.rows)
        for row in again:
            totals.add(json.loads(row.line), times=-1)
        worker.member.rows += len(first)
        self._rows.widen(holding, _CREDIT_SLICES * len(answer.finished.rows))
        self._finished.rows += first
        self._finished.totals.merge(totals)

    def _give_back(self, worker: PoolWorker, reason: str, blame: bool) -> None:
        assert worker.holding is not None
        worker.load.running, worker.load.waiting, worker.load.num_unprepared = [], [], 0
        self._past = merged([self._past, worker.load])
        # A signal that ends the job can end its workers, too.
        blamed = self._rows.blame(worker.holding) if blame and not self._is_ending else []
        if self._results is not None:
            self._results.add_deaths({row.index: row.digest() for row in blamed}, reason)
        cause = self._rows.close(worker.holding)
        if cause is not None:
            row, deaths = cause
            self._finished.left_out.append((row, RowDeaths(deaths, row.digest(), reason)))

    def _taken(self) -> Finished:
        taken, self._finished = self._finished, Finished()
        return taken

    def _sum(self) -> Load:
        if self.is_idle or self._clock() >= self._sums_at + _SUMS_SECONDS:
            self._sums = merged([self._past, *(worker.load for worker in self._manager.workers.values())])
            self._sums_at = self._clock()
        return self._sums


class _RemoteModels:
    """The models' files as the first worker sees them."""

    def __init__(self, manager: WorkerManager) -> None:
        self._manager = manager

    def record(self) -> dict[str, Any]:
        return dict(self._manager.models)

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        changed: list[str] = self._manager.ask("model_differences", recorded)
        return changed
