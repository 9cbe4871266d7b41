"""A job over a simulated pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbatch.config import Config
from specbatch.job.crash_retry import died as died_each_time
from specbatch.job.crash_retry import refusal
from specbatch.job.runner import failed_row
from specbatch.results.finished import Finished
from specbatch.results.partial import RowDeaths
from specbatch.rows.parser import RowParser
from specbatch.rows.sources import RawRow
from specbatch.scaleout.pool import Pool
from specbatch.scaleout.worker_manager import PoolLimits
from tests.scaleout.simulation import Simulation, batch_config, raw_row


@dataclass
class Job:
    """Runs rows through a pool, as the file job does. `finished`: what came back, also if the job failed.
    `quarantine`: rows that kill each worker become error rows."""

    simulation: Simulation
    num_workers: int = 2
    limits: PoolLimits = field(default_factory=PoolLimits)
    quarantine: bool = False
    log: list[str] = field(default_factory=list)
    finished: Finished = field(default_factory=Finished)
    left_out: dict[int, RowDeaths] = field(default_factory=dict)
    progress: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = Pool(
            self.simulation,
            self.num_workers,
            self.limits,
            log=self.log.append,
            clock=self.simulation.clock,
        )

    def load(self, settle: Callable[[int], int] = lambda here: here) -> Sequence[str]:
        self.pool.describe(batch_config(self.simulation.batch))
        return self.pool.load(settle, self.progress.append)

    def run(self, num_rows: int, after_each: Callable[[], None] = lambda: None) -> Job:
        """All rows, after `load`."""
        rows = iter([raw_row(index) for index in range(num_rows)])
        exhausted = False
        while True:
            while not exhausted and self.pool.has_room:
                row = next(rows, None)
                exhausted = row is None
                if row is not None:
                    self.pool.submit(row)
            if exhausted and self.pool.is_idle:
                if self.left_out:
                    raise refusal(self.left_out)
                return self
            self.keep(self.pool.collect(exhausted))
            after_each()

    def keep(self, finished: Finished) -> None:
        self.finished.rows += finished.rows
        self.finished.totals.merge(finished.totals)
        for row, deaths in finished.left_out:
            if self.quarantine:
                self.keep(failed_row(row, died_each_time(deaths), RowParser(Config().sampling, Config().data)))
            else:
                self.left_out[row.index] = deaths

    @property
    def indices(self) -> list[int]:
        return sorted(row.index for row in self.finished.rows)


def loaded_job(simulation: Simulation, num_workers: int = 2, **options: object) -> Job:
    job = Job(simulation, num_workers, **options)  # type: ignore[arg-type]
    job.load()
    return job


def exchanges(simulation: Simulation) -> list[tuple[int, str, tuple[Any, ...]]]:
    return [call for call in simulation.calls if call[1] == "exchange"]


def indices(rows: list[RawRow]) -> list[int]:
    return [row.index for row in rows]
