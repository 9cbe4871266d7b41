"""The loop of a file job: read -> tokenize -> engine -> write, with a bounded number of rows in flight."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType

from specbatch.config import Config
from specbatch.errors import NOT_FINITE, NOT_FINITE_HINT, InputError, RowError
from specbatch.job.eta import Work
from specbatch.job.progress import JobProgress, Snapshot
from specbatch.job.remarks import Remarks, low_acceptance_warning
from specbatch.job.results import ResultFile
from specbatch.job.results_format import Choice, RowInfo, error_line, result_line
from specbatch.job.rows import Prompt, RowParser
from specbatch.job.sources import RawRow, Source
from specbatch.job.stats import Session
from specbatch.job.tokenizer import TextProcessor
from specbatch.signals import INTERRUPTED, on_signals
from specbatch.types import BatchEngine, Completion, FinishReason, Request, RngKey, SpeculationCounts

_WAITING_BATCHES = 2  # of requests that wait in the engine; then no more rows are read
_MAX_MESSAGE_CHARS = 500  # error messages quote the row: its mistake must not make a line of the output long
_KEPT = "finished rows whose input line is the same are kept"


class _InputChanged(InputError):
    """The input is not the one that the job began with, or cannot be read to its end."""


@dataclass(slots=True)
class _RowInFlight:
    digest: int  # of the input row
    row: RowInfo
    prompt: Prompt
    prompt_tokens: int
    completions: list[Completion | None] = field(default_factory=list)


@dataclass
class FileJob:
    """One run over a source. `config`: the resolved one. `load_engine` loads the model; it is called when the first row
    needs it."""

    source: Source
    parser: RowParser
    texts: TextProcessor
    results: ResultFile
    load_engine: Callable[[], BatchEngine]
    remarks: Remarks
    progress: JobProgress
    config: Config
    limit: int | None = None
    low_acceptance: str | None = None  # likely causes, if hardly any draft is accepted; None: no warning
    warn: Callable[[str], None] = lambda warning: None
    session: Session = field(default_factory=Session, init=False)
    interrupted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        batch = self.config.engine.max_batch_size
        assert batch is not None, "resolve() decides it"
        self._max_waiting = _WAITING_BATCHES * batch
        self._in_flight: dict[int, tuple[_RowInFlight, int]] = {}  # request id -> (row, index of the completion)
        self._rows_seen = self._lines_seen = 0  # of the input; blank lines are lines, not rows
        self._rows_started = 0  # of the rows seen, those that were not finished before
        self._num_requests = 0
        self._exhausted = False

    @property
    def total(self) -> int | None:
        """Rows to run, those of earlier sessions included; None: unknown."""
        total = self.source.total
        return total if self.limit is None or total is None else min(total, self.limit)

    def run(self) -> bool:
        """Run all rows that are not finished; False if a signal ended it early. What is finished is always written.

        Raises InputError if the input cannot be read to its end, or has changed. The input of the next session can then
        be another: rows that are the same there are kept.
        """
        try:
            self._run_rows(self._unfinished_rows(self.source))
            if not self.interrupted:
                self._check_input()
        except _InputChanged as exc:
            self.results.release_input()
            raise InputError(exc.message, exc.hint) from exc
        return not self.interrupted

    def _run_rows(self, rows: Iterator[RawRow]) -> None:
        first = next(rows, None)
        if first is None:
            return
        began = time.perf_counter()
        engine = self.load_engine()
        self.session.load_seconds = time.perf_counter() - began
        self.session.engine = engine.stats
        with on_signals(self._on_signal):
            self._loop(engine, itertools.chain([first], rows))
        self.session.engine = engine.stats

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first SIGINT or SIGTERM ends the loop after the current step; a second one ends the process at once."""
        if self.interrupted:
            os._exit(INTERRUPTED)
        self.interrupted = True

    def _unfinished_rows(self, source: Source) -> Iterator[RawRow]:
        try:
            for row in itertools.islice(source.rows(), self.limit):
                self._rows_seen += 1
                self._lines_seen = row.index + 1
                if not self.results.is_done(row):
                    yield row
        except InputError as exc:
            raise _InputChanged(exc.message, f"repair it, and run the same command again: {_KEPT}") from exc

    def _check_input(self) -> None:
        """Check that the rows that were read are those of the input as the statistics identify it."""
        source = self.source
        if source.reopen is None or not source.touched():
            return
        try:
            now = source.reopen()
            same = now.identity == source.identity and next(self._unfinished_rows(now), None) is None
        except (InputError, OSError):  # removed or damaged meanwhile
            same = False
        if not same:
            raise _InputChanged(
                f"the input {source.name} changed while the job was running", f"run the same command again: {_KEPT}"
            )

    def _loop(self, engine: BatchEngine, rows: Iterator[RawRow]) -> None:
        while not self.interrupted:
            began = time.perf_counter()
            # Enough requests wait for the engine to fill its batch at once. More would only take memory.
            while not self._exhausted and not self.interrupted and engine.num_waiting < self._max_waiting:
                raw = next(rows, None)
                if raw is None:
                    self._exhausted = True
                else:
                    self._start(engine, raw)
                self._show_progress(engine)
            self.session.io_seconds += time.perf_counter() - began
            if self.interrupted or (self._exhausted and not self._in_flight):
                return
            completions = engine.step()
            began = time.perf_counter()
            for completion in completions:
                self._finish(completion)
            if completions and (warning := low_acceptance_warning(engine.stats.speculation, self.low_acceptance)):
                self.warn(warning)
                self.low_acceptance = None  # once is enough
            self._show_progress(engine)
            self.session.io_seconds += time.perf_counter() - began

    def _start(self, engine: BatchEngine, raw: RawRow) -> None:
        digest = raw.digest()
        self._rows_started += 1
        row, prompt = self.parser.parse(raw)
        self.remarks.add(row)
        try:
            if isinstance(prompt, RowError):
                raise prompt
            token_ids = self.texts.encode(prompt, engine.limits)
        except RowError as exc:
            self._fail(row, digest, exc)
            return
        params = prompt.params
        in_flight = _RowInFlight(digest, row, prompt, len(token_ids), [None] * prompt.num_requests)
        for sample in range(prompt.num_requests):
            # A row's own seed gives the same text wherever the row is. Any other seed is combined with the row's index.
            if prompt.own_seed and params.seed is not None:
                rng = RngKey(params.seed, 0, sample)
            else:
                seed = self.config.engine.seed if params.seed is None else params.seed
                rng = RngKey(seed, row.index, sample)
            request_id = self._num_requests
            self._num_requests += 1
            self._in_flight[request_id] = (in_flight, sample)
            engine.submit(Request(request_id, token_ids, params, rng, self.texts.stop_check(params)))

    def _finish(self, completion: Completion) -> None:
        in_flight, sample = self._in_flight.pop(completion.request_id)
        in_flight.completions[sample] = completion
        done = [c for c in in_flight.completions if c is not None]
        if len(done) < len(in_flight.completions):
            return
        row, params = in_flight.row, in_flight.prompt.params
        if any(c.finish_reason is FinishReason.ERROR for c in done):
            self._fail(row, in_flight.digest, _not_finite(done))
            return
        choices = [
            Choice(self.texts.final_text(c, params), c.token_ids, c.finish_reason, c.logprobs, c.speculation)
            for c in done
        ]
        # The others are copies. They took no rounds, so that sums over choices are what was computed.
        copy = replace(choices[0], speculation=SpeculationCounts())
        choices += [copy] * (params.n - len(choices))
        line = result_line(
            row,
            in_flight.prompt_tokens,
            choices,
            self.texts.token_text,
            model=self.config.model.target,
            simulated=self.config.speculation.simulate_acceptance is not None,
        )
        self.results.append(row.index, in_flight.digest, line)
        self.session.rows += 1

    def _fail(self, row: RowInfo, digest: int, error: RowError) -> None:
        if len(error.message) > _MAX_MESSAGE_CHARS:
            error = RowError(error.type, error.message[: _MAX_MESSAGE_CHARS - 3] + "...")
        self.results.append(row.index, digest, error_line(row, error))
        self.session.rows += 1

    def _show_progress(self, engine: BatchEngine) -> None:
        if not self.progress.due():
            return
        totals, stats = self.results.totals, engine.stats
        rows_in_flight = self._rows_started - self.session.rows
        total = self.total
        unread = None
        if self._exhausted:
            total, unread = totals.rows + rows_in_flight, 0.0
        elif total is not None:
            rows = total * self._rows_seen / max(self._lines_seen, 1)
            unread = max(rows - totals.rows - rows_in_flight, 0) * self._num_requests / max(self._rows_started, 1)
        so_far = engine.tokens_so_far()
        max_tokens = {
            request_id: min(row.prompt.params.max_tokens, engine.limits.max_prompt_tokens + 1 - row.prompt_tokens)
            for request_id, (row, _) in self._in_flight.items()
        }
        work = Work(
            tokens=stats.generated_tokens,
            prefill_seconds=stats.prefill_seconds,
            admitted=self._num_requests - len(self._in_flight) + len(so_far),
            finished=totals.lengths,
            running=[(tokens, max_tokens[request_id]) for request_id, tokens in so_far.items()],
            waiting=[limit for request_id, limit in max_tokens.items() if request_id not in so_far],
            unread=unread,
        )
        self.progress.show(
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


def _not_finite(completions: Sequence[Completion]) -> RowError:
    """One completion without an end makes the row an error: the other completions are not returned."""
    number, first = next((i, c) for i, c in enumerate(completions, 1) if c.finish_reason is FinishReason.ERROR)
    of = f" of completion {number} of {len(completions)}" if len(completions) > 1 else ""
    return RowError("non_finite", f"{NOT_FINITE} at token {len(first.token_ids) + 1}{of}: {NOT_FINITE_HINT}")
