"""`specbatch estimate`: how long a file will take, from its tokens and a short trial of some of its rows.

Prompts are tokenized, all of them, so their tokens are exact. Lengths of completions and speeds come from the trial,
which runs rows of the file as the job would. The rest of the file is simulated: requests of the lengths that the trial
has seen share the engine's batch. The range is that of simulations with other draws of the trial's rows.
"""

from __future__ import annotations

import heapq
import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbatch.counts import EngineStats
from specbatch.errors import InputError
from specbatch.job.row_queue import RowPreparer
from specbatch.job.runner import RowRunner
from specbatch.results.finished import Finished
from specbatch.rows.sources import RawRow, Source
from specbatch.types import EngineLimits

_DRAWS = 40  # simulations
_QUANTILES = (0.05, 0.95)  # quantiles of the simulations that bound the range
_SPEED_NOISE = 0.05  # relative variation of a machine's speed from one run to the next
_ROWS_SHOWN = 100  # rows from one message about progress to the next
_MIN_LATER = 4  # requests that started after the first round, to take their time for that of others
_SHOWN = "specbatch generate shows the error of each row"
_MAX_SIMULATED = 8000  # requests; the middle of a longer file is like that of these

Floats = NDArray[np.float64]


@dataclass
class FileTokens:
    """The work that a file asks for. Lists have an entry for each request."""

    num_rows: int = 0
    num_failed: int = 0  # rows that cannot run
    prompts: array[int] = field(default_factory=lambda: array("q"))  # tokens
    limits: array[int] = field(default_factory=lambda: array("q"))  # tokens that a completion may have
    shared: int = 0  # tokens that all prompts begin with
    drawn: list[RawRow] = field(default_factory=list)  # rows for the trial
    drawn_prompts: list[int] = field(default_factory=list)  # tokens, of each request of these rows

    def work_ratio(self, started: int) -> float:
        """Return the ratio of prompt tokens, without the shared ones: the mean of the file over the mean of the first
        requests of the trial."""
        file, drawn = (
            np.mean(prompts) - self.shared for prompts in (self.prompts, self.drawn_prompts[:started] or [0])
        )
        return float(file / drawn) if file > 0 and drawn > 0 else 1.0


def count_tokens(
    source: Source,
    prepare: RowPreparer,
    limits: EngineLimits,
    num_drawn: int,
    seed: int,
    group: int | None = None,
    show: Callable[[str], object] = lambda state: None,
) -> FileTokens:
    """Read and prepare the whole source; draw rows evenly from it. They come in groups of `group` rows, each drawn from
    the whole file and in its order. None: one group. `show` takes how far it is. Raises InputError if no row can
    run."""
    found, draw = FileTokens(), random.Random(seed)
    drawn: list[tuple[RawRow, list[int]]] = []
    common: Sequence[int] | None = None
    for raw in source.rows():
        found.num_rows += 1
        if found.num_rows % _ROWS_SHOWN == 0:
            show(f"{found.num_rows:,}" + (f" of {source.total:,} rows" if source.total else " rows"))
        [row] = prepare([raw])
        if row.error is not None:
            found.num_failed += 1
            continue
        tokens = row.token_ids
        common = tokens if common is None else _common(common, tokens)
        # A row that scores choices generates nothing.
        limit = 0 if row.choices else min(row.params.max_tokens, limits.max_prompt_tokens + 1 - len(tokens))
        prompts = [len(tokens)] * row.num_requests
        found.prompts.extend(prompts)
        found.limits.extend([limit] * row.num_requests)
        if len(drawn) < num_drawn:  # reservoir sampling (Vitter 1985)
            drawn.append((raw, prompts))
        elif (at := draw.randrange(found.num_rows - found.num_failed)) < num_drawn:
            drawn[at] = (raw, prompts)
    if not found.num_rows:
        raise InputError(f"{source.name} has no rows", "name a file with rows")
    if not drawn:
        raise InputError(f"{source.name} has no row that can run", _SHOWN)
    found.shared = len(common or ())
    draw.shuffle(drawn)
    size = group or len(drawn)
    for first in range(0, len(drawn), size):
        for raw, prompts in sorted(drawn[first : first + size], key=lambda entry: entry[0].index):
            found.drawn.append(raw)
            found.drawn_prompts += prompts
    return found


