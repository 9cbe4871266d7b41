"""`specbatch report`: reads a result file once, and writes the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from specbatch.errors import InputError
from specbatch.files.local import write_whole
from specbatch.files.paths import Written, check_can_write, check_written, output_file, stats_path_of, unless
from specbatch.job.terminal import print_notes
from specbatch.report.collect import summarize
from specbatch.report.job_input import Formats, JobInput
from specbatch.report.linked_runs import eval_rows, tune_facts
from specbatch.report.page import MARK, page
from specbatch.report.rows import Results

T = TypeVar("T")


@dataclass(frozen=True)
class ReportOptions:
    """The command line."""

    results: Path
    output: Path | None = None
    tune: Path | None = None
    evaluation: Path | None = None
    input: Path | None = None  # None: it is looked for


def write_page(options: ReportOptions, console: Console) -> Path:
    """Write the page and return its path. Raises InputError."""
    results = Results.open(options.results)
    output = output_file(options.output or _default_output(options.results), formats="")
    files = [Written("the page", output, unless(_is_page))]
    reads = {"the results": results.path, "the statistics": stats_path_of(results.path)}
    if options.input is not None:
        reads["the input"] = options.input
    check_written(files, reads)
    check_can_write(files)
    tuned = _linked(options.tune, tune_facts)
    evaluated = _linked(options.evaluation, eval_rows)
    asked = JobInput.find(results, options.input)
    wanted = results.job.get("sampling.response_format")
    summary = summarize(results.rows(), Formats(wanted) if asked is None else asked.formats(wanted))
    if not summary.totals.rows and results.damaged:
        raise InputError(f"{results.path} has no result of specbatch", "name the output of `specbatch generate`")
    prompts = None if asked is None else asked.prompts(summary.shown_indices)
    try:
        text = page(results, summary, prompts, tuned, evaluated)
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as exc:
        if results.stats is None:
            raise
        raise InputError(
            f"{stats_path_of(results.path)} is damaged, or of another version of specbatch: {exc!r}",
            "move it away: the page can be made without statistics",
        ) from exc
    write_whole(output, text.encode("utf-8", "backslashreplace"))
    print_notes([f"wrote {output}: {summary.totals.rows:,} rows"], console)
    return output


def _linked(path: Path | None, read: Callable[[Path], T]) -> T | None:
    try:
        return None if path is None else read(path)
    except (LookupError, TypeError, AttributeError, ValueError) as exc:
        raise InputError(f"{path} is a report of another version of specbatch: {exc!r}") from exc


def _default_output(results: Path) -> Path:
    """data.results.jsonl.gz -> data.results.report.html"""
    output = results.with_name(results.name.removesuffix(".partial"))
    stem = stats_path_of(output).name.removesuffix(".stats.json")
    return results.with_name(f"{stem}.report.html")


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return MARK.encode() in file.read(1024)
