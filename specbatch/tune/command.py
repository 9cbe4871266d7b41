"""`specbatch tune`: sample, trace, measure, search, confirm, write."""

from __future__ import annotations

import time
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
from specbatch.graphs.runner import ladder
from specbatch.job.fingerprint import ModelFiles, job_fingerprint
from specbatch.job.stats import device_name, versions
from specbatch.job.terminal import print_notes
from specbatch.job.tokenizer import TextProcessor
from specbatch.tune.candidates import Candidate
from specbatch.tune.confirm import MOST_TURNS, Live, confirm, drift, repeated, speedups
from specbatch.tune.costs import KINDS, CostModel
from specbatch.tune.files import kept_folder
from specbatch.tune.forecast import Forecast
from specbatch.tune.kept import Kept
from specbatch.tune.options import ROWS, TuneOptions, rows_to_trace
from specbatch.tune.predict import FileProfile, Limits, Prediction
from specbatch.tune.replay import Replayer
from specbatch.tune.report import duration
from specbatch.tune.rows import sample_rows
from specbatch.tune.search import Option, SearchResult, search
from specbatch.tune.session import Session
from specbatch.tune.space import neural_space, ngram_space
from specbatch.tune.start import Rows
from specbatch.tune.tuner import Tuner, Widest
from specbatch.types import Request

# Shares of the time that is left when a part begins.
_TRACE_SHARE, _MEASURE_SHARE = 0.4, 0.4
_LEAST_SHARE = 0.1  # of the budget, for a part that those before it leave no time: compiling may take what it likes
_COMPARED = 3  # options that run live, beside plain decoding
_DRIFT = 1.2  # from one live turn to another, worth a warning
_LIVE_BATCHES = 8  # that the rows of a live run fill, in which few of them are alone at the end; 2 where time is short


@dataclass(frozen=True)
class Tuned:
    """All that was found out."""

    forecast: Forecast  # what was measured, and what follows from it
    profile: FileProfile
    result: SearchResult
    live: list[Live]  # plain decoding last
    predicted_live: list[Prediction]  # of as many rows, like those that were traced
    file_seconds: list[float]  # of the whole file, as `_file_seconds` has it
    winner: Option | None  # plain decoding where all options are slower; None: undecided, the live runs do not tell
    rank_shares: NDArray[np.float64] | None  # see `Replayer.rank_shares`
    run: ResolvedRun  # with which it was measured
    session: Session
    requests: list[Request]  # that were traced
    texts: TextProcessor