def _common(first: Sequence[int], second: Sequence[int]) -> Sequence[int]:
    pairs = enumerate(zip(first, second, strict=False))
    return first[: next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))]


@dataclass
class Trial:
    """Measurements of a trial of some rows. `rounds`: (requests that ran, rounds, seconds) of each step that launched a
    round or waited for one. On a GPU the step that waits is a later one, and may launch none."""

    rows: int = 0
    seconds: float = 0.0
    start_seconds: float = 0.0  # the part of `seconds` before the first step
    sort_seconds: float = 0.0  # seconds to sort a row's result after the last row; `seconds` does not include them
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    # seconds to record CUDA graphs, once in a job; the two fields above do not include them
    capture_seconds: float = 0.0
    submitted: int = 0  # requests
    started: int = 0  # submitted requests that have started
    first_started: int = 0  # requests that started before the first round; later ones are computed in smaller pieces
    first_prefill_seconds: float = 0.0  # prefill seconds of `first_started`
    tokens: int = 0  # tokens of all completions
    request_rounds: float = 0.0  # rounds, each counted once for each request that ran in it
    rounds: list[tuple[int, int, float]] = field(default_factory=list)
    max_running: int = 0
    ended: list[tuple[int, bool]] = field(default_factory=list)  # (tokens, whether the completion ended by itself)
    acceptance_length: float | None = None

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens that a round adds to a request. The prefill gives the first token, which is not
        counted."""
        return (self.tokens - self.started) / self.request_rounds if self.request_rounds else 1.0

    def prefill_seconds_of(self, requests: int, ratio: float) -> float:
        """Return the prefill seconds of `requests` requests whose prompts are `ratio` times as long as those of the
        trial."""
        later = self.started - self.first_started
        if later < _MIN_LATER:
            return ratio * requests * self.prefill_seconds / max(self.started, 1)
        rest = (self.prefill_seconds - self.first_prefill_seconds) / later
        return ratio * (self.first_prefill_seconds + max(requests - self.first_started, 0) * rest)

    def round_seconds(self, batch: int, round_bytes: Callable[[int], float] = float) -> Floats:
        """[b] = seconds of a round of b requests, up to `batch`. A straight line through what was measured, over the
        bytes that a round reads: rounds of a few requests are rare in a trial. `round_bytes`: these bytes by the number
        of requests, in any unit."""
        sizes, seconds, weights = (np.array(column, dtype=np.float64) for column in _by_size(self.rounds))
        read = np.array([round_bytes(int(size)) for size in sizes])
        if len(sizes) > 1:
            slope, start = np.polyfit(read, seconds, 1, w=np.sqrt(weights))
            slope = max(slope, 0.0)
            start = max(float(np.average(seconds - slope * read, weights=weights)), 0.0)
        else:
            slope, start = 0.0, float(seconds[0]) if len(seconds) else 0.0
        line = start + slope * np.array([round_bytes(size) for size in range(batch + 1)])
        for size, measured, weight in zip(sizes.astype(int), seconds, weights, strict=True):
            if size <= batch:  # what was measured often needs no line
                line[size] = (weight * measured + 4 * line[size]) / (weight + 4)
        return np.asarray(line)


def _by_size(rounds: Sequence[tuple[int, int, float]]) -> tuple[list[int], list[float], list[int]]:
    """Sum rounds by size. Return the sizes (numbers of requests), the mean seconds of a round, and the numbers of
    rounds."""
    sums: dict[int, tuple[int, float]] = {}
    for size, count, seconds in rounds:
        before = sums.get(size, (0, 0.0))
        sums[size] = before[0] + count, before[1] + seconds
    sizes = sorted(sums)
    return sizes, [sums[size][1] / sums[size][0] for size in sizes], [sums[size][0] for size in sizes]


def run_trial(
    runner: RowRunner,
    rows: Sequence[RawRow],
    max_seconds: float,
    *,
    min_rows: int,
    min_seconds: float = 0.0,
    keep: Callable[[Finished], object] = lambda finished: None,
    show: Callable[[str], object] = lambda state: None,
) -> Trial:
    """Run `rows` to their ends, or for `max_seconds`. After the first `min_rows` of them, more are started for
    `min_seconds` only. `keep` takes the results, and `show` how far it is; their time counts. Raises InputError if no
    row has a token then."""
    engine, trial, added = runner.engine, Trial(), 0
    began, seconds = time.perf_counter(), 0.0
    while seconds < max_seconds:
        adds = added < (len(rows) if seconds < min_seconds else min(min_rows, len(rows)))
        if adds and runner.has_room:
            runner.add(rows[added])
            added += 1
            continue
        runner.start_rows()
        if not trial.seconds:  # the first rows are prepared while nothing runs
            trial.seconds = trial.start_seconds = time.perf_counter() - began
        if not runner.is_busy:
            _take(runner, trial, keep)
            if runner.is_empty and not adds:
                break
            seconds = time.perf_counter() - began
            continue
        stats = engine.stats
        before, running = _Counted.of(stats), max(engine.num_running, 1)
        runner.step()
        if stats.rounds > before.rounds and not trial.rounds:
            trial.first_started, trial.first_prefill_seconds = runner.load().num_admitted, trial.prefill_seconds
        _add_step(trial, running, _Counted.of(stats).since(before))
        trial.max_running = max(trial.max_running, engine.num_running)
        _take(runner, trial, keep)
        seconds = time.perf_counter() - began
        show(f"{trial.rows:,} of {added:,} rows have ended, {seconds:.0f} s of at most {max_seconds:.0f} s")
    trial.seconds = time.perf_counter() - began
    _take(runner, trial, keep)
    trial.ended += [(tokens, False) for tokens in engine.tokens_so_far().values() if tokens]
    trial.tokens = engine.stats.generated_tokens + sum(engine.tokens_so_far().values())
    if not trial.ended:
        if trial.rows == added:
            raise InputError(f"each of the {added} rows of the trial failed while it ran", _SHOWN)
        raise InputError(
            f"no row of the trial had a token after {trial.seconds:.0f} s", "--trial-seconds N lets them run longer"
        )
    load = runner.load()
    trial.submitted, trial.started = load.num_submitted, load.num_admitted
    trial.acceptance_length = engine.stats.speculation.acceptance_length
    return trial


class _Counted(NamedTuple):
    rounds: int
    decode: float  # these are seconds
    prefill: float
    capture: float  # a part of `decode` or `prefill`

    @classmethod
    def of(cls, stats: EngineStats) -> _Counted:
        return cls(stats.rounds, stats.decode_seconds, stats.prefill_seconds, stats.late_graph_seconds)

    def since(self, before: _Counted) -> _Counted:
        seconds = (self.decode - before.decode, self.prefill - before.prefill, self.capture - before.capture)
        return _Counted(self.rounds - before.rounds, *seconds)


def _add_step(trial: Trial, running: int, step: _Counted) -> None:
    decode, prefill = step.decode, step.prefill
    if step.capture > decode:
        prefill = max(prefill - step.capture, 0.0)
    else:
        decode -= step.capture
    trial.capture_seconds += step.capture
    trial.prefill_seconds += prefill
    trial.decode_seconds += decode
    if step.rounds:
        trial.rounds.append((running, step.rounds, decode))
        trial.request_rounds += running * step.rounds
    elif decode and trial.rounds:  # This step waited for the last round.
        trial.rounds.append((trial.rounds[-1][0], 0, decode))


def _take(runner: RowRunner, trial: Trial, keep: Callable[[Finished], object]) -> None:
    finished = runner.take()
    keep(finished)
    totals = finished.totals
    trial.rows += totals.rows
    for length, count in totals.lengths.items():
        trial.ended += [length] * count


@dataclass(frozen=True)
class Span:
    """An expected value and its range."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    completion_tokens: Span
    run_seconds: Span  # from the first row to the last; loading is not part of it
    prefill_seconds: float


