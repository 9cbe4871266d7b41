"""Rows in, result lines out: everything that one engine does for a row."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specbatch.config import Config
from specbatch.counts import EngineStats, SpeculationCounts
from specbatch.errors import NOT_FINITE, NOT_FINITE_HINT, RowError
from specbatch.job.energy import EnergyMeter, gpu_uuid
from specbatch.job.row_queue import RowPreparer, RowQueue
from specbatch.results.finished import Finished, remark_on
from specbatch.results.logprob_json import LogprobJson
from specbatch.results.results_format import Choice, choice_of, error_line, failed_choice, result_line
from specbatch.rows.choice_scoring import choice_scores
from specbatch.rows.parser import RowParser
from specbatch.rows.row import Row
from specbatch.rows.sources import RawRow
from specbatch.rows.tokenizer import TextProcessor
from specbatch.types import (
    GRAMMAR_FIELDS,
    NO_MARGIN,
    BatchEngine,
    Completion,
    FinishReason,
    Margin,
    Request,
    RngKey,
    SamplingParams,
)

# The most requests that wait in a full engine: this part of a batch, but at least 4. Then no more rows are started.
_WAITING_BATCHES, _MIN_WAITING = 0.25, 4
_MIN_QUEUED = 8  # rows that are prepared for the engine: as many as it runs at once, and at least this number
_PATIENCE_SECONDS = 2.0  # the time that an engine with rows waits for the next one
_MAX_UNREAD = 256  # rows that failed at once and were not taken yet; then no more rows are started
_MAX_MESSAGE_CHARS = 500  # error messages quote the row: its mistake must not make a line of the output long


@dataclass(slots=True)
class Load:
    """The work that an engine has done since it was built, and the work that it has to do. Numbers count requests."""

    stats: EngineStats = field(default_factory=EngineStats)
    num_submitted: int = 0  # requests that are submitted, or about to be
    num_admitted: int = 0
    running: list[tuple[int, int]] = field(default_factory=list)  # (tokens so far, limit) of requests that have started
    waiting: list[int] = field(default_factory=list)  # the limits of the other requests
    num_unprepared: int = 0  # rows whose requests are not known yet


class RowRunner:
    """A runner of rows on one engine. `config`: the resolved one, which decides the result line of a row."""

    def __init__(self, engine: BatchEngine, texts: TextProcessor, config: Config) -> None:
        batch = config.engine.rows_at_once
        self.engine = engine
        self._texts = texts
        self._logprob_json = LogprobJson(texts.pieces)
        self._config = config
        self._batch = batch
        self._max_started = batch + max(_MIN_WAITING, int(_WAITING_BATCHES * batch))
        self._queue: RowQueue | None = None  # None: there was no row yet
        self._in_flight: dict[int, tuple[Row, int]] = {}  # request id -> (row, index of the completion)
        self._num_submitted = 0
        self._finished = Finished()
        self._energy = EnergyMeter(gpu_uuid(config.engine.device))

    @property
    def has_room(self) -> bool:
        """True if `add` should be called. Otherwise more rows would only take memory."""
        return self._num_queued < max(_MIN_QUEUED, self._batch) and not self.is_full

    @property
    def is_full(self) -> bool:
        """True if `take` should be called before more rows are started."""
        return len(self._finished.rows) >= _MAX_UNREAD

    @property
    def is_busy(self) -> bool:
        """True if `step` has something to do."""
        return bool(self._in_flight)

    @property
    def is_empty(self) -> bool:
        """True if `take` has returned each row that was added."""
        return not (self._num_queued or self._in_flight or self._finished.rows)

    def add(self, raw: RawRow) -> None:
        """Queue a row. It is parsed and tokenized meanwhile."""
        if self._queue is None:
            self._queue = RowQueue(self.preparer(), self._texts.stop_late)
        self._queue.add(raw)

    def preparer(self) -> RowPreparer:
        """Make the preparer, which decides which rows can run."""
        parser = RowParser.of_job(self._config)
        no_grammars = _without_grammars(self._config)
        is_ngram = self._config.speculation.method in ("ngram", "suffix", "hybrid")
        return RowPreparer(parser, self._texts, self.engine.limits, no_grammars, is_ngram)

    def drop(self, indices: Collection[int]) -> None:
        """Leave these rows out, if they have not been started."""
        if self._queue is not None:
            self._queue.drop(indices)

    def start_rows(self) -> None:
        """Give queued rows to the engine: what fills its batch, and a few more. It waits for rows that are not prepared
        yet, so that what runs together does not depend on the speed of their preparation. Only where one takes very
        long, such as the compilation of a huge grammar, the engine goes on with the rows that it has."""
        engine, queue = self.engine, self._queue
        while queue and not self.is_full and engine.num_running + engine.num_waiting < self._max_started:
            row = queue.take(_PATIENCE_SECONDS if self.is_busy else math.inf)
            if row is None:
                break
            self._start(row)

    def _start(self, row: Row) -> None:
        if row.error is not None:
            self._fail(row, row.error)
            return
        params = row.params
        num_generated = 0 if row.choices else row.num_requests
        try:  # most are compiled already; one that was forgotten since is compiled again, which can fail
            grammars = [self._texts.matcher(row) or (None, None) for _ in range(num_generated)]
        except RowError as error:
            self._fail(row, error)
            return
        row.results = [None] * row.num_requests
        for number, choice in enumerate(row.choice_tokens):
            if isinstance(choice, RowError):
                row.results[number] = choice
                continue
            request_id = self._add_request(row, number)
            self.engine.submit(Request(request_id, choice.token_ids, choice.params, RngKey(0, row.index, 0)))
        for sample, grammar in enumerate(grammars):
            # A row's own seed gives the same text wherever the row is. Any other seed is combined with the row's index.
            if row.own_seed and params.seed is not None:
                rng = RngKey(params.seed, 0, sample)
            else:
                seed = self._config.engine.seed if params.seed is None else params.seed
                rng = RngKey(seed, row.index, sample)
            request_id, check_stop = self._add_request(row, sample), self._texts.stop_check(params)
            request = Request(request_id, row.token_ids, params, rng, check_stop, row.bad_words, *grammar)
            request.predicted_token_ids = row.predicted_ids
            if check_stop is not None:
                request.stop_spec = self._texts.stop_spec
            self.engine.submit(request)

    def _first_text(self, row: Row) -> int | None:
        """See `LogprobJson.prompt`."""
        params = row.params
        if params.prompt_logprobs is None or (first := self._texts.pieces.first_of(row.token_ids)) is None:
            return None
        begin = max(1, params.prompt_logprobs_start)
        return first - begin if first >= begin else None

    def _add_request(self, row: Row, number: int) -> int:
        """The id of a row's next request."""
        request_id = self._num_submitted
        self._num_submitted += 1
        self._in_flight[request_id] = (row, number)
        return request_id

    def step(self) -> None:
        """One step of the engine."""
        for completion in self.engine.step():
            self._complete(completion)

    def take(self) -> Finished:
        """The rows that finished since the last call."""
        taken, self._finished = self._finished, Finished()
        return taken

    @property
    def stats(self) -> EngineStats:
        """The statistics of the engine, with the energy and the time in which it waited for rows."""
        stats = self.engine.stats
        stats.input_wait_seconds = self._queue.waited_seconds if self._queue is not None else 0.0
        stats.joules = self._energy.joules(fresh=self.is_empty) or 0.0
        return stats

    def load(self) -> Load:
        so_far = self.engine.tokens_so_far()
        limits = {request_id: self._limit(row) for request_id, (row, _) in self._in_flight.items()}
        prepared = self._queue.prepared() if self._queue is not None else []
        queued = [self._limit(row) for row in prepared if row.error is None for _ in range(row.num_requests)]
        return Load(
            self.stats,
            self._num_submitted + len(queued),
            num_admitted=self._num_submitted - len(limits) + len(so_far),
            running=[(tokens, limits[request_id]) for request_id, tokens in so_far.items()],
            waiting=[*(limit for request_id, limit in limits.items() if request_id not in so_far), *queued],
            num_unprepared=self._num_queued - len(prepared),
        )

    def _limit(self, row: Row) -> int:
        """The most tokens of a completion."""
        if row.choices:
            return 1
        return min(row.params.max_tokens, self.engine.limits.max_prompt_tokens + 1 - len(row.token_ids))

    def rows_in_flight(self) -> set[int]:
        """The indices of the rows that were started and have not finished."""
        return {row.key for row, _ in self._in_flight.values()}

    def stop_waiting(self) -> None:
        """The job ends: rows that are not prepared do not start. It can be called by a handler of signals."""
        if self._queue is not None:
            self._queue.stop_waiting()

    def close(self) -> None:
        """Stop preparing rows."""
        self._texts.close()
        if self._queue is not None:
            self._queue.close()

    @property
    def _num_queued(self) -> int:
        return len(self._queue) if self._queue is not None else 0

    def _complete(self, completion: Completion) -> None:
        row, sample = self._in_flight.pop(completion.request_id)
        results = row.results
        failed = completion.finish_reason is FinishReason.ERROR
        results[sample] = _failure(completion, sample, len(results), row.params) if failed else completion
        done = [result for result in results if result is not None]
        if len(done) < len(results):
            return
        errors = [result for result in done if isinstance(result, RowError)]
        if len(errors) == len(done):
            self._fail(row, errors[0])
        elif row.choices:
            self._add_scores(row, done, errors)
        else:
            self._add_completions(row, done, errors)

    def _add_completions(self, row: Row, done: Sequence[Completion | RowError], errors: Sequence[RowError]) -> None:
        """The line of a row of which at least one completion finished."""
        params = row.params
        choices = [
            failed_choice(_bounded(c))
            if isinstance(c, RowError)
            else choice_of(c, row.reader.read(self._texts.final_text(c, params)))
            for c in done
        ]
        # The others are copies. They took no rounds, so that sums over choices are what was computed.
        copy = replace(choices[0], speculation=SpeculationCounts())
        choices += [copy] * (params.n - len(choices))
        first = done[0]
        # Only greedy completions have a margin, and of these one is computed.
        margin = NO_MARGIN if isinstance(first, RowError) else first.margin
        line = result_line(
            row,
            choices,
            self._logprob_json,
            model=self._config.model.target,
            simulated=self._config.speculation.simulate_acceptance is not None,
            margin=margin if self._config.output.certificate else NO_MARGIN,
            prompt_logprobs=None if isinstance(first, RowError) else first.prompt_logprobs,
            from_first=params.prompt_logprobs_start == 0,
            first_text=self._first_text(row),
            error=_bounded(errors[0]) if errors else None,
        )
        self._add(row, line, margin)

    def _add_scores(self, row: Row, done: Sequence[Completion | RowError], errors: Sequence[RowError]) -> None:
        """The line of a row that scores choices: its text is the likeliest one, if all of them have a score."""
        scores = choice_scores(row.choices, [_bounded(c) if isinstance(c, RowError) else c for c in done])
        best = max(scores, key=lambda score: -math.inf if score["logprob"] is None else score["logprob"])
        choice = Choice(best["text"], [], FinishReason.STOP, None, SpeculationCounts())
        model = self._config.model.target
        error = _bounded(errors[0]) if errors else None
        line = result_line(row, [choice], self._logprob_json, model=model, choice_scores=scores, error=error)
        self._add(row, line)

    def _fail(self, row: Row, error: RowError) -> None:
        self._add(row, failed_line(row, error))

    def _add(self, row: Row, line: dict[str, Any], margin: Margin = NO_MARGIN) -> None:
        self._finished.add(row.key, row.digest, line, remark_on(row), margin)