def tune_file(
    options: TuneOptions,
    rows: Rows,
    resolve: Callable[[Config], ResolvedRun],
    build: Callable[[ResolvedRun, Callable[[str], None]], Built],
    model_paths: Callable[[Config], Mapping[str, Path]],
    console: Console,
) -> Tuned:
    """Find the schedule for the rows that `open_rows` has opened. Raises SpecbatchError."""
    started = time.perf_counter()
    until = started + options.budget_seconds

    def say(line: str) -> None:
        print_notes([line], console)

    config, parser, source = rows.config, rows.parser, rows.source
    run, widest = _resolve_widest(config, resolve)
    for note in run.notes:
        say(note)
    texts = TextProcessor(run.tokenizer, run.config.data)
    with console.status("loading the models") as status:
        built = build(run, lambda doing: status.update(f"loading: {doing}"))
    num_rows = options.rows or rows_to_trace(run.engine.on_device, run.engine.max_batch_size)
    sample = sample_rows(source, parser, texts, built.engine.limits, num_rows, run.config.engine.seed)
    sampled = any(request.params.temperature > 0 for request in sample.requests)
    session = Session(built, "round" if run.engine.on_device and run.device.type == "cuda" else "none", sampled)
    # The session caches no prefixes, the job will.
    shared = _shared(sample.common_prefix, run.engine.page_size) if config.engine.prefix_cache else 0
    alike = f"; the prompts begin with the same {shared} tokens" if shared else ""
    say(f"{source.name}: {sample.num_rows:,} completions, {sample.num_to_trace} sampled{alike}")
    if sample.num_failed:
        say(f"{sample.num_failed} of the {sample.num_drawn} rows that were drawn fail and are left out")
    models = ModelFiles(model_paths(run.config))
    identity = job_fingerprint(run.config, source.identity, num_rows, models=models.digests)
    identity |= {"device": device_name(run.config.engine.device), "versions": versions(), "widest": asdict(widest)}
    identity["kinds"] = list(KINDS)
    identity |= {"threads": torch.get_num_threads(), "max_batch_size": run.engine.max_batch_size}
    if not source.verifiable:  # more may differ than can be told
        identity["time"] = time.time()
    tuner = Tuner(session, run, widest, sample, Kept(kept_folder(rows.output), identity), say)

    def left(share: float) -> float:
        return part_seconds(options.budget_seconds, until - time.perf_counter(), share)

    with console.status("tracing: the target writes, the draft guesses"):
        began = time.perf_counter()
        seconds_of = {"start": began - started}
        # However long the start took (kernels are compiled), the first rows have half the budget.
        trace = tuner.trace(left(_TRACE_SHARE), max(until, began + options.budget_seconds / 2))
        seconds_of["trace"] = time.perf_counter() - began
    outputs = sum(row.num_output for row in trace.rows)
    say(f"traced {len(trace.rows)} rows, {outputs:,} tokens in {seconds_of['trace']:.1f} s")
    if trace.sampled and widest.depth:
        say("the rows are sampled: what chains gain is guessed from greedy ones; the live runs show it for certain")
    context = round(np.mean([row.num_prompt + row.num_output / 2 for row in trace.rows]))
    with console.status("timing rounds and prompts"):
        began = time.perf_counter()
        measurements = tuner.measure(int(context), left(_MEASURE_SHARE))
        seconds_of["timing"] = time.perf_counter() - began
        say(f"timed {len(measurements)} parts of rounds in {seconds_of['timing']:.1f} s")
    graph_sizes = ladder(run.engine.max_batch_size) if run.engine.on_device else []
    costs = CostModel.fit(measurements, graph_sizes)
    began = time.perf_counter()
    profile = FileProfile.of(trace, sample.max_tokens, np.array(sample.prompt_tokens), sample.num_rows, shared)
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
    forecast = Forecast(trace, {r.candidate: r for r in replays}, costs, limits, profile.max_tokens)
    requests = sample.to_trace[: len(trace.rows)]
    seconds = left(0.9)
    turns_before = 1 if session.is_on_device else 0
    compared, count = _compared(result, forecast, requests, profile.num_rows, seconds, turns_before)
    # The traced rows, then others: live runs of the traced ones alone would share with the predictions, which they are
    # to correct, whatever is peculiar to these rows.
    expected = (turns_before + 2) * sum(forecast.seconds(option.schedule, count) for option in compared)
    if expected > 1.2 * seconds:
        say(
            f"the budget leaves {duration(seconds)}, and live runs over {count} rows are predicted to take "
            f"{duration(expected)}: --budget {duration(options.budget_seconds + expected - seconds)} or more would do"
        )
    began = time.perf_counter()
    live = _confirm(session, compared, sample.requests, count, texts, seconds, turns_before)
    say(f"ran {len(compared)} options live, {len(live[0].seconds)} times each, over {count} rows")
    now = time.perf_counter()
    seconds_of["live runs"] = now - began
    if now > until + 0.2 * options.budget_seconds:
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in seconds_of.items())
        say(f"--budget was {duration(options.budget_seconds)}, and the least of each part took more: {parts}")
    if (change := drift(live)) > _DRIFT:
        say(
            f"this machine's speed changed by {change - 1:.0%} between the live runs: other programs may be using it. "
            "Tune again when it is quiet"
        )
    predicted = [forecast.predict(option.schedule, count) for option in compared]
    file_seconds = _file_seconds(compared, live, predicted)
    winner = _winner(compared, live, file_seconds)
    ranks = replayer.rank_shares()
    return Tuned(forecast, profile, result, live, predicted, file_seconds, winner, ranks, run, session, requests, texts)


def part_seconds(budget: float, remaining: float, share: float) -> float:
    """What a part may take: its share of the seconds that remain, but never less than a tenth of the budget."""
    return max(_LEAST_SHARE * budget, remaining * share)


def _shared(common_prefix: int, page_size: int) -> int:
    """Tokens that are cached of a prompt which begins as all do: of full pages. The last token is computed in any case,
    and a head's pages depend on the token behind them."""
    return max(0, common_prefix - 1) // page_size * page_size