def estimate(
    tokens: FileTokens, trial: Trial, *, max_batch_size: int, round_bytes: Callable[[int], float] = float
) -> Estimate:
    """Estimate the tokens and the time of the whole file. `round_bytes`: see `Trial.round_seconds`; by default a round
    reads what is in proportion to its requests, and what is the same for any number of them."""
    requests = len(tokens.limits)
    # The cache holds fewer requests than a batch if their prompts are long: then the trial ran fewer.
    is_full = trial.submitted > trial.max_running
    batch = max(min(max_batch_size, trial.max_running) if is_full else max_batch_size, 1)
    round_seconds = trial.round_seconds(batch, round_bytes)
    prefill = trial.prefill_seconds_of(requests, tokens.work_ratio(trial.started))
    counted = trial.start_seconds + trial.prefill_seconds + trial.decode_seconds + trial.capture_seconds
    other = max(trial.seconds - counted, 0.0) * requests / max(trial.started, 1) + trial.sort_seconds * tokens.num_rows
    step = max(requests // _MAX_SIMULATED, 1)
    limits = np.array(tokens.limits[::step], dtype=np.float64)
    rng = np.random.default_rng(0)
    sums, seconds = [], []
    for draw in range(_DRAWS + 1):
        ended = trial.ended
        if draw:  # the first one is of the trial as it was
            ended = [ended[i] for i in rng.integers(len(ended), size=len(ended))]
        lengths = np.minimum(draw_lengths(ended, len(limits), rng), limits)
        sums.append(lengths.mean() * requests)
        seconds.append(_decode_seconds(lengths, requests, round_seconds / trial.tokens_per_round, batch))
    total = np.array(seconds) + prefill + other + trial.capture_seconds
    low, high = np.quantile(total[1:], _QUANTILES)
    few, many = np.quantile(sums[1:], _QUANTILES)
    expected, tokens_expected = float(np.mean(total)), float(np.mean(sums))
    return Estimate(
        Span(tokens_expected, min(few, tokens_expected), max(many, tokens_expected)),
        Span(expected, min(low, expected) * (1 - _SPEED_NOISE), max(high, expected) * (1 + _SPEED_NOISE)),
        prefill,
    )


def draw_lengths(ended: Sequence[tuple[int, bool]], count: int, rng: np.random.Generator) -> Floats:
    """`count` lengths as if there were no limits, from completions of which some were cut short (the Kaplan-Meier
    estimate). Those that are longer than all that ended by themselves go on with the mean rate of ends."""
    lengths = np.array([tokens for tokens, _ in ended], dtype=np.float64)
    natural = np.array([by_itself for _, by_itself in ended], dtype=bool)
    order = np.lexsort((~natural, lengths))
    lengths, natural = lengths[order], natural[order]
    at_risk = np.arange(len(lengths), 0, -1)
    survival = np.cumprod(np.where(natural, 1 - 1 / at_risk, 1.0))
    uniform = rng.random(count)
    at = np.searchsorted(-survival, -uniform, side="left")
    inside = at < len(lengths)
    drawn = lengths[np.minimum(at, len(lengths) - 1)]
    rate = natural.sum() / max(lengths.sum(), 1)
    tail = rng.exponential(1 / rate, count) if rate else np.full(count, np.inf)
    return np.asarray(np.where(inside, drawn, lengths[-1] + tail))


def _decode_seconds(lengths: Floats, requests: int, token_seconds: Floats, batch: int) -> float:
    """Return the decode seconds of `requests` requests. `lengths` has the completions' lengths of a sample of them.
    `token_seconds`: [b] = seconds in which each of b requests writes a token. Requests start in their order, as soon as
    another one ends."""
    ends: list[float] = []
    now = seconds = 0.0
    waiting = iter(lengths.tolist())
    for length in waiting:
        length = max(length - 1, 0.0)  # the prefill writes the first token
        if len(ends) < batch:
            heapq.heappush(ends, now + length)
            continue
        end = heapq.heapreplace(ends, ends[0] + length)
        seconds += (end - now) * token_seconds[batch]
        now = end
    while ends:
        size, end = len(ends), heapq.heappop(ends)
        seconds += (end - now) * token_seconds[size]
        now = end
    rest = requests - len(lengths)
    return float(seconds + rest * (lengths.mean() - 1) * token_seconds[batch] / batch)
