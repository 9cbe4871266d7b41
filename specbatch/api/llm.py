"""`LLM`: a model that is loaded once and runs rows in memory."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

from specbatch.api.call import Call, Schema, call_of
from specbatch.api.loaded_model import LoadedModel
from specbatch.api.options import given
from specbatch.api.results import Result, Results
from specbatch.api.rows import Messages, Rows, conversations
from specbatch.counts import EngineStats
from specbatch.errors import InputError
from specbatch.rows.memory_rows import raw_rows
from specbatch.rows.sources import RawRow

MAX_HELD = 10_000  # the most results that wait for an earlier one; then no more rows are started


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
        self._model = LoadedModel(config, {**given(model=model, draft=draft), **options})
        self._running = False

    @property
    def notes(self) -> list[str]:
        """Return what was decided when the model was loaded, such as the device."""
        return self._model.notes

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
        return Results(map(call.result, lines), call.sampling.response_format)

    def chat(
        self,
        messages: Messages,
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
        return call_of(self._model.config.sampling, schema, sampling)

    def _generate(
        self, rows: Iterator[RawRow], call: Call, in_order: bool, first_index: int
    ) -> Generator[bytes, None, None]:
        self._check_free()  # another iterator may have begun since the call
        model = self._model
        self._running = True
        try:
            while not model.pool.is_idle:
                model.collect(last=True)
            held: dict[int, bytes] = {}
            next_index, exhausted = first_index, False
            while True:
                while not exhausted and model.pool.has_room and len(held) < MAX_HELD:
                    try:
                        row = next(rows)
                    except StopIteration:
                        exhausted = True
                        break
                    model.pool.submit(RawRow(first_index + row.index, row.data, call.sampling))
                if exhausted and model.pool.is_idle:  # the iterator of rows can close the model: then this raises
                    return
                # If the results of all later rows wait for a row that the pool keeps for the end, it has to run now.
                for finished in model.collect(last=exhausted or len(held) >= MAX_HELD):
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
        _ = self._model.pool  # raises if it is closed
        if self._running:
            raise InputError("another call is running already", "read its results to the end first, or close() it")

    @property
    def stats(self) -> EngineStats:
        """Counters since the model was loaded, summed over workers."""
        return self._model.stats

    def close(self) -> None:
        """Free the model and end the workers."""
        self._model.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _results(lines: Generator[bytes, None, None], call: Call) -> Generator[Result, None, None]:
    with closing(lines):
        for line in lines:
            yield call.result(line)
