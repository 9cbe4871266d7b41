"""`AsyncLLM`: calls of an event loop share one model, whose rows run in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from specbatch.api.call import Call, Schema, call_of
from specbatch.api.llm import MAX_HELD
from specbatch.api.loaded_model import LoadedModel
from specbatch.api.options import given
from specbatch.api.results import Result
from specbatch.api.rows import Messages, Rows, conversations
from specbatch.counts import EngineStats
from specbatch.errors import InputError
from specbatch.rows.memory_rows import raw_rows
from specbatch.rows.sources import RawRow

_BATCHES_AHEAD = 4  # rows that a call gives to the thread before their results come, in batches of the engine


class AsyncLLM:
    """A model that is loaded once, and runs the rows of many calls at the same time.

        async with AsyncLLM("org/model") as llm:
            async for result in llm.generate(["What is the capital of France?"], max_tokens=64):
                print(result.text)

    Arguments are those of `LLM`. The constructor waits until the model is loaded. One thread loads the model, runs it,
    and frees it. Methods are for the event loop in which a call is used.
    """

    def __init__(
        self, model: str | None = None, draft: str | None = None, *, config: str | Path | None = None, **options: Any
    ) -> None:
        self._changed = threading.Condition()  # held to change the fields below
        self._calls: deque[_RunningCall] = deque()  # the calls whose rows wait, the next one first
        self._is_closed = False
        self._num_started = 0
        self._failure: BaseException | None = None  # the error that ended the thread
        loaded: Future[LoadedModel] = Future()
        arguments = (loaded, config, {**given(model=model, draft=draft), **options})
        self._thread = threading.Thread(target=self._run, args=arguments, name="specbatch-engine", daemon=True)
        self._thread.start()
        self._model = loaded.result()
        engine, cluster = self._model.config.engine, self._model.config.cluster
        self._max_running = _BATCHES_AHEAD * (engine.max_batch_size or 1) * (cluster.workers or 1)

    @property
    def notes(self) -> list[str]:
        """Return what was decided when the model was loaded, such as the device."""
        return self._model.notes

    @property
    def stats(self) -> EngineStats:
        """Counters since the model was loaded, summed over workers."""
        return self._model.stats

    def generate(
        self,
        rows: Rows,
        *,
        in_order: bool = True,
        schema: Schema | None = None,
        first_index: int = 0,
        **sampling: Any,
    ) -> AsyncGenerator[Result, None]:
        """Run rows as `LLM.stream` does, and yield each result. Calls that run at the same time take turns. A call that
        is cancelled, or whose iterator is closed, does not disturb others: rows that have begun are finished, and their
        results are dropped. Rows are read in the event loop, as they are needed."""
        call = call_of(self._model.config.sampling, schema, sampling)
        self._check_open()
        return self._results(raw_rows(rows), call, in_order, first_index)

    def chat(
        self, messages: Messages, *, in_order: bool = True, schema: Schema | None = None, **fields: Any
    ) -> AsyncGenerator[Result, None]:
        """Answer conversations as `LLM.chat` does, and yield each result."""
        return self.generate(conversations(messages, fields), in_order=in_order, schema=schema, **fields)

    async def _results(
        self, rows: Iterator[RawRow], call: Call, in_order: bool, first_index: int
    ) -> AsyncGenerator[Result, None]:
        running = _RunningCall(asyncio.get_running_loop())
        held: dict[int, bytes] = {}
        next_index, num_running, exhausted = first_index, 0, False
        try:
            while True:
                ready: list[RawRow] = []
                while not exhausted and num_running + len(ready) < self._max_running and len(held) < MAX_HELD:
                    try:
                        row = next(rows)
                    except StopIteration:
                        exhausted = True
                        break
                    ready.append(RawRow(0, row.data, call.sampling, first_index + row.index))
                self._submit(running, ready)
                num_running += len(ready)
                if not num_running:
                    return
                for number, line in await running.receive():
                    num_running -= 1
                    if not in_order:
                        yield call.result(line)
                    else:
                        held[number] = line
                while next_index in held:
                    yield call.result(held.pop(next_index))
                    next_index += 1
        finally:
            running.is_open = False

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise InputError("the LLM is closed, so it runs no rows", "read the results before close()")

    def _submit(self, call: _RunningCall, rows: list[RawRow]) -> None:
        with self._changed:
            self._check_open()
            if rows and not call.waiting:
                self._calls.append(call)
            call.waiting.extend(rows)
            self._changed.notify()

    def _run(self, loaded: Future[LoadedModel], config: str | Path | None, options: Mapping[str, Any]) -> None:
        """Load the model and run rows until the end. This is the thread."""
        try:
            model = LoadedModel(config, options)
        except BaseException as exc:
            loaded.set_exception(exc)
            return
        loaded.set_result(model)
        owners: dict[int, tuple[_RunningCall, int]] = {}  # the row's index in the pool -> its call, its index there
        try:
            while self._wait_for_rows(model):
                self._start_rows(model, owners)
                results: dict[_RunningCall, list[tuple[int, bytes]]] = {}
                for row in model.collect(last=not self._calls):
                    call, number = owners.pop(row.index)
                    results.setdefault(call, []).append((number, row.line))
                for call, lines in results.items():
                    call.send(lines)
        except BaseException as exc:
            self._failure = exc
        with self._changed:
            self._is_closed = True
            ended = {call for call, _ in owners.values()} | set(self._calls)
        for call in ended:
            call.send(self._failure or InputError("the LLM was closed", "read the results before close()"))
        model.close()

    def _wait_for_rows(self, model: LoadedModel) -> bool:
        """Wait until there is something to run. Return whether the model is still wanted."""
        with self._changed:
            while not self._is_closed and not self._calls and model.pool.is_idle:
                self._changed.wait()
            return not self._is_closed

    def _start_rows(self, model: LoadedModel, owners: dict[int, tuple[_RunningCall, int]]) -> None:
        """Give rows to the pool: one of each call in turn, so that a long call does not delay a short one."""
        with self._changed:
            while self._calls and model.pool.has_room:
                call = self._calls.popleft()
                if not call.is_open:
                    continue
                row = call.waiting.popleft()
                if call.waiting:
                    self._calls.append(call)
                assert row.number is not None
                self._num_started += 1
                owners[self._num_started] = call, row.number
                model.pool.submit(RawRow(self._num_started, row.data, row.sampling, row.number))

    def close(self) -> None:
        """End the calls that run, free the model and end the workers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)


class _RunningCall:
    """A call, between its event loop and the thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.waiting: deque[RawRow] = deque()  # rows that the pool does not have yet
        self.is_open = True  # False: nobody wants the results
        self._loop = loop
        self._results: asyncio.Queue[list[tuple[int, bytes]] | BaseException] = asyncio.Queue()

    async def receive(self) -> list[tuple[int, bytes]]:
        """Wait for results: (index, line). It raises the error that ended the thread."""
        results = await self._results.get()
        if isinstance(results, BaseException):
            raise results
        return results

    def send(self, results: list[tuple[int, bytes]] | BaseException) -> None:
        """Give results to the event loop. The thread calls it."""
        if self.is_open:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
                self._loop.call_soon_threadsafe(self._results.put_nowait, results)
