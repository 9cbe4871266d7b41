"""`generate_file`: a file job of a program, with the report that it returns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from specbatch.api.options import configured
from specbatch.files.remote import fetch
from specbatch.files.result_files import result_rows
from specbatch.files.urls import url_of
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.failures import MaxFailed
from specbatch.rows.shard import Shard
from specbatch.signals import INTERRUPTED
from specbatch.startup import open_pool, prepare_libraries


@dataclass(frozen=True)
class Report:
    """A finished job."""

    output: Path
    stats: Mapping[str, Any]  # the content of OUTPUT's stats.json, see docs/formats.md

    @property
    def num_rows(self) -> int:
        return int(self.stats["rows"]["total"])

    @property
    def num_failed(self) -> int:
        """The number of rows whose result is an error."""
        return int(self.stats["rows"]["failed"])

    def results(self) -> Iterator[dict[str, Any]]:
        """Yield the results, in the order of the input."""
        url = url_of(self.output)
        return result_rows(self.output) if url is None else _remote_rows(url)


def _remote_rows(url: str) -> Iterator[dict[str, Any]]:
    copy = fetch(url)
    try:
        yield from result_rows(copy.path)
    finally:
        copy.remove()


def generate_file(
    input: str | Path,
    output: str | Path | None = None,
    *,
    config: str | Path | None = None,
    limit: int | None = None,
    shard: str | None = None,
    overwrite: bool = False,
    quarantine: bool = False,
    retry_errors: bool = False,
    max_failed: int | str | None = None,
    keep_going: bool = False,
    progress: bool = False,
    **options: Any,
) -> Report:
    """Run every row of a file, as `specbatch generate INPUT -o OUTPUT` does. A job that was interrupted goes on, and
    one that is finished is not run again.

    `options`: options as for `LLM`. `limit`: run only the first rows. `shard`: a part of the rows, such as "3/16", see
    docs/cluster.md. `quarantine`: rows that end the process each time that they run become error rows; without it they
    raise WorkerFailed when all others have finished. `retry_errors`: run the failed rows of a finished output again.
    `max_failed`: raise TooManyFailed if more rows fail, such as 50 or "0.1%". `keep_going`: run on if each of the first
    100 rows fails, which raises TooManyFailed otherwise. `progress`: print on stderr what the command prints.

    It raises SpecbatchError for errors that the caller can correct, and KeyboardInterrupt after SIGINT or SIGTERM.
    Finished rows are kept.
    """
    began = time.perf_counter()
    loaded = configured(config, options)
    prepare_libraries()
    given = GenerateOptions(
        str(input),
        None if output is None else Path(output),
        limit,
        overwrite,
        None if config is None else Path(config),
        None if shard is None else Shard.parse(shard),
        quarantine,
        retry_errors,
        None if max_failed is None else MaxFailed.parse(str(max_failed)),
        keep_going,
    )
    console = Console(stderr=True, highlight=False, quiet=not progress)
    outcome = run_file_job(given, loaded, open_pool(loaded, console), console, began=began, summary=progress)
    if outcome.exit_code == INTERRUPTED or outcome.report is None:
        raise KeyboardInterrupt
    return Report(outcome.output, outcome.report)