def _resolve_widest(config: Config, resolve: Callable[[Config], ResolvedRun]) -> tuple[ResolvedRun, Widest]:
    """The run with an engine that can be asked for every candidate."""
    speculation = replace(config.speculation, schedule=None, num_steps=None, topk=1, num_draft_tokens=None)
    engine = replace(config.engine, prefix_cache=False)
    first = resolve(replace(config, speculation=speculation, engine=engine))
    on_device = first.engine.on_device
    # What is measured is for batches of these sizes: they are not to be lowered where memory is short.
    batch, chunk = first.engine.max_batch_size, first.engine.prefill_chunk_tokens
    engine = replace(engine, max_batch_size=batch, prefill_chunk_tokens=chunk)
    widest = Widest.of(first.config.speculation.method, on_device)
    schedule = tuple(ScheduleSection(*entry) for entry in widest.schedule(first.engine.max_batch_size))
    engine = replace(engine, cuda_graphs="none") if on_device else engine  # the session captures its own
    if on_device and engine.kv_cache_tokens is None:  # room for graphs that are captured later
        engine = replace(engine, memory_fraction=0.85 * first.engine.memory_fraction)
    return resolve(replace(config, speculation=replace(speculation, schedule=schedule), engine=engine)), widest


def _limits(run: ResolvedRun, built: Built, widest: Widest) -> Limits:
    engine, net = run.engine, built.parts.net
    kv_tokens = built.engine.num_pages * engine.page_size
    draft_kv_offset = 0 if net is None else net.draft_kv_offset
    behind = 1 if engine.on_device else 0
    return Limits(
        engine.max_batch_size,
        kv_tokens,
        engine.prefill_chunk_tokens,
        engine.page_size,
        draft_kv_offset,
        widest.verify_tokens,
        behind,
        built.engine.chunk_cost,
    )


def _compared(
    result: SearchResult,
    forecast: Forecast,
    requests: list[Request],
    num_rows: int,
    seconds: float,
    turns_before: int,
) -> tuple[list[Option], int]:
    """The best options and plain decoding, and over how many rows to run them: as in the file, most of them beside
    others, as far as the time allows. `turns_before`: that are not timed."""
    compared: list[Option] = []
    for option in (result.best, *result.fixed):
        # Of lookups that differ in the lengths of matches alone, some find the same.
        known = {o.prediction.seconds for o in compared}
        if not option.schedule.is_plain and option.prediction.seconds not in known and len(compared) < _COMPARED:
            compared.append(option)
    compared.append(result.plain)
    places = forecast.limits.max_running
    few = min(len(requests), ROWS)
    least = min(num_rows, max(few, 2 * places))
    count = min(num_rows, max(few, _LIVE_BATCHES * places))

    def turn_seconds() -> float:
        return sum(forecast.seconds(option.schedule, count) for option in compared)

    while count > least and (turns_before + MOST_TURNS) * turn_seconds() > seconds:
        count = max(least, count * 2 // 3)
    # Two turns should fit in any case: over fewer rows, then of fewer options.
    for fewest in (8, 4):
        while count > fewest and (turns_before + 2.5) * turn_seconds() > seconds:
            count = max(fewest, count * 2 // 3)
        while len(compared) > 2 and (turns_before + 2.5) * turn_seconds() > seconds:
            del compared[-2]  # plain decoding is the last
    return compared, count


def _confirm(
    session: Session,
    compared: list[Option],
    requests: list[Request],
    count: int,
    texts: TextProcessor,
    seconds: float,
    turns_before: int,
) -> list[Live]:
    """Each of them over the first `count` of these rows, in turn, as often as there is time for."""
    began = time.perf_counter()
    until = began + seconds
    return confirm(
        session,
        [option.schedule for option in compared],
        lambda: repeated(requests, count, texts.stop_check),
        # One turn says nothing of the noise.
        lambda turns: turns > 1 and (now := time.perf_counter()) + (now - began) / (turns + turns_before) > until,
        whole_first=turns_before > 0,
        until=until + 0.1 * seconds,
    )


def _file_seconds(options: list[Option], live: list[Live], predicted: list[Prediction]) -> list[float]:
    """Of these options, which ran live, with the whole file: by the prediction, off as far as that of the live runs
    was."""
    return [
        option.prediction.seconds * said.tokens_per_second / one.tokens_per_second
        for option, one, said in zip(options, live, predicted, strict=True)
    ]


def _winner(options: list[Option], live: list[Live], file_seconds: list[float]) -> Option | None:
    """Of the options that beat the last one, plain decoding, outside the noise, the one that is fastest with the whole
    file. Plain decoding where it beats all of them outside the noise. None: undecided."""
    found = speedups(live)
    paying = [i for i, (_, low, _) in enumerate(found) if low > 1.0]
    if paying:
        return options[min(paying, key=lambda i: file_seconds[i])]
    return options[-1] if all(high < 1.0 for _, _, high in found) else None
