"""What the progress of a job looks like: on terminals of several widths, and in a log."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from specbatch.job.eta import Work
from specbatch.job.progress import JobProgress, Snapshot, duration, worker_lines
from specbatch.results.stats import WorkerLine


def snapshot(tokens: int, total: int | None = 1_200_000) -> Snapshot:
    work = Work(tokens, 0.0, 256, {(200, True): 34_567}, [(100, 256)] * 256, [256] * 512, total and 1_164_665.0)
    return Snapshot(34_567, 12, total, 2.345, 256, 512, work)


def shown(width: int, *, terminal: bool, total: int | None = 1_200_000) -> str:
    """The last line after a minute at 12,345 tok/s."""
    file = io.StringIO()
    now = 0.0
    console = Console(file=file, force_terminal=terminal, width=width, color_system="standard", no_color=False)
    progress = JobProgress(console, lambda: now)
    for second in range(61):
        now = float(second)
        if progress.due():
            progress.show(snapshot(12_345 * second, total))
    progress.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    return [line for line in re.split(r"[\r\n]+", plain) if line.strip()][-1].rstrip()


@pytest.mark.parametrize(
    ("width", "ending"),
    [
        (60, "/1,200,000 rows"),
        (80, "/1,200,000 rows · 12,345.0 tok/s"),
        (100, " · 12,345.0 tok/s · 12 failed"),
        (120, " · 12 failed · acceptance length 2.35"),
        (150, " · acceptance length 2.35 · 256 running, 512 waiting"),
    ],
)
def test_a_narrow_terminal_drops_what_matters_least(width: int, ending: str) -> None:
    line = shown(width, terminal=True)
    assert re.match(r"^[╸╺━]+ +3% ETA \d:\d\d:\d\d · 34,567/1,200,000 rows", line), line
    assert line.endswith(ending), line
    assert cell_len(line) <= width


def test_a_log_has_all_of_it() -> None:
    line = shown(40, terminal=False)
    assert re.fullmatch(
        r"3% · ETA \d:\d\d:\d\d · 34,567/1,200,000 rows · 12,345\.0 tok/s · 12 failed · acceptance length 2\.35 · "
        "256 running, 512 waiting",
        line,
    ), line


@pytest.mark.parametrize("terminal", [False, True])
def test_an_unknown_number_of_rows_has_no_eta(terminal: bool) -> None:
    line = shown(80, terminal=terminal, total=None)
    assert "34,567 rows · 12,345.0 tok/s" in line
    assert "ETA" not in line
    assert "%" not in line


WORKERS = [
    *(WorkerLine("node-a", "cuda:0", "running", 1000 + i, 256, 90_000, i % 2, 30.0) for i in range(9)),
    WorkerLine("node-b", "", "starting", 0, 0, 0, 2, 0.0),
]


def test_workers_have_lines_on_a_wide_terminal_only() -> None:
    def lines(width: int, *, terminal: bool) -> str:
        file = io.StringIO()
        now = 0.0
        progress = JobProgress(Console(file=file, force_terminal=terminal, width=width), lambda: now)
        for second in range(0, 61, 6):
            now = float(second)
            progress.show(replace(snapshot(1000 * second), workers=WORKERS))
        progress.close()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())

    assert "worker 1 " not in lines(80, terminal=True)
    assert "worker 1 " not in lines(120, terminal=False)
    assert "9/10 workers" in lines(120, terminal=False)
    wide = lines(120, terminal=True)
    assert "worker 1   node-a  running       1,000 rows · 3,000.0 tok/s · 256 running\n" in wide.replace("\r", "\n")
    assert "and 2 more workers" in wide


def test_workers_that_do_not_run_come_first() -> None:
    first, second, *_ = worker_lines(WORKERS)
    assert first == "worker 10  node-b  starting          0 rows · 0 running · 2 deaths"
    assert second.startswith("worker 1 ")
    assert worker_lines(WORKERS)[2].endswith("1 death")


def test_durations() -> None:
    shown = [duration(s) for s in (0.04, 59.94, 59.96, 61, 3599.6, 3661)]
    assert shown == ["0.0s", "59.9s", "1:00", "1:01", "1:00:00", "1:01:01"]
    assert [duration(s, digits=0) for s in (0.4, 59.4, 59.6)] == ["0s", "59s", "1:00"]
