"""Rows that ran when a process died. One of them can be the cause, so they run apart from the others, at the end.

After one death they run in small groups: of N rows, the square root of N at a time, so that the next death leaves few
rows to blame. After two deaths a row runs alone. After three, the last one alone, it is the cause: it does not run
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isqrt

from specbatch.errors import RowError, WorkerFailed
from specbatch.files.local import disk_errors
from specbatch.files.paths import running_path
from specbatch.results.crashes import last_crash
from specbatch.results.partial import RowDeaths
from specbatch.results.results import ResultFile
from specbatch.rows.sources import RawRow

ALONE_DEATHS = 2  # a row with as many runs alone
MAX_DEATHS = 3  # a row with as many does not run
DIED = "worker_died"  # the type of its error
_SHOWN_ROWS = 10


class HeldRows:
    """Rows that were submitted, and run at the end."""

    def __init__(self) -> None:
        self._together: deque[RawRow] = deque()
        self._alone: deque[RawRow] = deque()
        self._group = 0  # rows of the first deque that run at the same time

    def __bool__(self) -> bool:
        return bool(self._together or self._alone)

    def add(self, row: RawRow, deaths: int) -> None:
        (self._together if deaths < ALONE_DEATHS else self._alone).append(row)

    def next_group(self) -> list[RawRow]:
        """Rows to run now, while no other row runs. All rows have been added."""
        if not self._together:
            return [self._alone.popleft()] if self._alone else []
        self._group = self._group or isqrt(len(self._together))
        return [self._together.popleft() for _ in range(min(self._group, len(self._together)))]


def count_crash(results: ResultFile) -> list[str]:
    """Count a death for the rows that ran when the last process of this job crashed, if it did; returns notes."""
    path = running_path(results.output)
    crash = last_crash(path, results.job_id)
    if crash is not None:
        results.add_deaths(crash.rows, crash.cause)
    with disk_errors(path):  # else the same crash would be counted again
        path.unlink(missing_ok=True)
    if crash is None or not crash.rows:
        return []
    rows = "1 row" if len(crash.rows) == 1 else f"{len(crash.rows):,} rows"
    return [f"the last run crashed ({crash.cause}) while it ran {rows}; rows that crash twice run alone at the end"]


def died(deaths: RowDeaths) -> RowError:
    """The error of a row that is left out."""
    times = f"{deaths.times} times while it ran this row, the last time with no other row"
    return RowError(DIED, f"the process died {times}: {deaths.cause}")


def refusal(rows: Mapping[int, RowDeaths]) -> WorkerFailed:
    """The error of a job with rows that are left out, by index."""
    names = ", ".join(map(str, sorted(rows)[:_SHOWN_ROWS])) + (", ..." if len(rows) > _SHOWN_ROWS else "")
    first = next(iter(rows.values()))
    what = f"the row with index {names} ends" if len(rows) == 1 else f"{len(rows):,} rows end"
    which = "" if len(rows) == 1 else f", those with index {names}"
    return WorkerFailed(
        f"{what} the process each time, also alone ({first.cause}){which}; all other rows are finished and kept",
        "change these rows, or make error rows of them with --quarantine; then run the same command again",
    )
