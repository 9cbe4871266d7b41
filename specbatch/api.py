"""The Python interface: `LLM` for rows in memory, `generate_file` for files. Both do what the command does."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from specbatch.config import Config
from specbatch.config_load import load_config, option_paths
from specbatch.counts import EngineStats
from specbatch.errors import ConfigError, InputError
from specbatch.files.remote import fetch
from specbatch.files.result_files import result_rows
from specbatch.files.template_files import with_template_texts
from specbatch.files.urls import url_of
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.crash_retry import died
from specbatch.job.failures import MaxFailed
from specbatch.job.output import with_first_day
from specbatch.job.pool import WorkerPool
from specbatch.job.runner import failed_row
from specbatch.rows.memory_rows import raw_rows
from specbatch.rows.parser import RowParser
from specbatch.rows.shard import Shard
from specbatch.rows.sources import RawRow
from specbatch.signals import INTERRUPTED, deferred_signals
from specbatch.startup import open_pool, prepare_libraries
from specbatch.strict.other_names import option_meant

# `Any` is for a table of pandas, polars, Arrow or `datasets`, whose types are not known here.
Rows = str | Mapping[str, Any] | Iterable[Mapping[str, Any] | str] | Any
_MAX_HELD = 10_000  # the most results that wait for an earlier one; then no more rows are started


class LLM:
    """A target model with its draft, loaded once, that runs rows.

        with LLM("org/model", "org/eagle-head", temperature=0.7) as llm:
            for result in llm.generate([{"prompt": "What is the capital of France?"}]):
                print(result["text"])

    Options are those of the configuration (docs/options.md), by the last part of their name (`max_batch_size=64`), or
    by the whole name (`**{"sampling.seed": 1}`) where several sections have it. `config`: a YAML file or the name of a
    packaged configuration, as for the command. `workers=8` runs eight engines, on Ray.

    It raises SpecbatchError for errors that the caller can correct: an unknown option, a model that does not exist, too
    little memory.
    """

    def __init__(
        self, target: str | None = None, draft: str | None = None, *, config: str | Path | None = None, **options: Any
    ) -> None:
        self._config = _configured(config, {"target": target, "draft": draft}, options)
        prepare_libraries()
        pool = open_pool(self._config, Console(quiet=True))
        try:
            what = pool.describe(with_first_day(with_template_texts(self._config), date.today()))
            self._parser = RowParser(what.config.sampling, what.config.data, what.config.model.target)
            self.notes = list(what.notes)
            self.notes += pool.load(lambda tokens: tokens, lambda step: None)
        except BaseException:
            pool.close()
            raise
        self._pool: WorkerPool | None = pool  # None: closed
        self._running = False

    def generate(self, rows: Rows, *, in_order: bool = True) -> Iterator[dict[str, Any]]:
        """Run rows and yield their results, the same dicts as the lines of a result file.

        A row is a prompt, or a dict as in an input file. `rows` is one row, an iterable of rows, or a table of pandas,
        polars, Arrow or `datasets`. Rows are read as they are needed. A row that cannot run has
        an `error`, and does not disturb the others. `in_order`: results come in the order of the rows; else as rows
        finish. One call can run at a time. Rows that a call leaves unfinished are finished before the next call, and
        their results are dropped.
        """
        return _decoded(self.generate_lines(rows, in_order=in_order))

    def generate_lines(self, rows: Rows, *, in_order: bool = True) -> Generator[bytes, None, None]:
        """Yield results as `generate` does, but each as the line of a result file, with its newline. This costs less
        for programs that write results or send them on."""
        self._check_free()
        return self._generate(raw_rows(rows), in_order)

    def _generate(self, rows: Iterator[RawRow], in_order: bool) -> Generator[bytes, None, None]:
        self._check_free()  # another iterator may have begun since the call
        pool = self._opened()
        self._running = True
        try:
            while not pool.is_idle:
                with deferred_signals():
                    pool.collect(last=True)
            held: dict[int, bytes] = {}
            num_read, num_returned, exhausted = 0, 0, False
            while True:
                self._opened()
                while not exhausted and pool.has_room and len(held) < _MAX_HELD:
                    try:
                        row = next(rows)
                    except StopIteration:
                        exhausted = True
                        break
                    self._opened().submit(row)
                    num_read += 1
                self._opened()  # the iterator of rows can call close()
                if exhausted and pool.is_idle:
                    return
                # If the results of all later rows wait for a row that the pool keeps for the end, it has to run now.
                with deferred_signals():  # an exception in the middle would lose rows, and the next call wait for them
                    done = pool.collect(last=exhausted or len(held) >= _MAX_HELD)
                left_out = [failed_row(lost, died(deaths), self._parser) for lost, deaths in done.left_out]
                for finished in chain(done.rows, *(failed.rows for failed in left_out)):
                    if not in_order:
                        yield finished.line
                    else:
                        held[finished.index] = finished.line
                while num_returned in held:
                    yield held.pop(num_returned)
                    num_returned += 1
        finally:
            self._running = False

    def _check_free(self) -> None:
        self._opened()
        if self._running:
            raise InputError("generate() is running already", "read its results to the end first, or close() it")

    def _opened(self) -> WorkerPool:
        if self._pool is None:
            raise InputError("the LLM is closed, so it runs no rows", "read the results before close()")
        return self._pool

    @property
    def stats(self) -> EngineStats:
        """Counters since the model was loaded, summed over workers."""
        return self._pool.stats if self._pool is not None else self._last_stats

    def close(self) -> None:
        """Free the model and end the workers."""
        if self._pool is not None:
            self._last_stats = self._pool.stats
            self._pool.close()
            self._pool = None
            gc.collect()  # needed, because parts of an engine refer to each other

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
    configured = _configured(config, {}, options)
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
    outcome = run_file_job(given, configured, open_pool(configured, console), console, began=began, summary=progress)
    if outcome.exit_code == INTERRUPTED or outcome.report is None:
        raise KeyboardInterrupt
    return Report(outcome.output, outcome.report)


def _configured(config: str | Path | None, named: Mapping[str, Any], options: Mapping[str, Any]) -> Config:
    values = {name: value for name, value in named.items() if value is not None}
    values = {_full_name(name): value for name, value in {**values, **options}.items()}
    return load_config(config, values=values)


def _full_name(name: str) -> str:
    """Return the full name of the option that a keyword names. It raises ConfigError."""
    paths = option_paths()
    if name in paths:
        return name
    ends = [path for path in paths if path.rpartition(".")[2] == name]
    if len(ends) == 1:
        return ends[0]
    if ends:
        both = " and ".join(ends)
        raise ConfigError(f"the option {name} could be {both}", f'give the whole name: **{{"{ends[0]}": ...}}')
    near = option_meant(name.rpartition(".")[2], paths)
    raise ConfigError(f"there is no option {name}", f"did you mean {near}?" if near else "see docs/options.md")


def _decoded(lines: Generator[bytes, None, None]) -> Iterator[dict[str, Any]]:
    with closing(lines):
        for line in lines:
            yield json.loads(line)
