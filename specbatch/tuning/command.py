"""`specbatch tune`: sample, trace, measure, search, confirm, write."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from specbatch.config import Config, ScheduleSection
from specbatch.engine.build import Built
from specbatch.engine.resolve import ResolvedRun
from specbatch.errors import ConfigError
from specbatch.graphs.runner import ladder
from specbatch.pipeline.fingerprint import job_fingerprint
from specbatch.pipeline.rows import RowParser
from specbatch.pipeline.sources import open_source
from specbatch.pipeline.stats import device_name, versions
from specbatch.pipeline.tokenizer import TextProcessor, with_chat_template_text
from specbatch.speculation.tree import DraftShape
from specbatch.tuning.candidates import Candidate
from specbatch.tuning.confirm import Live, confirm, repeated, speedups
from specbatch.tuning.costs import KINDS, CostModel, Measurement
from specbatch.tuning.errors import TuningError
from specbatch.tuning.kept import Kept, kept_folder
from specbatch.tuning.measure import time_batch, time_plain, time_prompts
from specbatch.tuning.options import TuneOptions
from specbatch.tuning.predict import FileProfile, Limits, predict
from specbatch.tuning.replay import Replay, Replayer
from specbatch.tuning.rows import FEWEST_ROWS, Sample, sample_rows
from specbatch.tuning.schedule import Schedule
from specbatch.tuning.search import Option, SearchResult, search
from specbatch.tuning.session import Session
from specbatch.tuning.space import neural_space, ngram_space
from specbatch.tuning.trace import RowTrace, Trace
from specbatch.types import Request

# Shares of the time that is left when a part begins.
_TRACE_SHARE, _MEASURE_SHARE = 0.4, 0.4
_WAVE_ROWS = 64  # traced at once, at most
_COMPARED = 3  # options that run live, beside plain decoding


@dataclass(frozen=True)
class Widest:
    """What drafts are traced and searched up to."""

    depth: int
    topk: int
    nodes: int
    verify_tokens: int  # of a round

    @staticmethod
    def of(method: str, on_device: bool) -> Widest:
        if method == "ngram":
            return Widest(0, 0, 33, 8192 if on_device else 512)
        return Widest(8, 8, 64, 4096) if on_device else Widest(6, 4, 24, 256)

    def schedule(self, max_batch_size: int) -> tuple[ScheduleSection, ...]:
        """For the engine to be built with: trees as wide as the number of rows allows."""
        if not self.depth:
            return (ScheduleSection(max_batch_size, self.nodes - 1, 1, self.nodes),)
        full = DraftShape(self.depth, self.topk, 2)
        nodes = min(self.nodes, full.num_candidates + 1)
        few = max(1, self.verify_tokens // nodes)
        wide = ScheduleSection(min(few, max_batch_size), self.depth, self.topk, nodes)
        if few >= max_batch_size:
            return (wide,)
        narrow = max(2, min(nodes, self.verify_tokens // max_batch_size))
        return wide, ScheduleSection(max_batch_size, self.depth, self.topk, narrow)


@dataclass(frozen=True)
class Tuned:
    """All that was found out."""

    trace: Trace
    costs: CostModel
    profile: FileProfile
    limits: Limits
    result: SearchResult
    live: list[Live]  # plain decoding last
    predicted_live: list[float]  # seconds, of the same runs
    winner: Option  # plain decoding where nothing beats it
    replays: list[Replay]
    rank_shares: NDArray[np.float64] | None  # see `Replayer.rank_shares`
    run: ResolvedRun  # with which it was measured
    session: Session
    requests: list[Request]  # that were traced
    texts: TextProcessor


class Tuner:
    """Runs the parts within the budget. What was measured is kept beside the output, for a tuning that was interrupted
    to go on from."""

    def __init__(
        self, session: Session, run: ResolvedRun, widest: Widest, sample: Sample, kept: Kept, say: Callable[[str], None]
    ) -> None:
        self._session = session
        self._run = run
        self._widest = widest
        self._sample = sample
        self._kept = kept
        self._say = say

    def trace(self, seconds: float) -> Trace:
        """Wave after wave of rows until the time is up; in the order drawn, so that the first ones are a sample too."""
        began, size = time.perf_counter(), min(self._run.engine.max_batch_size, _WAVE_ROWS)
        requests, trace = self._sample.requests, self._kept.trace()
        rows: list[RowTrace] = [] if trace is None else list(trace.rows)
        before = len(rows)
        if trace is not None:
            self._say(f"{before} rows were traced before")
        for first in range(before, len(requests), size):
            wave = self._session.trace(requests[first : first + size], self._widest.topk, self._widest.depth)
            rows += wave.rows
            trace = replace(wave, rows=tuple(rows))
            self._kept.keep_trace(trace)
            spent = time.perf_counter() - began
            is_over = spent + spent * size / (len(rows) - before) > seconds
            if FEWEST_ROWS <= len(rows) < len(requests) and is_over:
                self._say(f"traced {len(rows)} of {len(requests)} rows: the next would go past the budget")
                break
        assert trace is not None, "a sample has rows"
        return trace

    def measure(self, context: int, seconds: float) -> list[Measurement]:
        """Batch after batch, what was measured before left out, until the time is up; in any case one row, and the
        largest of the sizes that the cache holds."""
        until = time.perf_counter() + seconds
        engine, widest, found = self._run.engine, self._widest, self._kept.costs()
        if found:
            self._say(f"{len(found)} parts of rounds were timed before")
        else:
            found = time_prompts(self._session, engine.prefill_chunk_tokens)
            self._kept.keep_costs(found)
        session, widths = self._session, (widest.depth, widest.topk, widest.verify_tokens)
        if session.is_on_device:  # one graph and a few rounds for each: of all sizes, before what takes longer
            found = self._time("plain", lambda batch: time_plain(session, batch, context), found, until)
        found = self._time("verify", lambda batch: time_batch(session, batch, context, *widths), found, until)
        largest = max((m.batch for m in found if m.kind == "verify"), default=0)
        if not largest:
            raise TuningError(
                "not even one row of this length can be timed",
                hint="raise engine.kv_cache_tokens or engine.memory_fraction, or lower sampling.max_tokens",
            )
        if largest < engine.max_batch_size:
            self._say(f"timed batches of up to {largest} rows: larger ones are extrapolated")
        return found

    def _time(
        self, kind: str, time_one: Callable[[int], list[Measurement]], found: list[Measurement], until: float
    ) -> list[Measurement]:
        """`found`, and what `time_one` tells of the batch sizes that have no measurement of `kind`."""
        timed = {m.batch for m in found if m.kind == kind}
        sizes = deque(spread_out(self._run.engine.max_batch_size))
        while sizes:
            batch = sizes.popleft()
            if batch in timed:
                continue
            if len(timed) > 1 and time.perf_counter() > until:
                break
            if parts := time_one(batch):
                found = [*found, *parts]
                self._kept.keep_costs(found)
                timed.add(batch)
            elif batch == 1:
                break
            else:  # the cache does not hold so many rows: the next power of 2 below is the end
                sizes = deque(spread_out(2 ** ((batch - 1).bit_length() - 1)))
        return found


def spread_out(largest: int) -> list[int]:
    """Powers of 2 and the largest batch size, first the ends, then those in the middle of what is there already: where
    the time does not suffice, what is missing lies between two that were measured."""
    sizes = [*(2**k for k in range(largest.bit_length()) if 2**k < largest), largest]
    order, gaps = [0, len(sizes) - 1], [(0, len(sizes) - 1)]
    for low, high in gaps:  # grows as it goes
        middle = (low + high) // 2
        if low < middle < high:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return list(dict.fromkeys(sizes[i] for i in order))


def tune_file(
    options: TuneOptions,
    config: Config,
    resolve: Callable[[Config], ResolvedRun],
    build: Callable[[ResolvedRun, Callable[[str], None]], Built],
    model_paths: Callable[[Config], Mapping[str, Path]],
    console: Console,
) -> Tuned:
    """Find the schedule for a file. Raises SpecbatchError."""
    until = time.perf_counter() + options.budget_seconds

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    if config.speculation.method == "none":
        raise ConfigError(
            "there is nothing to tune: speculation.method is none", hint="use ngram, which needs no model"
        )
    if config.speculation.simulate_acceptance is not None:
        raise ConfigError(
            "speculation.simulate_acceptance accepts by lot: there is nothing to tune", hint="set it to null"
        )
    config = with_chat_template_text(config)
    parser, source = RowParser(config.sampling, config.data), open_source(options.data, config.data)
    run, widest = _resolve_widest(config, resolve)
    for note in run.notes:
        say(note)
    with console.status("loading the models") as status:
        built = build(run, lambda doing: status.update(f"loading: {doing}"))
    texts = TextProcessor(run.tokenizer, run.config.data)
    sample = sample_rows(source, parser, texts, built.engine.limits, options.rows, run.config.engine.seed)
    sampled = any(request.params.temperature > 0 for request in sample.requests)
    session = Session(built, "round" if run.engine.on_device and run.device.type == "cuda" else "none", sampled)
    say(f"{source.name}: {sample.num_rows:,} completions, {len(sample.requests)} sampled")
    identity = job_fingerprint(run.config, source.identity, options.rows, models=model_paths(run.config))
    identity |= {"device": device_name(run.config.engine.device), "versions": versions(), "widest": asdict(widest)}
    identity["kinds"] = list(KINDS)
    identity |= {"threads": torch.get_num_threads(), "max_batch_size": run.engine.max_batch_size}
    if not source.verifiable:  # more may differ than can be told
        identity["time"] = time.time()
    tuner = Tuner(session, run, widest, sample, Kept(kept_folder(options.output), identity), say)

    def left(share: float) -> float:
        return max(1.0, (until - time.perf_counter()) * share)

    with console.status("tracing: the target writes, the draft guesses"):
        began = time.perf_counter()
        trace = tuner.trace(left(_TRACE_SHARE))
        trace_seconds = time.perf_counter() - began
    outputs = sum(row.num_output for row in trace.rows)
    say(f"traced {len(trace.rows)} rows, {outputs:,} tokens in {trace_seconds:.1f} s")
    if trace.sampled and widest.depth:
        say("the rows are sampled: what chains gain is guessed from greedy ones; the live runs show it for certain")
    context = round(np.mean([row.num_prompt + row.num_output / 2 for row in trace.rows]))
    with console.status("timing rounds and prompts"):
        began = time.perf_counter()
        measurements = tuner.measure(int(context), left(_MEASURE_SHARE))
        say(f"timed {len(measurements)} parts of rounds in {time.perf_counter() - began:.1f} s")
    graph_sizes = ladder(run.engine.max_batch_size) if run.engine.on_device else []
    costs = CostModel.fit(measurements, graph_sizes)
    began = time.perf_counter()
    profile = FileProfile.of(trace, sample.max_tokens, np.array(sample.prompt_tokens), sample.num_rows)
    limits = _limits(run, built, widest)
    space: list[Candidate] = []
    if widest.depth:
        space += neural_space(widest.topk, widest.depth, widest.nodes)
    else:
        space += ngram_space(widest.nodes)
    replayer = Replayer(trace)
    replays = replayer.replay_all(space)
    if not run.engine.on_device:  # its rounds verify what was found; the device's are padded to full length
        costs = replace(costs, nodes={r.candidate: r.nodes_per_round for r in replays if r.idle_R is not None})
    result = search(replays, costs, profile, limits)
    say(f"replayed and searched {len(space)} candidates in {time.perf_counter() - began:.1f} s")
    live, predicted = _confirm(
        session, result, trace, {r.candidate: r for r in replays}, costs, profile, limits, sample, texts, left(0.9), say
    )
    winner = _winner(result, live)
    return Tuned(
        trace, costs, profile, limits, result, live, predicted, winner, replays, replayer.rank_shares(), run, session,
        sample.requests[: len(trace.rows)], texts,
    )  # fmt: skip


def _resolve_widest(config: Config, resolve: Callable[[Config], ResolvedRun]) -> tuple[ResolvedRun, Widest]:
    """The run with an engine that can be asked for every candidate."""
    speculation = replace(config.speculation, schedule=None, num_steps=None, topk=1, num_draft_tokens=None)
    engine = replace(config.engine, prefix_cache=False)
    first = resolve(replace(config, speculation=speculation, engine=engine))
    on_device = first.engine.on_device
    widest = Widest.of(first.config.speculation.method, on_device)
    schedule = widest.schedule(first.engine.max_batch_size)
    engine = replace(engine, cuda_graphs="none") if on_device else engine  # the session captures its own
    if on_device and engine.kv_cache_tokens is None:  # room for graphs that are captured later
        engine = replace(engine, memory_fraction=0.85 * first.engine.memory_fraction)
    return resolve(replace(config, speculation=replace(speculation, schedule=schedule), engine=engine)), widest


def _limits(run: ResolvedRun, built: Built, widest: Widest) -> Limits:
    engine, net = run.engine, built.drafts.net
    kv_tokens = built.engine.num_pages * engine.page_size
    lead = 0 if net is None else net.lead
    behind = 1 if engine.on_device else 0
    return Limits(
        engine.max_batch_size,
        kv_tokens,
        engine.prefill_chunk_tokens,
        engine.page_size,
        lead,
        widest.verify_tokens,
        behind,
        getattr(built.engine, "chunk_cost", None),
    )


def _confirm(
    session: Session,
    result: SearchResult,
    trace: Trace,
    replays: Mapping[Candidate, Replay],
    costs: CostModel,
    profile: FileProfile,
    limits: Limits,
    sample: Sample,
    texts: TextProcessor,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[list[Live], list[float]]:
    """The best options and plain decoding over the traced rows, as often as fill the batch twice, or as many of them as
    the time allows."""
    compared: list[Option] = []
    for option in (result.best, *result.fixed):
        # Of lookups that differ in the lengths of matches alone, some find the same.
        known = {o.prediction.seconds for o in compared}
        if not option.schedule.is_plain and option.prediction.seconds not in known and len(compared) < _COMPARED:
            compared.append(option)
    compared.append(result.plain)
    rows = sample.requests[: len(trace.rows)]
    count = min(profile.num_rows, max(len(rows), 2 * limits.max_running))

    def predicted(option: Option, count: int) -> float:
        return predicted_seconds(option.schedule, count, trace, replays, costs, profile.max_tokens, limits)

    # Two turns should fit.
    while count > 8 and 2.5 * sum(predicted(option, count) for option in compared) > seconds:
        count = max(8, count * 2 // 3)
    until = time.perf_counter() + seconds
    began = time.perf_counter()
    live = confirm(
        session,
        [option.schedule for option in compared],
        lambda: repeated(rows, count, texts.stop_check),
        # One turn says nothing of the noise.
        lambda turns: turns > 1 and time.perf_counter() + (time.perf_counter() - began) / turns > until,
    )
    say(f"ran {len(compared)} options live, {len(live[0].seconds)} times each, over {count} rows")
    return live, [predicted(option, count) for option in compared]


def predicted_seconds(
    schedule: Schedule,
    count: int,
    trace: Trace,
    replays: Mapping[Candidate, Replay],
    costs: CostModel,
    max_tokens: int,
    limits: Limits,
) -> float:
    """Of a file of `count` rows: the traced ones from the first on, again and again."""
    part = replace(trace, rows=trace.rows[:count])
    own = {c: replays[c].of_rows(slice(count)) for c in schedule.candidates if c is not None}
    profile = replace(FileProfile.of(part, max_tokens, num_rows=count), in_order=True)
    return predict(profile, limits, costs, own, schedule).seconds


def _winner(result: SearchResult, live: list[Live]) -> Option:
    """The fastest live, if it beats plain decoding outside the noise; else plain decoding."""
    options = {o.schedule: o for o in (result.best, *result.fixed, result.plain)}
    paying = [one for one, (_, low, _) in zip(live[:-1], speedups(live), strict=True) if low > 1.0]
    if paying:
        return options[max(paying, key=lambda one: one.tokens_per_second).chosen]
    return result.plain
