"""Text that a command prints on stderr: notes, and a table at its end."""

from __future__ import annotations

import contextlib
import io
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specbatch.counts import DEVICE
from specbatch.errors import without_secrets
from specbatch.job.progress import duration

if TYPE_CHECKING:
    from rich.progress import TaskID

_QUIET_SECONDS = 2.0  # seconds of a download before its progress is shown
_MIN_CUT = 0.05  # tokens per round that are worth an explanation


def print_notes(notes: Iterable[str], console: Console) -> None:
    """Print each note. On a terminal, those that begin with `warning: ` are yellow, and lines end between words. In a
    log or a pipe, a note is one line."""
    for note in notes:
        style = "bold yellow" if note.startswith("warning: ") else None
        text = without_secrets(note)
        if console.is_terminal:
            text = textwrap.fill(text, console.width, break_long_words=False, break_on_hyphens=False)
        console.print(text, style=style, markup=False, soft_wrap=True)


def print_table(table: Table, console: Console) -> None:
    """Print a table. In a log or a pipe, lines have no trailing blanks and are not folded."""
    if console.is_terminal:
        console.print(table)
        return
    console.print(table_text(table), end="", markup=False, soft_wrap=True)


def table_text(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=10_000).print(table)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


@contextlib.contextmanager
def download_bar(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    """Yields the callback (what, bytes done, bytes in total) of a download: a bar on a terminal, else one line for each
    file. Without a call nothing is printed."""
    from rich.filesize import decimal
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), DownloadColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    tasks: dict[str, TaskID] = {}

    def on_progress(what: str, done: int, total: int | None) -> None:
        if what not in tasks:
            if not console.is_terminal:
                size = "" if total is None else f" ({decimal(total)})"
                console.print(f"{what}{size}", markup=False, soft_wrap=True)
            tasks[what] = bar.add_task(what, total=total)
            bar.start()
        bar.update(tasks[what], completed=done)

    try:
        yield on_progress
    finally:
        bar.stop()


@contextlib.contextmanager
def input_bar(name: str, console: Console) -> Iterator[Callable[[int, int | None], None]]:
    """Yields the callback (bytes done, bytes in total) of the download of an input. A download that takes less than
    two seconds prints nothing."""
    began = time.monotonic()
    what = f"downloading {without_secrets(name)}"
    with download_bar(console) as show:

        def on_bytes(done: int, total: int | None) -> None:
            if time.monotonic() - began > _QUIET_SECONDS:
                show(what, done, total)

        yield on_bytes


def acceptance_text(speculation: Mapping[str, Any], draft_rate_by_position: Sequence[float]) -> str | None:
    """The acceptance length, and what explains it if the share of accepted drafts does not. None: no rounds.
    `speculation`: as in stats.json; the rates are of the last session."""
    length, rate = speculation["acceptance_length"], speculation["acceptance_rate"]
    if length is None:
        return None
    text = f"{length:.2f} tokens per round"
    if rate is None:
        return f"{text}, no drafts"
    histogram = speculation["accept_histogram"]
    uncut = 1 + sum(accepted * rounds for accepted, rounds in enumerate(histogram)) / sum(histogram)
    if uncut - length >= _MIN_CUT:  # a row that ends with an accepted draft has no bonus token after it
        text += f" ({uncut:.2f} without the ends of rows)"
    drafting = draft_rate_by_position[0] if draft_rate_by_position else 1.0
    if drafting < 0.995:
        text += f", drafts in {_percent(drafting)} of rounds"
    return f"{text}, {rate:.0%} of drafts accepted"


def answers_text(answers: Mapping[str, int]) -> str | None:
    """Describe the number of answers that were cut. Returns None if none was."""
    if not answers["cut"]:
        return None
    text = f"{answers['cut']:,} of {answers['total']:,} cut at max_tokens"
    if incomplete := answers["incomplete"]:
        text += f"; {incomplete:,} of these {'is' if incomplete == 1 else 'are'} incomplete JSON, regex or grammar"
    return text


def grammars_text(requests: Mapping[str, int]) -> str | None:
    """Describe the requests whose grammar the host follows. Return None if there is none."""
    on_host = {reason: count for reason, count in requests.items() if reason != DEVICE}
    if not on_host:
        return None
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in sorted(on_host.items(), key=lambda one: -one[1]))
    return f"{sum(on_host.values()):,} of {sum(requests.values()):,} were followed on the host, slower: {reasons}"


def _percent(share: float) -> str:
    return "less than 1%" if 0 < share < 0.005 else f"{share:.0%}"


def closing_table(report: dict[str, Any]) -> Table:
    """The main figures of stats.json, of a job or of merged shards."""
    rows, speculation = report["rows"], report["speculation"]
    session = report.get("session")  # None: each shard has its own
    table = Table(title=_warning(report), show_header=False, box=None, pad_edge=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")  # the path of the output is not cut
    done = f"{rows['ok']:,} ok, {rows['failed']:,} failed"
    resumed = session["resumed_rows"] if session else 0
    table.add_row("rows", done + (f" ({resumed:,} from before)" if resumed else ""))
    if cut := answers_text(report["answers"]):
        table.add_row("answers", cut)
    table.add_row("tokens", f"{report['tokens']['prompt']:,} prompt, {report['tokens']['completion']:,} completion")
    if session:
        seconds = session["seconds"]
        split = ", ".join(f"{name} {duration(seconds[name])}" for name in ("load", "prefill", "decode", "io"))
        table.add_row("time", f"{duration(seconds['total'])} ({split})")
    if session and session["output_tokens_per_second"]:
        table.add_row("speed", f"{session['output_tokens_per_second']:,.1f} output tok/s")
    draft_rates = session["draft_rate_by_position"] if session else ()
    if (shown := acceptance_text(speculation, draft_rates)) is not None:
        table.add_row("acceptance", shown)
    if session and session["cache_hit_rate"]:
        table.add_row("prefix cache", f"{session['cache_hit_rate']:.0%} of prompt tokens")
    if session and session["preemptions"]:
        table.add_row("preemptions", f"{session['preemptions']:,}")
    if session and session["memory_shortages"]:
        table.add_row("memory", f"ran out {session['memory_shortages']:,} times: batches were made smaller")
    if session and session["late_graph_seconds"] >= 1:
        took = duration(session["late_graph_seconds"])
        table.add_row("CUDA graphs", f"{session['late_graphs']:,} captured during the job, in {took}")
    if session and (text := grammars_text(session["grammars"])) is not None:
        table.add_row("grammars", text)
    table.add_row("output", escape(report["output"]))
    return table


def _warning(report: dict[str, Any]) -> str | None:
    """The title of the closing table if the texts are not answers."""
    reasons = ["random weights"] if report["random_weights"] else []
    if report["simulated"]:
        length = report["config"]["speculation"]["simulate_acceptance"]
        reasons.insert(0, f"SIMULATED acceptance of {length:g} tokens per round")
    return f"{', '.join(reasons)}: the texts are not answers" if reasons else None
