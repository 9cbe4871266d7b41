"""Interface of the workers that run a job's rows, in this process or elsewhere. The file job is the same for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from specbatch.config import Config
from specbatch.counts import EngineStats
from specbatch.files.paths import running_path
from specbatch.job.crash_retry import HeldRows
from specbatch.job.runner import Load, RowRunner
from specbatch.job.worker import Description, Worker
from specbatch.results.crashes import RunningRows
from specbatch.results.fingerprint import ModelRecord
from specbatch.results.finished import Finished
from specbatch.results.results import ResultFile
from specbatch.results.stats import WorkerLine
from specbatch.rows.sources import RawRow


@dataclass(slots=True)
class PoolState:
    """Sums over workers."""

    load: Load = field(default_factory=Load)
    num_workers: int = 1  # number of workers that run rows
    workers: Sequence[WorkerLine] = ()  # empty: the job's own process


class WorkerPool(Protocol):
    """Call describe first, then load, then the others. All raise SpecbatchError for what the user can mend."""

    models: ModelRecord  # record of the job's models; it is complete after `describe`

    def describe(self, config: Config) -> Description:
        """Describe the job."""
        ...

    def load(self, settle: Callable[[int], int], on_progress: Callable[[str], None]) -> Sequence[str]:
        """Build engines; returns notes. `settle`: the tokens of a row that memory allows -> those that the job does."""
        ...

    @property
    def has_room(self) -> bool:
        """Return whether `submit` should be called now."""
        ...

    def recording(self, results: ResultFile) -> AbstractContextManager[object]:
        """Return a block in which the rows that run when a process dies are recorded (`ResultFile.add_deaths`)."""
        ...

    def submit(self, row: RawRow, deaths: int = 0) -> None:
        """Add a row. `deaths`: the number of processes that died in earlier sessions while they ran this row; see
        `crash_retry`."""
        ...

    @property
    def is_idle(self) -> bool:
        """Return whether each row that was submitted has been returned."""
        ...

    def collect(self, last: bool) -> Finished:
        """Run for a moment, and return the rows that finished, each once. `last`: no more rows will be submitted."""
        ...

    def stop_waiting(self) -> None:
        """The job ends early: `collect` does not wait for rows that are not prepared. A handler of signals calls it."""
        ...

    def drain(self) -> Finished:
        """The rows that have finished, when a job ends early."""
        ...

    @property
    def stats(self) -> EngineStats:
        """Sums over the engines."""
        ...

    def state(self) -> PoolState: ...

    def close(self) -> None: ...


class LocalPool:
    """The worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._runner: RowRunner | None = None
        self._held = HeldRows()
        self._running: RunningRows | None = None

    def describe(self, config: Config) -> Description:
        described = self._worker.describe(config)
        self.models: ModelRecord = self._worker.models
        return described

    def load(self, settle: Callable[[int], int], on_progress: Callable[[str], None]) -> Sequence[str]:
        loaded = self._worker.load(on_progress)
        self._worker.limit_length(settle(loaded.longest_row))
        self._runner = self._worker.runner
        return loaded.notes

    @property
    def has_room(self) -> bool:
        return self._loaded.has_room

    @contextmanager
    def recording(self, results: ResultFile) -> Iterator[None]:
        with RunningRows(running_path(results.output), results.job_id) as self._running:
            yield
        self._running = None

    def submit(self, row: RawRow, deaths: int = 0) -> None:
        if deaths:
            self._held.add(row, deaths)
        else:
            self._start(row)

    @property
    def is_idle(self) -> bool:
        return self._loaded.is_empty and not self._held

    def collect(self, last: bool) -> Finished:
        if last and self._loaded.is_empty:
            for row in self._held.next_group():
                self._start(row)
        if self._running is not None:
            self._running.clear()
        self._loaded.start_rows()
        if self._loaded.is_busy:
            self._loaded.step()
        return self.drain()

    def stop_waiting(self) -> None:
        if self._runner is not None:
            self._runner.stop_waiting()

    def drain(self) -> Finished:
        finished = self._loaded.take()
        if self._running is not None:
            for row in finished.rows:
                self._running.finish(row.index)
        return finished

    def _start(self, row: RawRow) -> None:
        if self._running is not None:
            self._running.start(row.index, row.digest())
        self._loaded.add(row)

    @property
    def stats(self) -> EngineStats:
        return self._runner.stats if self._runner is not None else EngineStats()

    def state(self) -> PoolState:
        return PoolState(self._loaded.load())

    def close(self) -> None:
        self._worker.close()

    @property
    def _loaded(self) -> RowRunner:
        assert self._runner is not None, "load() comes first"
        return self._runner
