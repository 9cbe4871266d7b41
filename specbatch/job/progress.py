"""Progress of a job on stderr: a live line on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

from specbatch.job.eta import Forecast, Work
from specbatch.results.stats import WorkerLine

_LIVE_SECONDS = 0.2
PLAIN_SECONDS = 5.0
_FORECAST_SECONDS = 1.0
_BAR_WIDTH, _PERCENT_WIDTH = 16, 4
_MIN_WIDTH_FOR_WORKERS, _MAX_WORKER_LINES = 100, 8


@dataclass(slots=True)
class Snapshot:
    """The state of a job, to be shown."""

    done: int  # rows, earlier sessions included
    failed: int
    total: int | None  # None: unknown
    acceptance_length: float | None
    running: int
    waiting: int  # requests of all rows that are left and do not run
    work: Work
    workers: Sequence[WorkerLine] = ()  # state of each worker of a pool


class _Display(Progress):
    """The line of the job, and below it lines of workers."""

    below: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        for line in self.below:
            yield Text(line, style="dim", no_wrap=True, overflow="ellipsis")


class JobProgress:
    """Shows snapshots, a few a second at most. Clock and display start with the first one, when the model is loaded."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._forecast = Forecast()
        self._forecast_at: float | None = None
        self._shown_at = 0.0
        self._live: _Display | None = None

    def due(self) -> bool:
        """Return whether it is time for a snapshot, which costs more than this call."""
        if self._forecast_at is None:
            return True
        now = self._clock()
        return now >= self._forecast_at + _FORECAST_SECONDS or (
            self._live is not None and now >= self._shown_at + _LIVE_SECONDS
        )

    def show(self, now: Snapshot) -> None:
        seconds = self._clock()
        if self._forecast_at is None:
            self._start(seconds)
        if self._forecast_at is None or seconds >= self._forecast_at + _FORECAST_SECONDS:
            self._forecast.update(seconds, now.work)
            self._forecast_at = seconds
        if self._live is not None:
            room = self._console.width - _BAR_WIDTH - _PERCENT_WIDTH - 2
            if self._console.width >= _MIN_WIDTH_FOR_WORKERS:
                self._live.below = worker_lines(now.workers)
            self._live.update(self._task, completed=now.done, total=now.total, description=_fit(self._parts(now), room))
        elif seconds >= self._shown_at + PLAIN_SECONDS:
            percent = [f"{now.done / now.total:.0%}"] if now.total else []
            self._console.print(" · ".join(percent + self._parts(now)), markup=False, soft_wrap=True)
        else:
            return
        self._shown_at = seconds

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _start(self, seconds: float) -> None:
        self._shown_at = seconds
        if self._console.is_terminal:
            line = TextColumn(
                "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
            )
            columns = (BarColumn(bar_width=_BAR_WIDTH), TaskProgressColumn(), line)
            self._live = _Display(*columns, console=self._console, transient=True)
            self._task = self._live.add_task("", total=None)
            self._live.start()

    def _parts(self, now: Snapshot) -> list[str]:
        """The parts of the line, the most important first."""
        assert self._forecast_at is not None
        parts = []
        if now.total is not None:
            left = self._forecast.seconds_left
            passed = self._clock() - self._forecast_at
            parts.append(f"ETA {'-:--' if left is None else duration(max(left - passed, 0), digits=0)}")
        parts.append(f"{now.done:,}/{now.total:,} rows" if now.total is not None else f"{now.done:,} rows")
        if (speed := self._forecast.tokens_per_second) is not None:
            parts.append(f"{speed:,.1f} tok/s")
        if now.workers:
            running = sum(worker.state == "running" for worker in now.workers)
            parts.append(f"{running}/{len(now.workers)} workers")
        if now.failed:
            parts.append(f"{now.failed:,} failed")
        if now.acceptance_length is not None:
            parts.append(f"acceptance length {now.acceptance_length:.2f}")
        parts.append(f"{now.running} running, {now.waiting} waiting")
        return parts


def worker_lines(workers: Sequence[WorkerLine]) -> list[str]:
    """A line for each worker, those first that do not run. Of many workers only some are shown."""
    numbered = sorted(enumerate(workers, 1), key=lambda item: item[1].state == "running")
    width = max((len(worker.node) for worker in workers), default=0)
    lines = []
    for number, worker in numbered[:_MAX_WORKER_LINES]:
        parts = [f"worker {number:<3} {worker.node:<{width}}  {worker.state:<8} {worker.rows:>10,} rows"]
        if worker.seconds:
            parts.append(f"{worker.tokens / worker.seconds:,.1f} tok/s")
        parts.append(f"{worker.running} running")
        if worker.deaths:
            parts.append(f"{worker.deaths} deaths" if worker.deaths > 1 else "1 death")
        lines.append(" · ".join(parts))
    if len(workers) > _MAX_WORKER_LINES:
        lines.append(f"and {len(workers) - _MAX_WORKER_LINES} more workers")
    return lines


def _fit(parts: list[str], width: int) -> str:
    """The first parts that fit. A line that wraps would make the display jump."""
    line = parts[0]
    for part in parts[1:]:
        if cell_len(f"{line} · {part}") > width:
            break
        line = f"{line} · {part}"
    return line


def duration(seconds: float, digits: int = 1) -> str:
    """1:02:03, 2:03 or 4.5s."""
    if round(seconds, digits) < 60:
        return f"{seconds:.{digits}f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
