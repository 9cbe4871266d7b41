"""The loop of a file job: read -> tokenise -> engine -> write, with a bounded number of rows in flight."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from specbatch.errors import NOT_FINITE, NOT_FINITE_HINT, InputError, RowError
from specbatch.job.eta import Work
from specbatch.job.openai_batch import openai_error, openai_result
from specbatch.job.progress import JobProgress, Snapshot
from specbatch.job.remarks import LowAcceptance, Remarks
from specbatch.job.results import ResultFile
from specbatch.job.results_format import Choice, native_error, native_result
from specbatch.job.rows import Job, RowHead, RowParser
from specbatch.job.sources import RawRow, Source
from specbatch.job.stats import Session
from specbatch.job.tokenizer import TextProcessor
from specbatch.signals import INTERRUPTED, on_signals
from specbatch.types import BatchEngine, Completion, FinishReason, Request, RngKey, SpeculationCounts

_MESSAGE_CHARS = 500  # error messages quote the row; a line of the output must not grow with what was wrong in it


_KEPT = "finished rows whose input line is the same are kept"


class _InputLost(InputError):
    """The input is not what the job was begun with."""


@dataclass(slots=True)
class _RowInFlight:
    digest: int  # of the input row
    head: RowHead
    job: Job
    prompt_tokens: int
    choices: list[Completion | None] = field(default_factory=list)


class FileJob:
    """One run over a source. `make_engine` loads the model; it is called once a row needs it, and not before."""

    def __init__(
        self,
        source: Source,
        parser: RowParser,
        texts: TextProcessor,
        results: ResultFile,
        make_engine: Callable[[], BatchEngine],
        remarks: Remarks,
        progress: JobProgress,
        *,
        model_name: str,
        seed: int,
        look_ahead: int,
        total: int | None,
        limit: int | None = None,
        simulated: bool = False,
        low_acceptance: LowAcceptance | None = None,
    ) -> None:
        assert look_ahead >= 1, look_ahead
        self.session = Session()
        self._source = source
        self._parser = parser
        self._texts = texts
        self._results = results
        self._make_engine = make_engine
        self._remarks = remarks
        self._model_name = model_name
        self._seed = seed
        self._look_ahead = look_ahead
        self._total = total
        self._limit = limit
        self._simulated = simulated
        self._progress = progress
        self._low_acceptance = low_acceptance
        self._in_flight: dict[int, tuple[_RowInFlight, int]] = {}  # request id -> (row, which of its completions)
        self._rows_passed = self._lines_passed = 0  # of the input; blank lines are no rows
        self._rows_read = 0  # of those, the ones that were not done before
        self._num_requests = 0
        self._exhausted = False
        self._interrupted = False

    def run(self) -> bool:
        """Run all rows that are not done; False where a signal ended it early. What is finished is always written.

        Raises InputError where the input cannot be read to its end, or is no longer what was read. The input of the
        next session may then be another: rows that are the same there are kept.
        """
        try:
            self._run_rows(self._unfinished_rows(self._source))
            if not self._interrupted:
                self._check_input()
        except _InputLost as exc:
            self._results.release_input()
            raise InputError(exc.message, exc.hint) from exc
        return not self._interrupted

    def _run_rows(self, rows: Iterator[RawRow]) -> None:
        first = next(rows, None)
        if first is None:
            return
        began = time.perf_counter()
        engine = self._make_engine()
        self.session.load_seconds = time.perf_counter() - began
        self.session.engine = engine.stats
        with self._signals():
            self._loop(engine, itertools.chain([first], rows))
        self.session.engine = engine.stats

    def _unfinished_rows(self, source: Source) -> Iterator[RawRow]:
        try:
            for row in itertools.islice(source.rows(), self._limit):
                self._rows_passed += 1
                self._lines_passed = row.index + 1
                if not self._results.is_done(row):
                    yield row
        except InputError as exc:
            raise _InputLost(exc.message, "repair it, and run the same command again: " + _KEPT) from exc

    def _check_input(self) -> None:
        """That the rows that were read are those of the input as it is named in the statistics."""
        source = self._source
        if source.reopen is None or not source.touched():
            return
        try:
            now = source.reopen()
            same = now.identity == source.identity and next(self._unfinished_rows(now), None) is None
        except (InputError, OSError):  # it is gone, or damaged by now
            same = False
        if not same:
            raise _InputLost(
                f"the input {source.name} was changed while the job was running", "run the same command again: " + _KEPT
            )

    def _loop(self, engine: BatchEngine, rows: Iterator[RawRow]) -> None:
        while not self._interrupted:
            began = time.perf_counter()
            # Enough rows wait for the engine to fill its batch at once, and never more than that in memory.
            while not self._exhausted and not self._interrupted and engine.num_waiting < self._look_ahead:
                raw = next(rows, None)
                if raw is None:
                    self._exhausted = True
                else:
                    self._start(engine, raw)
                self._show(engine)
            self.session.io_seconds += time.perf_counter() - began
            if self._interrupted or (self._exhausted and not self._in_flight):
                return
            completions = engine.step()
            began = time.perf_counter()
            for completion in completions:
                self._finish(completion)
            if completions and self._low_acceptance is not None:
                self._low_acceptance.look(engine.stats.speculation)
            self._show(engine)
            self.session.io_seconds += time.perf_counter() - began

    def _start(self, engine: BatchEngine, raw: RawRow) -> None:
        digest = raw.digest()
        self._rows_read += 1
        head, job = self._parser.parse(raw)
        self._remarks.add(head)
        if isinstance(job, RowError):
            self._fail(head, digest, job)
            return
        try:
            prompt = self._texts.encode(job, engine.limits)
        except RowError as exc:
            self._fail(head, digest, exc)
            return
        params = job.params
        row = _RowInFlight(digest, head, job, len(prompt), [None] * job.num_computed)
        for sample in range(job.num_computed):
            # A seed that the row gives is used alone, at any place of the file; the job's seed is keyed by the row.
            if job.own_seed and params.seed is not None:
                rng = RngKey(params.seed, 0, sample)
            else:
                rng = RngKey(self._seed if params.seed is None else params.seed, head.index, sample)
            request_id = self._num_requests
            self._num_requests += 1
            self._in_flight[request_id] = (row, sample)
            engine.submit(Request(request_id, prompt, params, rng, self._texts.stop_check(params)))

    def _finish(self, completion: Completion) -> None:
        row, sample = self._in_flight.pop(completion.request_id)
        row.choices[sample] = completion
        done = [c for c in row.choices if c is not None]
        if len(done) < len(row.choices):
            return
        if any(completion.finish_reason is FinishReason.ERROR for completion in done):
            self._fail(row.head, row.digest, _not_finite(done))
            return
        choices = [self._choice(completion, row.job) for completion in done]
        # The others are copies. They took no rounds, so that sums over choices are what was computed.
        copy = replace(choices[0], speculation=SpeculationCounts())
        choices += [copy] * (row.job.params.n - len(choices))
        head = row.head
        if head.envelope is None:
            line = native_result(
                head.index,
                head.id,
                head.metadata,
                row.prompt_tokens,
                choices,
                self._texts,
                simulated=self._simulated,
            )
        else:
            line = openai_result(
                head.index,
                head.envelope,
                self._model_name,
                row.prompt_tokens,
                choices,
                self._texts,
                simulated=self._simulated,
            )
        self._write(head.index, row.digest, line)

    def _choice(self, completion: Completion, job: Job) -> Choice:
        text = self._texts.final_text(completion, job.params)
        return Choice(text, completion.token_ids, completion.finish_reason, completion.logprobs, completion.speculation)

    def _fail(self, head: RowHead, digest: int, error: RowError) -> None:
        if len(error.message) > _MESSAGE_CHARS:
            error = RowError(error.type, error.message[: _MESSAGE_CHARS - 3] + "...")
        if head.envelope is None:
            line = native_error(head.index, head.id, head.metadata, error)
        else:
            line = openai_error(head.index, head.envelope, error)
        self._write(head.index, digest, line)

    def _write(self, index: int, digest: int, line: dict[str, Any]) -> None:
        self._results.append(index, digest, line)
        self.session.rows += 1

    def _show(self, engine: BatchEngine) -> None:
        if not self._progress.due():
            return
        totals, stats = self._results.totals, engine.stats
        rows_in_flight = self._rows_read - self.session.rows
        total = self._total
        unread = None
        if self._exhausted:
            total, unread = totals.rows + rows_in_flight, 0.0
        elif total is not None:
            rows = total * self._rows_passed / max(self._lines_passed, 1)
            unread = max(rows - totals.rows - rows_in_flight, 0) * self._num_requests / max(self._rows_read, 1)
        so_far = engine.tokens_so_far()
        limits = {
            number: min(row.job.params.max_tokens, engine.limits.max_prompt_tokens + 1 - row.prompt_tokens)
            for number, (row, _) in self._in_flight.items()
        }
        work = Work(
            tokens=stats.generated_tokens,
            prefill_seconds=stats.prefill_seconds,
            admitted=self._num_requests - len(self._in_flight) + len(so_far),
            finished=totals.lengths,
            under_way=[(tokens, limits[number]) for number, tokens in so_far.items()],
            queued=[limit for number, limit in limits.items() if number not in so_far],
            unread=unread,
        )
        self._progress.show(
            Snapshot(
                done=totals.rows,
                failed=totals.failed,
                total=total,
                acceptance_length=stats.speculation.acceptance_length,
                running=engine.num_running,
                waiting=engine.num_waiting,
                work=work,
            )
        )

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the loop after the current step; a second one ends the process at once."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._interrupted:
                os._exit(INTERRUPTED)
            self._interrupted = True

        with on_signals(on_signal):
            yield


def _not_finite(completions: Sequence[Completion]) -> RowError:
    """One completion without an end makes the row an error: what the others say is not returned."""
    number, first = next((i, c) for i, c in enumerate(completions, 1) if c.finish_reason is FinishReason.ERROR)
    of = f" of completion {number} of {len(completions)}" if len(completions) > 1 else ""
    return RowError("non_finite", f"{NOT_FINITE} at token {len(first.token_ids) + 1}{of}: {NOT_FINITE_HINT}")