def _without_grammars(config: Config) -> str | None:
    """The option with which no grammars run, if it is set: a simulated acceptance commits tokens that a grammar
    forbids."""
    return None if config.speculation.simulate_acceptance is None else "speculation.simulate_acceptance"


def failed_row(raw: RawRow, error: RowError, parser: RowParser) -> Finished:
    """A row that does not run."""
    row = parser.parse(raw)
    finished = Finished()
    finished.add(row.key, row.digest, failed_line(row, error), remark_on(row))
    return finished


def failed_line(row: Row, error: RowError) -> dict[str, Any]:
    """The result line of a row that failed, with a message of bounded length."""
    return error_line(row, _bounded(error))


def _bounded(error: RowError) -> RowError:
    if len(error.message) <= _MAX_MESSAGE_CHARS:
        return error
    return RowError(error.type, error.message[: _MAX_MESSAGE_CHARS - 3] + "...")


def _failure(completion: Completion, sample: int, num_completions: int, params: SamplingParams) -> RowError:
    """Make the error of a completion that has no end."""
    of = f" of completion {sample + 1} of {num_completions}" if num_completions > 1 else ""
    at = f"at token {len(completion.token_ids) + 1}{of}"
    if completion.grammar_error is not None:
        option = next(name for name in (*GRAMMAR_FIELDS, "tool_choice") if getattr(params, name, name) is not None)
        return RowError("grammar_limit", f"{option} cannot be followed {at}: {completion.grammar_error}")
    if completion.no_token_left:
        from specbatch.engine.rules import NO_TOKEN_LEFT, forbidden_by  # here, because it imports torch

        return RowError("no_token_left", f"{NO_TOKEN_LEFT} {at}: {forbidden_by(params, params.bad_words)}")
    return RowError("non_finite", f"{NOT_FINITE} {at}: {NOT_FINITE_HINT}")
