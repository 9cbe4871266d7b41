"""The output of a command that writes results: where it is, whether it is finished already, and the
day that its chat templates print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console

from specbatch.config import Config
from specbatch.errors import InputError
from specbatch.files.flat_table import DELIMITERS, FLAT_SUFFIXES
from specbatch.files.jsonl import encode_line
from specbatch.files.local import file_facts
from specbatch.files.paths import (
    ELSEWHERE,
    check_can_write,
    check_written,
    holds_results,
    job_files,
    output_file,
    partial_path,
    read_stats,
    stats_path_of,
    usable,
)
from specbatch.files.result_files import is_packed, result_suffix
from specbatch.job.terminal import print_notes
from specbatch.results.fingerprint import ModelRecord, differences
from specbatch.results.partial import read_header

OK, SOME_FAILED = 0, 1  # exit codes
_OR_OVERWRITE = f"--overwrite replaces it; {ELSEWHERE}"


def checked_output(named: Path, reads: Mapping[str, Path], console: Console, *, overwrite: bool) -> Path:
    """The file that results for `named` go to. `reads`: what the command reads, see `files_read`.

    Raises InputError if the command would overwrite something else, or cannot write.
    """
    output = output_file(named)
    files = job_files(output)
    check_written(files, reads)
    unfinished = partial_path(output).exists()
    if not overwrite and output.exists():
        _check_existing(output, unfinished)
    if overwrite or not output.exists() or unfinished:
        check_can_write(files)
    if output != named:
        print_notes([f"{named} is a link: the results go to {output}"], console)
    return output


def with_columns(config: Config, output: Path) -> Config:
    """Return `config` with the columns that the file will have. Raises InputError if its format has no columns."""
    suffix = result_suffix(output)
    if suffix in DELIMITERS:
        return replace(config, output=replace(config.output, columns="flat"))
    if config.output.columns == "flat" and suffix != ".parquet":
        raise InputError(
            f"output.columns is flat, which {output.name} cannot have: {', '.join(FLAT_SUFFIXES)} are tables",
            f"-o {str(output).removesuffix(suffix)}.parquet, or --set output.columns=results",
        )
    return config


def is_finished(output: Path) -> bool:
    return output.exists() and not partial_path(output).exists()


def already_finished(
    output: Path, job: Mapping[str, Any], models: ModelRecord, *, verifiable: bool = True
) -> dict[str, Any]:
    """The statistics of an output that is finished, if it is that of `job`. `verifiable`: `job` covers the whole input.

    Raises InputError if it is the output of another job, or was changed.
    """
    report = report_of(output)
    changed = differences(report["job"], json.loads(encode_line(dict(job))))
    if changed := changed or models.differences(report.get("weights", {})):
        raise InputError(f"{output} is the result of a different job: {'; '.join(changed)}", _OR_OVERWRITE)
    if not verifiable:
        raise InputError(
            f"{output} is finished, but only the beginning of long standard input shows that it is the same",
            _OR_OVERWRITE,
        )
    written = report.get("output_file") or {"rows": report["rows"]["total"]}  # older versions only counted
    now = file_facts(output).of_results()
    if is_packed(output):  # its rows are not counted again: the hash says enough
        now["rows"] = written["rows"]
    if changed := differences(written, {name: now[name] for name in written}):
        raise InputError(
            f"{output} was changed after it was finished: {'; '.join(changed)}",
            f"--overwrite computes it again; {ELSEWHERE}",
        )
    return report


def report_of(output: Path) -> dict[str, Any]:
    """The statistics of an output that exists. Raises InputError if there are none."""
    stats_path = stats_path_of(output)
    if (report := read_stats(stats_path)) is None:
        raise InputError(
            f"{output} exists without {stats_path.name}, so the job that wrote it is not known",
            _OR_OVERWRITE if holds_results(output) else ELSEWHERE,
        )
    if not {"total", "failed", "errors"} <= report.get("rows", {}).keys():
        raise InputError(f"{stats_path} is damaged: it does not say how many rows failed", _OR_OVERWRITE)
    return report


def verdict(report: Mapping[str, Any], console: Console) -> int:
    """The exit code of a finished job; says what failed."""
    failed = report["rows"]["failed"]
    if not failed:
        return OK
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report["rows"]["errors"].items())
    print_notes([f"{failed:,} of {report['rows']['total']:,} rows failed: {kinds}"], console)
    return SOME_FAILED


def _check_existing(output: Path, unfinished: bool) -> None:
    """Check that an output that exists was written by specbatch. Raises InputError."""
    with usable(output, "the output"):
        if not unfinished:
            report_of(output)
        elif not holds_results(output):  # --overwrite would drop the finished rows, too
            raise InputError(
                f"{output} was not written by specbatch, so the output cannot be written there",
                "move it away, and run the same command again: finished rows are kept",
            )


def with_first_day(config: Config, today: date, output: Path | None = None) -> Config:
    """Return `config` with the day that all workers of the job print, if it names none: the first day of the job, which
    later sessions read in its files. `output`: of a job that can have started before; None: it starts now."""
    if config.data.chat_template_date is not None:
        return config
    recorded = None if output is None else _recorded_job(output).get("data.chat_template_date")
    return replace(config, data=replace(config.data, chat_template_date=recorded or today.isoformat()))


def _recorded_job(output: Path) -> Mapping[str, Any]:
    """Read the identity of the job from the files of `output`. It is empty if there are no files, or if they are
    damaged."""
    partial = partial_path(output)
    if not partial.exists():
        report = read_stats(stats_path_of(output)) if output.exists() else None
        return {} if report is None else report["job"]
    with partial.open("rb") as file:
        header = file.readline()
    return (read_header(header, str(partial)) if header.endswith(b"\n") else None) or {}
