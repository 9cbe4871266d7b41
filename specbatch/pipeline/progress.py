"""Progress of a job on stderr: a live line on a terminal, a plain line every few seconds elsewhere; a closing table."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

_LIVE_SECONDS = 0.2
_PLAIN_SECONDS = 5.0


@dataclass(slots=True)
class Snapshot:
    """What progress shows."""

    done: int  # rows, earlier sessions included
    session_done: int  # rows of this session
    failed: int
    output_tokens: int  # of this session
    acceptance_length: float | None
    running: int
    waiting: int


class JobProgress:
    """Shows snapshots, at most a few a second. `total` is None where the number of rows is unknown.

    Clock and display start with the first `due`, behind the loading of the model.
    """

    def __init__(self, total: int | None, console: Console) -> None:
        self._console = console
        self._total = total
        self._began: float | None = None
        self._next = 0.0
        self._live: Progress | None = None
        self._interval = _LIVE_SECONDS if console.is_terminal else _PLAIN_SECONDS

    def due(self) -> bool:
        """Whether a snapshot would be shown now; making one costs more than asking."""
        if self._began is None:
            self._start()
        return time.monotonic() >= self._next

    def _start(self) -> None:
        self._began = time.monotonic()
        if self._console.is_terminal:
            # Cut on a narrow terminal: a line that wraps would make the display jump.
            text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
            self._live = Progress(BarColumn(bar_width=24), text, console=self._console, transient=True)
            self._task = self._live.add_task("", total=self._total)
            self._live.start()
        else:
            self._next = self._began + _PLAIN_SECONDS

    def show(self, now: Snapshot) -> None:
        self._next = time.monotonic() + self._interval
        if self._live is not None:
            self._live.update(self._task, completed=now.done, description=self._line(now))
        else:
            self._console.print(self._line(now), soft_wrap=True)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, now: Snapshot) -> str:
        began = self._began if self._began is not None else time.monotonic()
        seconds = max(time.monotonic() - began, 1e-9)
        parts = [f"{now.done:,}/{self._total:,} rows" if self._total is not None else f"{now.done:,} rows"]
        if now.failed:
            parts.append(f"{now.failed:,} failed")
        parts.append(f"{now.output_tokens / seconds:,.1f} tok/s")
        if now.acceptance_length is not None:
            parts.append(f"acceptance length {now.acceptance_length:.2f}")
        parts.append(f"{now.running} running, {now.waiting} waiting")
        if self._total is not None and now.session_done:
            left = max(self._total - now.done, 0) * seconds / now.session_done
            parts.append(f"ETA {duration(left)}")
        return " · ".join(parts)


def duration(seconds: float) -> str:
    """1:02:03, 2:03 or 4.5s."""
    if seconds < 60:
        return f"{seconds:.1f}s"
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
    table.add_row("output", escape(report["output"]))
    return table


def _warning(report: dict[str, Any]) -> str | None:
    """The title of the closing table where the texts are no answers."""
    whys = ["random weights"] if report["random_weights"] else []
    if report["simulated"]:
        length = report["config"]["speculation"]["simulate_acceptance"]
        whys.insert(0, f"SIMULATED acceptance of {length:g} tokens per round")
    return f"{', '.join(whys)}: the texts are no answers" if whys else None
