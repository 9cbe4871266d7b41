"""Progress of a job on stderr: a live line on a terminal, a plain line every few seconds elsewhere; a closing table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column, Table

from specbatch.pipeline.eta import Forecast, Work

_LIVE_SECONDS = 0.2
_PLAIN_SECONDS = 5.0
_FORECAST_SECONDS = 1.0
_BAR_WIDTH, _PERCENT_WIDTH = 16, 4


@dataclass(slots=True)
class Snapshot:
    """What progress shows."""

    done: int  # rows, earlier sessions included
    failed: int
    total: int | None  # None: unknown
    acceptance_length: float | None
    running: int
    waiting: int
    work: Work


class JobProgress:
    """Shows snapshots, at most a few a second. Clock and display start with the first one, when the model is loaded."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._forecast = Forecast()
        self._forecast_at: float | None = None
        self._shown_at = 0.0
        self._live: Progress | None = None

    def due(self) -> bool:
        """Whether to make a snapshot; that costs more than asking."""
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
            self._live.update(self._task, completed=now.done, total=now.total, description=_fit(self._parts(now), room))
        elif seconds >= self._shown_at + _PLAIN_SECONDS:
            percent = [f"{now.done / now.total:.0%}"] if now.total else []
            self._console.print(" · ".join(percent + self._parts(now)), markup=False, soft_wrap=True)
        else:
            return
        self._shown_at = seconds

    def stop(self) -> None:
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
            self._live = Progress(*columns, console=self._console, transient=True)
            self._task = self._live.add_task("", total=None)
            self._live.start()

    def _parts(self, now: Snapshot) -> list[str]:
        """What there is to say, the most important first."""
        assert self._forecast_at is not None
        parts = []
        if now.total is not None:
            left = self._forecast.seconds_left
            passed = self._clock() - self._forecast_at
            parts.append(f"ETA {'-:--' if left is None else duration(max(left - passed, 0), digits=0)}")
        parts.append(f"{now.done:,}/{now.total:,} rows" if now.total is not None else f"{now.done:,} rows")
        if (speed := self._forecast.tokens_per_second) is not None:
            parts.append(f"{speed:,.1f} tok/s")
        if now.failed:
            parts.append(f"{now.failed:,} failed")
        if now.acceptance_length is not None:
            parts.append(f"acceptance length {now.acceptance_length:.2f}")
        parts.append(f"{now.running} running, {now.waiting} waiting")
        return parts


def _fit(parts: list[str], width: int) -> str:
    """The first parts, as many as there is room for. A line that wraps would make the display jump."""
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


def closing_table(report: dict[str, Any]) -> Table:
    """The main figures of stats.json for the reader at the terminal."""
    rows, session = report["rows"], report["session"]
    seconds, speculation = session["seconds"], report["speculation"]
    table = Table(title=_warning(report), show_header=False, box=None, pad_edge=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    done = f"{rows['ok']:,} ok, {rows['failed']:,} failed"
    table.add_row("rows", done + (f" ({session['resumed_rows']:,} from before)" if session["resumed_rows"] else ""))
    table.add_row("tokens", f"{report['tokens']['prompt']:,} prompt, {report['tokens']['completion']:,} completion")
    split = ", ".join(f"{name} {duration(seconds[name])}" for name in ("load", "prefill", "decode", "io"))
    table.add_row("time", f"{duration(seconds['total'])} ({split})")
    if session["output_tokens_per_second"]:
        table.add_row("speed", f"{session['output_tokens_per_second']:,.1f} output tok/s")
    if speculation["acceptance_length"] is not None:
        rate = speculation["acceptance_rate"]
        shown = f"{speculation['acceptance_length']:.2f} tokens per round"
        table.add_row("acceptance", shown + (f", {rate:.0%} of drafts kept" if rate is not None else ""))
    if session["cache_hit_rate"]:
        table.add_row("prefix cache", f"{session['cache_hit_rate']:.0%} of prompt tokens")
    if session["preemptions"]:
        table.add_row("preemptions", f"{session['preemptions']:,}")
    if session["memory_shortages"]:
        table.add_row("memory", f"ran out {session['memory_shortages']:,} times: batches were made smaller")
    table.add_row("output", escape(report["output"]))
    return table


def _warning(report: dict[str, Any]) -> str | None:
    """The title of the closing table where the texts are no answers."""
    whys = ["random weights"] if report["random_weights"] else []
    if report["simulated"]:
        length = report["config"]["speculation"]["simulate_acceptance"]
        whys.insert(0, f"SIMULATED acceptance of {length:g} tokens per round")
    return f"{', '.join(whys)}: the texts are no answers" if whys else None
