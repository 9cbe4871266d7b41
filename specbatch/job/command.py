"""`specbatch generate`: everything around the loop, in the order that finds mistakes before a model is loaded."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.markup import escape

from specbatch.config import Config
from specbatch.config_load import config_to_dict
from specbatch.errors import InputError
from specbatch.job.files import file_facts
from specbatch.job.fingerprint import ModelFiles, differences, job_fingerprint
from specbatch.job.generate import FileJob
from specbatch.job.jsonl import encode_line
from specbatch.job.paths import (
    ELSEWHERE,
    check_can_write,
    check_input_name,
    check_written,
    files_read,
    holds_results,
    job_files,
    output_file,
    partial_path,
    read_stats,
    stats_path_of,
    usable,
)
from specbatch.job.progress import JobProgress
from specbatch.job.remarks import LowAcceptance, Remarks, draft_remarks
from specbatch.job.results import ResultFile
from specbatch.job.rows import RowParser, with_checked_fields
from specbatch.job.sources import Source, input_stem, open_source
from specbatch.job.stats import Provenance, build_report, device_name, write_report
from specbatch.job.terminal import closing_table, print_notes, print_table
from specbatch.job.tokenizer import TextProcessor, with_chat_template_text
from specbatch.signals import INTERRUPTED
from specbatch.types import BatchEngine

OK, SOME_FAILED = 0, 1  # exit codes
_LOOK_AHEAD_BATCHES = 2
_OR_OVERWRITE = f"--overwrite replaces it; {ELSEWHERE}"


class Resolved(Protocol):
    """What this module needs of `engine.resolve.ResolvedRun`."""

    config: Config
    tokenizer: Any
    row_tokens: int | None  # longest row, prompt and output, where the user's kv_cache_tokens limits it
    description: dict[str, str]
    low_acceptance: str | None  # likely causes, where drafts are hardly ever right
    notes: list[str]


@dataclass(frozen=True)
class Runtime:
    """The parts that need models: `engine.build` in the tool, stubs in tests."""

    resolve: Callable[[Config], Any]  # -> Resolved
    build_engine: Callable[[Any, Callable[[str], None]], BatchEngine]  # its second argument prints what is being done
    model_paths: Callable[[Config], Mapping[str, Path]]  # by option, of a resolved config


@dataclass(frozen=True)
class GenerateOptions:
    """The command line."""

    input: str
    output: Path | None = None
    limit: int | None = None
    overwrite: bool = False
    config_file: Path | None = None  # that `config` was read from; None: ./specbatch.yaml, where there is one


def generate_file(
    options: GenerateOptions, config: Config, runtime: Runtime, console: Console, *, began: float, summary: bool = True
) -> int:
    """Run or resume a job; returns the exit code. `began` is when the command did (time.perf_counter). `summary`: show
    the closing table.

    Raises SpecbatchError for everything that no row is to blame for.
    """
    output = _checked_output(options, config, console)
    config = with_chat_template_text(config)
    parser = RowParser(config.sampling, config.data)
    source = with_checked_fields(open_source(options.input, config.data), parser)
    run: Resolved = runtime.resolve(config)
    batch = run.config.engine.max_batch_size
    assert batch is not None, "resolve() decides it"
    start_seconds = time.perf_counter() - began  # with the import of the libraries: part of what loading costs
    texts = TextProcessor(run.tokenizer, run.config.data)
    models = ModelFiles(runtime.model_paths(run.config), lambda line: print_notes([line], console))
    job = job_fingerprint(
        run.config,
        source.identity,
        options.limit,
        row_tokens=run.row_tokens,
        models=models.digests,
    )
    if texts.prints_today:
        job["date (printed by the chat template)"] = datetime.date.today().isoformat()
    if not options.overwrite and output.exists() and not partial_path(output).exists():
        return _already_finished(output, job, models, source, console)

    results = ResultFile(output, job, models, overwrite=options.overwrite)
    try:
        print_notes([*results.notes(), *run.notes], console)
        total = source.total if options.limit is None or source.total is None else min(source.total, options.limit)
        progress = JobProgress(console)

        def load() -> BatchEngine:
            known = len(run.notes)
            loading = f"loading {escape(run.config.model.target)}"
            if console.is_terminal:
                with console.status(loading) as status:
                    engine = runtime.build_engine(run, lambda doing: status.update(f"{loading}: {escape(doing)}"))
            else:
                engine = runtime.build_engine(run, lambda doing: None)
            models.check_loaded()
            models.hash_later()
            print_notes(run.notes[known:], console)  # what only the loaded model could tell
            _limit_rows(engine, results, console)
            return engine

        remarks = Remarks(run.config.model.target, columns=parser.makes_prompts)

        def warn(text: str) -> None:
            run.notes.append(text)
            print_notes([text], console)

        file_job = FileJob(
            source,
            parser,
            texts,
            results,
            load,
            remarks,
            progress,
            model_name=run.config.model.target,
            seed=run.config.engine.seed,
            look_ahead=_LOOK_AHEAD_BATCHES * batch,
            total=total,
            limit=options.limit,
            simulated=run.config.speculation.simulate_acceptance is not None,
            low_acceptance=LowAcceptance(run.low_acceptance, warn),
        )
        try:
            completed = file_job.run()
        finally:
            progress.stop()
        if not completed:
            results.close()
            print_notes([*remarks.lines(), *draft_remarks(file_job.session.engine)], console)
            _say_interrupted(results, total, console)
            return INTERRUPTED
        sorting = time.perf_counter()
        written = results.finish()
        if results.stale_rows:
            print_notes([f"{results.stale_rows:,} finished rows were not kept: their input rows have changed"], console)
        session = file_job.session
        session.io_seconds += time.perf_counter() - sorting
        session.load_seconds += start_seconds
        session.total_seconds = time.perf_counter() - began
        remarked = [*remarks.lines(), *draft_remarks(session.engine)]
        made_by = Provenance(
            config_to_dict(run.config),
            run.description,
            (*run.notes, *remarked),
            device_name(run.config.engine.device),
        )
        resumed = results.resumed_rows - results.stale_rows
        report = build_report(job, source.name, output, results.totals, resumed, session, made_by)
        report |= {"output_file": written, "weights": models.record()}
        write_report(stats_path_of(output), report)
        results.discard_partial()
    finally:
        models.stop()
        results.close()
    if summary:
        print_table(closing_table(report), console)
    print_notes(remarked, console)
    return _verdict(report, console)


def _limit_rows(engine: BatchEngine, results: ResultFile, console: Console) -> None:
    """A resumed job keeps the length of rows that its first run allowed: which rows are errors depends on it."""
    here, first = engine.limit_rows(None), results.longest_row
    results.settle_longest_row(engine.limit_rows(first))
    if first is None and results.resumed_rows:
        print_notes(
            [f"longest row: {here} tokens from now on (the limit of the first run of this job is lost)"], console
        )
    elif first is not None and first != here:
        print_notes([f"longest row: {first} tokens, as in the first run of this job (not {here})"], console)


def _checked_output(options: GenerateOptions, config: Config, console: Console) -> Path:
    """Where the results go. Raises InputError where the job would write over something else, or cannot write."""
    check_input_name(options.input)
    named = _output_path(options)
    output = output_file(named)
    files = job_files(output)
    source = None if options.input == "-" else Path(options.input)
    check_written(files, files_read(config, options.config_file, input=source))
    unfinished = partial_path(output).exists()
    if not options.overwrite and output.exists():
        _check_existing(output, unfinished)
    if options.overwrite or not output.exists() or unfinished:
        check_can_write(files)
    if output != named:
        console.print(f"{named} is a link: the results go to {output}", markup=False, soft_wrap=True)
    return output


def _check_existing(output: Path, unfinished: bool) -> None:
    """That an output which is there is one of ours. Raises InputError."""
    with usable(output, "the output"):
        if not unfinished:
            _report_of(output)
        elif not holds_results(output):  # --overwrite would drop the finished rows, too
            raise InputError(
                f"{output} was not written by specbatch, and the output would be written there",
                "move it away, and run the same command again: finished rows are kept",
            )


def _report_of(output: Path) -> dict[str, Any]:
    """The statistics of an output that is there. Raises InputError where there are none."""
    stats_path = stats_path_of(output)
    if (report := read_stats(stats_path)) is None:
        raise InputError(
            f"{output} exists, but there is no {stats_path.name} that says which job wrote it",
            _OR_OVERWRITE if holds_results(output) else ELSEWHERE,
        )
    return report


def _output_path(options: GenerateOptions) -> Path:
    if options.output is not None:
        return options.output
    if options.input == "-":
        raise InputError("standard input has no name to derive an output from", "-o results.jsonl names it")
    path = Path(options.input)
    # A hub data set writes into the current directory; org/name is no folder here.
    folder = path.parent if os.path.exists(path) else Path()
    return folder / f"{input_stem(options.input)}.results.jsonl"


def _already_finished(output: Path, job: dict[str, Any], models: ModelFiles, source: Source, console: Console) -> int:
    report = _report_of(output)
    changed = differences(report["job"], json.loads(encode_line(job)))
    if changed := changed or models.differences(report.get("weights", {})):
        raise InputError(f"{output} is the result of a different job: {'; '.join(changed)}", _OR_OVERWRITE)
    if not source.verifiable:
        raise InputError(
            f"{output} is finished; standard input is too long to tell whether it is the same", _OR_OVERWRITE
        )
    written = report.get("output_file") or {"rows": report["rows"]["total"]}  # older versions counted only
    if changed := differences(written, {name: fact for name, fact in file_facts(output).items() if name in written}):
        raise InputError(
            f"{output} was changed after it was finished: {'; '.join(changed)}",
            "--overwrite computes it again; -o PATH writes elsewhere",
        )
    console.print(f"{output} is finished already: nothing to do (--overwrite runs it again)", markup=False)
    return _verdict(report, console)


def _verdict(report: Mapping[str, Any], console: Console) -> int:
    failed = report["rows"]["failed"]
    if not failed:
        return OK
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report["rows"]["errors"].items())
    console.print(f"{failed:,} of {report['rows']['total']:,} rows failed: {kinds}", markup=False, soft_wrap=True)
    return SOME_FAILED


def _say_interrupted(results: ResultFile, total: int | None, console: Console) -> None:
    of = f" of {total:,}" if total is not None else ""
    count = results.totals.rows
    kept = (
        f"{count:,}{of} rows are finished and kept in {partial_path(results.output)}" if count else "no row is finished"
    )
    print_notes([f"interrupted: {kept}", "run the same command again to go on"], console)
