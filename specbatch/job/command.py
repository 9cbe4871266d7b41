"""`specbatch generate`: everything around the loop, in the order that finds mistakes before a model is loaded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from specbatch.config import Config
from specbatch.config_load import config_to_dict
from specbatch.errors import InputError
from specbatch.files.paths import ELSEWHERE, check_input_name, files_read, partial_path, stats_path_of
from specbatch.files.remote import RemoteOutput
from specbatch.files.template_files import with_template_texts
from specbatch.files.urls import url_of
from specbatch.job.crash_retry import count_crash
from specbatch.job.failures import FailureWatch, MaxFailed
from specbatch.job.generate import FileJob, JobControl
from specbatch.job.output import already_finished, checked_output, is_finished, verdict, with_columns, with_first_day
from specbatch.job.plan import RowPlan, has_grammars, with_facts_of_rows
from specbatch.job.pool import WorkerPool
from specbatch.job.progress import JobProgress
from specbatch.job.runner import failed_row
from specbatch.job.terminal import closing_table, input_bar, print_notes, print_table
from specbatch.job.warnings import Remarks, draft_remarks
from specbatch.job.worker import Description
from specbatch.results.fingerprint import INPUT_COLUMNS, INPUT_FACTS
from specbatch.results.results import ResultFile
from specbatch.results.retry import TEMPLATE, reopen_without_errors, with_old_template
from specbatch.results.stats import build_report, write_report
from specbatch.rows.parser import RowParser, with_checked_fields
from specbatch.rows.shard import Shard, part_of
from specbatch.rows.sources import RawRow, Source, input_stem, open_source
from specbatch.signals import INTERRUPTED
from specbatch.types import SamplingParams


@dataclass(frozen=True)
class GenerateOptions:
    """The command line."""

    input: str
    output: Path | None = None
    limit: int | None = None
    overwrite: bool = False
    config_file: Path | None = None  # The file that `config` was read from; None: ./specbatch.yaml, if it exists.
    shard: Shard | None = None  # None: the whole input
    quarantine: bool = False  # rows that end the process each time become error rows
    retry_errors: bool = False  # Run the failed rows of a finished output again.
    max_failed: MaxFailed | None = None  # the job ends early if more rows fail
    keep_going: bool = False  # also if all of the first rows fail
    today: Callable[[], date] = date.today
    control: JobControl = field(default_factory=JobControl)


@dataclass(frozen=True)
class Outcome:
    """The result of a job: its exit code, its output and its statistics."""

    exit_code: int
    output: Path
    report: dict[str, Any] | None = None  # the statistics, if the output is complete


def run_file_job(
    options: GenerateOptions, config: Config, pool: WorkerPool, console: Console, *, began: float, summary: bool = True
) -> Outcome:
    """Run or resume a job. `began`: when the command did (time.perf_counter). `summary`: print the closing table.

    Raises SpecbatchError for every problem that is not the fault of one row.
    """
    with closing(pool):
        named = _output_path(options, config)
        url = url_of(named)
        if url is None:
            return _run(options, config, pool, console, began, summary, named)
        store = RemoteOutput(url)
        if url_of(options.input) in (url, store.stats_url):
            raise InputError(f"{store.shown} is the input, so it cannot be written", ELSEWHERE)
        with store.named():
            store.prepare(overwrite=options.overwrite, will_write=options.retry_errors)
            outcome = _run(options, config, pool, console, began, summary, store.path, store)
            if outcome.report is not None:
                store.remove_copies()
        return replace(outcome, output=Path(url))


def _run(
    options: GenerateOptions,
    config: Config,
    pool: WorkerPool,
    console: Console,
    began: float,
    summary: bool,
    named: Path,
    store: RemoteOutput | None = None,
) -> Outcome:
    """Run the job. `named`: the local file that the job writes. `store`: the remote output that gets the file."""
    output = _checked_output(named, options, config, console)
    config = with_columns(config, output)
    shown = str(output) if store is None else store.shown
    if options.retry_errors and not (options.overwrite or output.exists() or partial_path(output).exists()):
        raise InputError(
            f"{shown} does not exist, so it has no rows that failed",
            "-o names the output of the job; without --retry-errors, all rows run",
        )
    config = with_template_texts(config)
    config = with_first_day(config, options.today(), None if options.overwrite else output)
    parser = RowParser.of_job(config)
    with input_bar(options.input, console) as on_bytes:
        source = open_source(options.input, config.data, on_bytes=on_bytes)
    source = with_checked_fields(source, parser)
    source = part_of(source, options.limit, options.shard)
    notes: list[str] = []
    what = pool.describe(with_facts_of_rows(config, source, parser, notes))
    # `what.config` has the model's own sampling options.
    parser = RowParser.of_job(what.config)
    notes += what.notes
    # This includes the import of the libraries, which is a part of loading.
    start_seconds = time.perf_counter() - began
    with_grammars = has_grammars(what.config, source, parser)
    job = what.fingerprint(source.identity, options.limit, options.shard, has_grammars=with_grammars)
    if config.output.columns == "flat" and source.columns:
        job[INPUT_COLUMNS] = dict(source.columns)
    if not options.overwrite and is_finished(output):
        if options.retry_errors and not source.verifiable:
            raise InputError(
                "--retry-errors would read standard input twice, and it is too long for that",
                f"write it to a file, and name the file; {ELSEWHERE}",
            )
        known = with_old_template(job, output) if options.retry_errors else job
        report = already_finished(output, known | _read_to_its_end(source), pool.models)
        if not (options.retry_errors and (report["rows"]["failed"] or known != job)):
            source.remove_copy()
            print_notes([f"{shown} is finished already: nothing to do (--overwrite runs it again)"], console)
            return Outcome(verdict(report, console), output, report)
        reopen_without_errors(output, report, source, job.get(TEMPLATE))

    with closing(ResultFile(output, job, pool.models, overwrite=options.overwrite)) as results:
        print_notes([*results.notes(), *count_crash(results), *notes], console)
        longest = what.config.sampling.max_tokens
        given = None if longest == SamplingParams().max_tokens else longest
        remarks = Remarks(what.config.model.target, columns=parser.makes_prompts, max_tokens=given)

        def warn(warning: str) -> None:
            notes.append(warning)
            print_notes([warning], console)

        def load() -> None:
            notes.extend(_load(what, pool, results, console))

        with closing(JobProgress(console)) as progress:
            quarantine = partial(failed_row, parser=parser) if options.quarantine else None
            plan = None if options.input == "-" else _plan(what.config, parser)
            watch = FailureWatch(options.max_failed, not options.keep_going)
            file_job = FileJob(
                source, results, pool, load, remarks, progress, what.low_acceptance, warn, quarantine, plan, watch,
                options.control,
            )  # fmt: skip
            completed = file_job.run()
        session = file_job.session
        remarked = [*remarks.lines(), *draft_remarks(session.engine)]
        if not completed:
            results.close()
            print_notes([*remarked, *_interrupted_notes(results, source.total)], console)
            return Outcome(INTERRUPTED, output)
        sorting = time.perf_counter()
        written = results.finish()
        if results.renamed_columns:
            names = ", ".join(results.renamed_columns)
            remarked.append(f"columns whose names the input has, too, got a suffix: {names}")
        if earlier := sum(entry["rows"] for entry in results.earlier_templates):
            remarked.append(f"{earlier:,} rows keep their answers to an earlier data.prompt_template")
        if results.stale_rows:
            stale = f"{results.stale_rows:,} finished rows were not kept: their input rows have changed"
            print_notes([stale], console)
        session.io_seconds += time.perf_counter() - sorting
        session.load_seconds += start_seconds
        session.total_seconds = time.perf_counter() - began
        report = build_report(
            job | _facts_of(source),
            source.name,
            shown,
            results.totals,
            results.resumed_rows - results.stale_rows,
            session,
            config=config_to_dict(what.config),
            models=what.models,
            made_by=what.made_by,
            notes=[*notes, *remarked],
        )
        report |= {
            "margins": results.margins().report(),
            "output_file": written,
            "weights": pool.models.record(),
            "longest_row": results.longest_row,
        }
        if results.earlier_templates:
            report["earlier_templates"] = results.earlier_templates
        write_report(stats_path_of(output), report, like=output)
        if store is not None:
            store.upload()
        results.discard_partial()
        source.remove_copy()
    if summary:
        print_table(closing_table(report), console)
    print_notes(remarked, console)
    return Outcome(verdict(report, console), output, report)


def _read_to_its_end(source: Source) -> dict[str, Any]:
    """The facts that the job of a finished output has in addition: see `Source.read_so_far`."""
    if not source.verifiable:
        for _ in source.rows():
            pass
    return _facts_of(source)


def _facts_of(source: Source) -> dict[str, Any]:
    return {INPUT_FACTS + name: value for name, value in source.read_so_far().items()}


def _plan(config: Config, parser: RowParser) -> Callable[[Iterator[RawRow]], RowPlan] | None:
    """Return a function that plans rows, or None if the configuration switches plans off. It is not called for standard
    input, whose rows can come slowly. `config`: the resolved configuration."""
    batch = config.engine.rows_at_once
    if not config.data.plan_rows:
        return None
    return partial(
        RowPlan, parser=parser, max_rows=config.data.plan_rows, num_last=batch * (config.cluster.workers or 1)
    )


def _load(what: Description, pool: WorkerPool, results: ResultFile, console: Console) -> list[str]:
    """Make the pool ready; returns what was decided then."""
    first = results.longest_row

    def settle(here: int) -> int:
        # A resumed job keeps the row length that its first run allowed: which rows are errors depends on it.
        if first is not None:
            if first != here:
                print_notes([f"longest row: {first} tokens, as in the first run of this job (not {here})"], console)
            return first
        if results.resumed_rows:
            lost = f"longest row: {here} tokens from now on (the limit of this job's first run is lost)"
            print_notes([lost], console)
        results.settle_longest_row(here)
        return here

    loading = f"loading {escape(what.config.model.target)}"
    with console.status(loading) if console.is_terminal else nullcontext() as status:

        def on_progress(step: str) -> None:
            if status is not None:
                status.update(f"{loading}: {escape(step)}")

        notes = list(pool.load(settle, on_progress))
    print_notes(notes, console)
    return notes


def _checked_output(named: Path, options: GenerateOptions, config: Config, console: Console) -> Path:
    check_input_name(options.input)
    source = None if options.input == "-" else Path(options.input)
    reads = files_read(config, options.config_file, input=source)
    return checked_output(named, reads, console, overwrite=options.overwrite)


def _output_path(options: GenerateOptions, config: Config) -> Path:
    if options.output is not None:
        return options.output
    if options.input == "-":
        raise InputError("standard input has no name, so the output needs one", "-o results.jsonl")
    path = Path(options.input)
    # A hub data set writes into the current directory: org/name is not a folder here.
    folder = path.parent if os.path.exists(path) else Path()
    suffix = ".parquet" if config.output.columns == "flat" else ".jsonl"
    whole = folder / f"{input_stem(options.input)}.results{suffix}"
    return whole if options.shard is None else options.shard.path(whole)


def _interrupted_notes(results: ResultFile, total: int | None) -> list[str]:
    of = f" of {total:,}" if total is not None else ""
    count = results.totals.rows
    kept = f"{count:,}{of} rows are finished and kept in {partial_path(results.output)}"
    return [f"interrupted: {kept if count else 'no row is finished'}", "run the same command again to continue"]
