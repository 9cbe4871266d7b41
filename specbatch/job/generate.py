"""The loop of a file job: read rows, run them, write results, with a bounded number of rows in flight."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Literal

from specbatch.errors import InputError, RowError, TooManyFailed
from specbatch.job.crash_retry import MAX_DEATHS, died, refusal
from specbatch.job.eta import Work
from specbatch.job.failures import FailureWatch
from specbatch.job.plan import RowPlan
from specbatch.job.pool import WorkerPool
from specbatch.job.progress import JobProgress, Snapshot
from specbatch.job.warnings import Remarks, low_acceptance_warning
from specbatch.results.finished import Finished
from specbatch.results.partial import RowDeaths
from specbatch.results.results import ResultFile
from specbatch.results.stats import Session
from specbatch.rows.sources import RawRow, Source
from specbatch.signals import INTERRUPTED, on_signals

_KEPT = "finished rows whose input line is the same are kept"


@dataclass
class JobControl:
    """A link between a job and another thread: what is finished, and what that thread wishes."""

    # finish: rows that have not started are left out of the results. interrupt: the job ends as after SIGINT.
    wish: Literal["run", "finish", "interrupt"] = "run"
    finished: int = 0  # rows with a result
    failed: int = 0  # rows of these whose result is an error


class _InputChanged(InputError):
    """The input is not the one that the job began with, or cannot be read to its end."""


@dataclass
class FileJob:
    """One run over a source. `load`: makes the pool ready; it is called when the first row needs it. `plan`: decides
    the order in which rows start; None: that of the source."""

    source: Source
    results: ResultFile
    pool: WorkerPool
    load: Callable[[], None]
    remarks: Remarks
    progress: JobProgress
    low_acceptance: str | None = None  # likely causes, if hardly any draft is accepted; None: no warning
    warn: Callable[[str], None] = lambda warning: None
    quarantine: Callable[[RawRow, RowError], Finished] | None = None  # makes error rows of those that are left out
    plan: Callable[[Iterator[RawRow]], RowPlan] | None = None
    failures: FailureWatch = field(default_factory=FailureWatch)
    control: JobControl = field(default_factory=JobControl)
    session: Session = field(default_factory=Session, init=False)
    interrupted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        # rows and lines of the input that were read; blank lines are lines, not rows
        self._rows_seen = self._lines_seen = 0
        self._rows_started = 0  # rows seen that were not finished by an earlier session
        self._exhausted = False
        self._held: RowPlan | None = None  # rows that were seen and have not started
        self._left_out: dict[int, RowDeaths] = {}
        self._too_many_failed: TooManyFailed | None = None

    def run(self) -> bool:
        """Run all rows that are not finished; False if a signal ended it early. What is finished is always written.

        Raises InputError if the input cannot be read to its end, or has changed. The input of the next session can then
        be another: rows that are the same there are kept. The same holds for WorkerFailed (rows were left out, see
        `crash_retry`) and for TooManyFailed.
        """
        try:
            self._count()
            self._run_rows(self._wanted(self._rows_to_run()))
            self.interrupted |= self.control.wish == "interrupt"
            if self._too_many_failed is not None:
                self.results.release_input()
                raise self._too_many_failed
            if not self.interrupted:
                if self._left_out:
                    self.results.release_input()  # so that these rows can be changed
                    raise refusal(self._left_out)
                self._check_input()
        except _InputChanged as exc:
            self.results.release_input()
            raise InputError(exc.message, exc.hint) from exc
        return not self.interrupted

    def _run_rows(self, rows: Iterator[RawRow]) -> None:
        first = next(rows, None)
        if first is None:
            return
        began = time.perf_counter()
        self.load()
        loaded = time.perf_counter()
        with on_signals(self._on_signal), self.pool.recording(self.results):
            rows = itertools.chain([first], rows)
            self._held = None if self.plan is None else self.plan(rows)
            self._loop(self._wanted(self._held or rows))
        self.session.load_seconds = loaded - began
        self.session.run_seconds = time.perf_counter() - loaded
        self.session.engine = self.pool.stats
        self.session.workers = self.pool.state().workers

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first SIGINT or SIGTERM ends the loop after the current step; a second one ends the process at once."""
        if self.interrupted:
            os._exit(INTERRUPTED)
        self.interrupted = True
        self.pool.stop_waiting()

    def _unfinished_rows(self, source: Source) -> Iterator[RawRow]:
        try:
            for row in source.rows():
                self._rows_seen += 1
                self._lines_seen = row.index // source.stride + 1
                if not self.results.is_done(row):
                    yield row
        except InputError as exc:
            raise _InputChanged(exc.message, f"repair it, and run the same command again: {_KEPT}") from exc

    def _rows_to_run(self) -> Iterator[RawRow]:
        for row in self._unfinished_rows(self.source):
            deaths = self.results.deaths_of(row)
            if deaths is None or deaths.times < MAX_DEATHS:
                yield row
            else:
                self._leave_out(row, deaths)

    def _wanted(self, rows: Iterable[RawRow]) -> Iterator[RawRow]:
        """Yield the rows that may start. The others are read, too, so that finished rows after them are kept."""
        for row in rows:
            if self.control.wish != "finish":
                yield row

    def _check_input(self) -> None:
        """Check that the rows that were read are those of the input as the statistics identify it."""
        source = self.source
        if source.reopen is None or not source.touched():
            return
        try:
            now = source.reopen()
            same = now.identity == source.identity and next(self._unfinished_rows(now), None) is None
        except (InputError, OSError):  # removed or damaged meanwhile
            same = False
        if not same:
            raise _InputChanged(
                f"the input {source.name} changed while the job was running", f"run the same command again: {_KEPT}"
            )

    def _loop(self, rows: Iterator[RawRow]) -> None:
        pool = self.pool
        while not self._ends_early:
            began = time.perf_counter()
            while not self._exhausted and not self._ends_early and pool.has_room:
                raw = next(rows, None)
                if raw is None:
                    self._exhausted = True
                else:
                    self._rows_started += 1
                    deaths = self.results.deaths_of(raw)
                    if deaths is None:  # the others start at the end
                        self.failures.start(raw.index)
                    pool.submit(raw, deaths.times if deaths is not None else 0)
                self._show_progress()
            self.session.io_seconds += time.perf_counter() - began
            if self._ends_early or (self._exhausted and pool.is_idle):
                break
            finished = pool.collect(self._exhausted)
            began = time.perf_counter()
            self._keep(finished)
            ended = self._exhausted and pool.is_idle
            self._too_many_failed = self.failures.verdict(self.results.totals, self.source.total, ended=ended)
            if finished.rows and (warning := low_acceptance_warning(pool.stats.speculation, self.low_acceptance)):
                self.warn(warning)
                self.low_acceptance = None  # once is enough
            self._show_progress()
            self.session.io_seconds += time.perf_counter() - began
        if self._ends_early:
            self._keep(pool.drain())

    @property
    def _ends_early(self) -> bool:
        return self.interrupted or self.control.wish == "interrupt" or self._too_many_failed is not None

    def _keep(self, finished: Finished) -> None:
        self.results.append(finished)
        self._count()
        self.failures.add(finished)
        self.session.rows += len(finished.rows)
        self.session.completion_tokens += finished.totals.completion_tokens
        for row in finished.rows:
            self.remarks.add(row.index, row.remark)
        for raw, deaths in finished.left_out:
            self._leave_out(raw, deaths)

    def _count(self) -> None:
        self.control.finished, self.control.failed = self.results.totals.rows, self.results.totals.failed

    def _leave_out(self, row: RawRow, deaths: RowDeaths) -> None:
        if self.quarantine is None:
            self._left_out[row.index] = deaths
        else:
            self._keep(self.quarantine(row, died(deaths)))

    def _show_progress(self) -> None:
        if not self.progress.due():
            return
        totals, state = self.results.totals, self.pool.state()
        load, stats = state.load, state.load.stats
        rows_in_flight = self._rows_started - self.session.rows
        total = self.source.total
        held = [] if self._held is None else self._held.limits()
        rows_to_come: float | None = None  # rows that no engine has yet
        if self._exhausted:
            total, rows_to_come = totals.rows + rows_in_flight, load.num_unprepared
        elif total is not None:
            rows = total * self._rows_seen / max(self._lines_seen, 1)
            rows_to_come = max(rows - totals.rows - rows_in_flight, 0) + load.num_unprepared
        unread = None
        if rows_to_come is not None:
            requests = rows_to_come * load.num_submitted / max(self._rows_started - load.num_unprepared, 1)
            unread = max(requests - len(held), 0)
        work = Work(
            tokens=stats.generated_tokens,
            prefill_seconds=stats.prefill_seconds / max(state.num_workers, 1),
            admitted=load.num_admitted,
            finished=totals.lengths,
            running=load.running,
            waiting=[*load.waiting, *held],
            unread=unread,
        )
        self.progress.show(
            Snapshot(
                done=totals.rows,
                failed=totals.failed,
                total=total,
                acceptance_length=stats.speculation.acceptance_length,
                running=len(load.running),
                waiting=len(load.waiting),
                work=work,
                workers=state.workers,
            )
        )
