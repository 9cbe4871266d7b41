"""`LLM`: a model that is loaded once and runs rows in memory."""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import date
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from specbatch.api.call import Call, Schema, call_of
from specbatch.api.options import configured
from specbatch.api.results import Result, Results
from specbatch.counts import EngineStats
from specbatch.errors import InputError
from specbatch.files.template_files import with_template_texts
from specbatch.job.crash_retry import died
from specbatch.job.output import with_first_day
from specbatch.job.pool import WorkerPool
from specbatch.job.runner import failed_row
from specbatch.rows.chat_fields import CHAT_FIELDS
from specbatch.rows.memory_rows import raw_rows
from specbatch.rows.parser import RowParser
from specbatch.rows.sources import RawRow
from specbatch.signals import deferred_signals
from specbatch.startup import open_pool, prepare_libraries

# `Any` is for a table of pandas, polars, Arrow or `datasets`, whose types are not known here.
Rows = str | Mapping[str, Any] | Iterable[Mapping[str, Any] | str] | Any
_MAX_HELD = 10_000  # the most results that wait for an earlier one; then no more rows are started


class LLM:
    """A target model with its draft, loaded once, that runs rows.

        with LLM("org/model", "org/eagle-head") as llm:
            for result in llm.generate(["What is the capital of France?"], max_tokens=64, temperature=0.7):
                print(result.text)

    Options are those of the configuration (docs/options.md), by the last part of their name (`max_batch_size=64`), or
    by the whole name (`**{"sampling.seed": 1}`) where several sections have it. `config`: a YAML file or the name of a
    packaged configuration, as for the command. `workers=8` runs eight engines, on Ray.

    It raises SpecbatchError for errors that the caller can correct: an unknown option, a model that does not exist, too
    little memory.
    """

    def __init__(
        self, model: str | None = None, draft: str | None = None, *, config: str | Path | None = None, **options: Any
    ) -> None:
        named = {"model": model, "draft": draft}
        named = {name: value for name, value in named.items() if value is not None}
        self._config = configured(config, {**named, **options})
        prepare_libraries()
        pool = open_pool(self._config, Console(quiet=True))
        try:
            what = pool.describe(with_first_day(with_template_texts(self._config), date.today()))
            self._sampling = what.config.sampling
            self._parser = RowParser(what.config.sampling, what.config.data, what.config.model.target)
            self.notes = list(what.notes)
            self.notes += pool.load(lambda tokens: tokens, lambda step: None)
        except BaseException:
            pool.close()
            raise
        self._pool: WorkerPool | None = pool  # None: closed
        self._running = False

    def generate(self, rows: Rows, *, schema: Schema | None = None, first_index: int = 0, **sampling: Any) -> Results:
        """Run rows, and return the list of their results, in the order of the rows.

        A row is a prompt, or a dict as in an input file. `rows` is one row, an iterable of rows, or a table of pandas,
        polars, Arrow or `datasets`. `sampling`: sampling options for rows that do not have them, such as
        `max_tokens=64`. `schema`: answers are JSON of this pydantic class or JSON Schema, see `Result.parsed`.
        `first_index`: the index of the first row. The default seed of a row depends on its index.

        A row that cannot run has an `error`, and does not disturb the others.
        """
        call = self._call(schema, sampling)
        lines = self._generate(raw_rows(rows), call, True, first_index)
        return Results(map(call.result, lines), call.schema)

    def chat(
        self,
        messages: Iterable[Mapping[str, Any]] | Iterable[Iterable[Mapping[str, Any]]],
        *,
        schema: Schema | None = None,
        **fields: Any,
    ) -> Results:
        """Answer a conversation, which is a list of messages, or each of a list of conversations. `fields`: sampling
        options, and fields of chats such as `tools`."""
        return self.generate(conversations(messages, fields), schema=schema, **fields)

    def stream(
        self,
        rows: Rows,
        *,
        in_order: bool = True,
        schema: Schema | None = None,
        first_index: int = 0,
        **sampling: Any,
    ) -> Generator[Result, None, None]:
        """Run rows as `generate` does, and yield each result. Rows are read as they are needed. `in_order`: results
        come in the order of the rows; else as rows finish.

        One call can run at a time. Rows that a call leaves unfinished are finished before the next call, and their
        results are dropped.
        """
        call = self._call(schema, sampling)
        return _results(self._generate(raw_rows(rows), call, in_order, first_index), call)

    def stream_lines(self, rows: Rows, *, in_order: bool = True, **sampling: Any) -> Generator[bytes, None, None]:
        """Yield results as `stream` does, but each as the line of a result file, with its newline. This costs less
        for programs that write results or send them on."""
        return self._generate(raw_rows(rows), self._call(None, sampling), in_order, 0)

    def _call(self, schema: Schema | None, sampling: Mapping[str, Any]) -> Call:
        self._check_free()
        return call_of(self._sampling, schema, sampling)

    def _generate(
        self, rows: Iterator[RawRow], call: Call, in_order: bool, first_index: int
    ) -> Generator[bytes, None, None]:
        self._check_free()  # another iterator may have begun since the call
        pool = self._opened()
        self._running = True
        try:
            while not pool.is_idle:
                with deferred_signals():
                    pool.collect(last=True)
            held: dict[int, bytes] = {}
            next_index, exhausted = first_index, False
            while True:
                self._opened()
                while not exhausted and pool.has_room and len(held) < _MAX_HELD:
                    try:
                        row = next(rows)
                    except StopIteration:
                        exhausted = True
                        break
                    self._opened().submit(RawRow(first_index + row.index, row.data, call.sampling))
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
                while next_index in held:
                    yield held.pop(next_index)
                    next_index += 1
        finally:
            self._running = False

    def _check_free(self) -> None:
        self._opened()
        if self._running:
            raise InputError("another call is running already", "read its results to the end first, or close() it")

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


def conversations(messages: Any, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the row of each conversation. It moves the fields of chats from `fields` to the rows. It raises InputError
    at once for what is no conversation, and later for such an item."""
    wanted = "a conversation is a list of messages such as {'role': 'user', 'content': 'Hello'}"
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InputError(f"messages are of type {type(messages).__name__}", f"{wanted}; generate() runs prompts")
    extra = {name: fields.pop(name) for name in CHAT_FIELDS if name in fields}
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping):
        messages = [messages]

    def rows() -> Iterator[dict[str, Any]]:
        for number, conversation in enumerate(messages):
            if not isinstance(conversation, Sequence) or isinstance(conversation, str | bytes):
                raise InputError(f"conversation {number} is of type {type(conversation).__name__}", wanted)
            yield {"messages": list(conversation), **extra}

    return rows()


def _results(lines: Generator[bytes, None, None], call: Call) -> Generator[Result, None, None]:
    with closing(lines):
        for line in lines:
            yield call.result(line)
