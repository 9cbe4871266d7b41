"""`specbatch tune`: sample, trace, measure, search, run the best live."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from specbatch.config import Config, ScheduleSection
from specbatch.errors import ConfigError
from specbatch.graphs.runner import ladder
from specbatch.job.terminal import print_notes
from specbatch.models.config import MoeConfig
from specbatch.models.formats.block_files import BlockCheckpoint
from specbatch.models.pass_weights import ExpertCurve, measured_curve
from specbatch.results.fingerprint import ModelFiles, job_fingerprint
from specbatch.results.stats import device_name, versions
from specbatch.rows.parser import RowParser
from specbatch.rows.tokenizer import TextProcessor
from specbatch.setup.build import Built
from specbatch.setup.resolve import ResolvedRun
from specbatch.setup.speculation import CORPUS_METHODS
from specbatch.tune.costs import KINDS, CostModel
from specbatch.tune.live import Live, drift, file_seconds, plans_to_run, repeated, run_plans, winner
from specbatch.tune.predict import Forecast
from specbatch.tune.profile import FileProfile, Limits, Prediction
from specbatch.tune.replay import Replayer
from specbatch.tune.report import duration
from specbatch.tune.sample import sample_rows
from specbatch.tune.search import Plan, SearchResult, neural_space, ngram_space, search
from specbatch.tune.session import OutOfTime, Session
from specbatch.tune.start import TuneInput, TuneOptions, cache_folder, rows_to_trace
from specbatch.tune.trace import Trace
from specbatch.tune.tuner import SearchLimits, TuneCache, Tuner
from specbatch.types import GRAMMAR_FIELDS, Request

# Shares of the time that is left when a part begins.
_TRACE_SHARE, _MEASURE_SHARE, _LIVE_SHARE = 0.4, 0.4, 0.9
_MIN_SHARE = 0.1  # share of the budget for a part that those before it leave no time: compiling may take long
_DRIFT = 1.2  # from one live trial to another, worth a warning


@dataclass(frozen=True)
class Tuned:
    """The result of tuning."""

    forecast: Forecast  # what was measured, and what follows from it
    profile: FileProfile
    result: SearchResult
    live: list[Live]  # plain decoding last
    predicted_live: list[Prediction]  # predictions for as many rows, like those that were traced
    file_seconds: list[float]  # predicted seconds of the whole file, see `live.file_seconds`
    winner: Plan | None  # see `live.winner`
    rank_shares: NDArray[np.float64] | None  # see `Replayer.rank_shares`
    run: ResolvedRun  # the run that was measured
    session: Session
    requests: list[Request]  # requests that were traced
    texts: TextProcessor


def tune_file(
    options: TuneOptions,
    opened: TuneInput,
    resolve: Callable[[Config], ResolvedRun],
    build: Callable[[ResolvedRun, Callable[[str], None]], Built],
    model_paths: Callable[[Config], Mapping[str, Path]],
    console: Console,
) -> Tuned:
    """Find the schedule for the opened rows. Raises SpecbatchError."""
    started = time.perf_counter()
    until = started + options.budget_seconds
    seconds_of: dict[str, float] = {}

    def log(line: str) -> None:
        print_notes([line], console)

    def left(share: float) -> float:
        return part_seconds(options.budget_seconds, until - time.perf_counter(), share)

    @contextmanager
    def part(name: str, doing: str) -> Iterator[None]:
        began = time.perf_counter()
        with console.status(doing):
            yield
        seconds_of[name] = time.perf_counter() - began

    config, source = opened.config, opened.source
    run, search_limits = _resolve_widest(config, resolve)
    print_notes(run.notes, console)
    texts = TextProcessor(run.tokenizer, run.config.data)
    with console.status("loading the models") as status:
        built = build(run, lambda doing: status.update(f"loading: {doing}"))
    on_cuda = run.on_cuda
    num_rows = options.rows or rows_to_trace(on_cuda, run.engine.max_batch_size)
    # `run.config` has the model's own sampling options.
    parser = RowParser(run.config.sampling, config.data, config.model.target)
    sample = sample_rows(source, parser, texts, built.engine.limits, num_rows, run.config.engine.seed)
    sampled = any(request.params.temperature > 0 for request in sample.requests)
    session = Session(built.engine, built.method, built.parts, "round" if on_cuda else "none", sampled)
    # The session caches no prefixes, the job will.
    shared = _shared(sample.common_prefix, run.engine.page_size) if config.engine.prefix_cache else 0
    alike = f"; the prompts begin with the same {shared} tokens" if shared else ""
    log(f"{source.name}: {sample.num_rows:,} completions, {sample.num_to_trace} sampled{alike}")
    if sample.num_failed:
        log(f"{sample.num_failed} of the {sample.num_drawn} rows that were drawn fail and are left out")
    if sample.has_grammars:
        log(f"rows with {', '.join(GRAMMAR_FIELDS)} or a required tool_choice are measured without it")
    models = ModelFiles(model_paths(run.config))
    identity = job_fingerprint(run.config, source.identity, num_rows, models=models.digests)
    identity |= {"device": device_name(run.config.engine.device), "versions": versions()}
    identity |= {"kinds": list(KINDS), "widest": asdict(search_limits)}
    identity |= {"threads": torch.get_num_threads(), "max_batch_size": run.engine.max_batch_size}
    if not source.verifiable:  # its rows may differ without a sign of it
        identity["time"] = time.time()
    cache = TuneCache(cache_folder(opened.output), identity)
    if cache.is_stale:
        log("the cached measurements are of another job: measured again")
    tuner = Tuner(session, run, search_limits, sample, cache, log)
    built.engine.forget_routing()
    seconds_of["start"] = time.perf_counter() - started
    with part("trace", "tracing: the target writes, the draft guesses"):
        # However long the start took (kernels are compiled), the first rows have half the budget.
        trace = tuner.trace(left(_TRACE_SHARE), max(until, time.perf_counter() + options.budget_seconds / 2))
        trace = _with_drawn(tuner, trace, texts, left(_TRACE_SHARE))
    outputs = sum(row.num_output for row in trace.rows)
    log(f"traced {len(trace.rows)} rows, {outputs:,} tokens in {seconds_of['trace']:.1f} s")
    if trace.drawn is not None:
        log("the rows are sampled: the gain of chains is corrected by a run that drew its drafts")
    elif trace.sampled and session.draws_chains:
        log("the rows are sampled: the gain of chains is estimated from greedy ones, and the live runs measure it")
    session.texts = [row.tokens.tolist() for row in trace.rows]
    context = round(np.mean([row.num_prompt + row.num_output / 2 for row in trace.rows]))
    with part("timing", "timing rounds and prompts"):
        measurements = tuner.measure(int(context), left(_MEASURE_SHARE))
    log(f"timed {len(measurements)} parts of rounds in {seconds_of['timing']:.1f} s")
    curve = None
    if (moe := run.target.config.moe) is not None:
        distinct = built.engine.stats.experts.distinct
        curve = measured_curve(moe, {one.tokens: one.experts for one in distinct})
        log(_experts_line(moe, curve, run.engine.max_batch_size, is_measured=bool(distinct)))
    costs = CostModel.fit(measurements, ladder(run.engine.max_batch_size) if on_cuda else [], curve)
    began = time.perf_counter()
    profile = FileProfile.of(trace, sample.max_tokens, np.array(sample.prompt_tokens), sample.num_rows, shared)
    limits = _limits(run, session, search_limits)
    if search_limits.depth:
        space = neural_space(search_limits.topk, search_limits.depth, search_limits.nodes)
    else:
        space = ngram_space(search_limits.nodes)
    replayer = Replayer(trace)
    replays = replayer.replay_all(space)
    if not on_cuda:  # its rounds verify what was found; those of a GPU are padded to full length
        costs = replace(costs, nodes={r.shape: r.nodes_per_round for r in replays if r.idle_R is not None})
    result = search(replays, costs, profile, limits)
    log(f"replayed and searched {len(space)} draft shapes in {time.perf_counter() - began:.1f} s")
    forecast = Forecast(trace, {r.shape: r for r in replays}, costs, limits, profile.max_tokens)
    requests = sample.to_trace[: len(trace.rows)]
    seconds, num_warm_up = left(_LIVE_SHARE), 1 if on_cuda else 0
    plans, count = plans_to_run(result, forecast, len(requests), profile.num_rows, seconds, num_warm_up)
    # The traced rows, then others: live runs of the traced ones alone would share with the predictions, which they are
    # to correct, whatever is peculiar to these rows.
    expected = (num_warm_up + 2) * sum(forecast.seconds(plan.schedule, count) for plan in plans)
    if expected > 1.2 * seconds:
        log(
            f"the budget leaves {duration(seconds)}, and live runs over {count} rows are predicted to take "
            f"{duration(expected)}: --budget {duration(options.budget_seconds + expected - seconds)} or more is enough"
        )
    with part("live runs", "running the best schedules and plain decoding"):
        live = run_plans(session, plans, sample.requests, count, texts, seconds, num_warm_up)
    log(f"ran {len(plans)} schedules live, {len(live[0].seconds)} times each, over {count} rows")
    if time.perf_counter() > until + 0.2 * options.budget_seconds:
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in seconds_of.items())
        log(f"--budget was {duration(options.budget_seconds)}, and the minimum of each part took more: {parts}")
    if (change := drift(live)) > _DRIFT:
        log(
            f"this machine's speed changed by {change - 1:.0%} between the live runs: other programs may be using it. "
            "Tune again when it is quiet"
        )
    predicted = [forecast.predict(plan.schedule, count) for plan in plans]
    whole = file_seconds(plans, live, predicted)
    chosen, ranks = winner(plans, live, whole), replayer.rank_shares()
    return Tuned(forecast, profile, result, live, predicted, whole, chosen, ranks, run, session, requests, texts)


def _with_drawn(tuner: Tuner, trace: Trace, texts: TextProcessor, seconds: float) -> Trace:
    """Add the counts of a run that draws its chains, if rounds draw them and the time allows it. The trace is saved."""
    if not trace.sampled or not tuner.session.draws_chains or trace.drawn is not None:
        return trace
    requests = repeated(tuner.sample.to_trace, len(trace.rows), texts.stop_check)
    until = time.perf_counter() + seconds
    # The engine has memory for rounds that verify this number of tokens.
    at_once = max(1, tuner.limits.verify_tokens // (trace.depth + 1))
    parts = [requests[first : first + at_once] for first in range(0, len(requests), at_once)]
    try:
        counts = [tuner.session.count_drawn(part, trace.depth, until) for part in parts]
    except OutOfTime:
        return trace
    trace = replace(trace, drawn=np.sum(counts, axis=0))
    tuner.cache.save_trace(trace)
    return trace


def _experts_line(moe: MoeConfig, curve: ExpertCurve, batch: int, *, is_measured: bool) -> str:
    sizes = ", ".join(f"{curve(tokens):.0f}" for tokens in (1, 4, batch, 4 * batch))
    kind = "as measured" if is_measured else "if routing is uniform"
    return f"1, 4, {batch} and {4 * batch} tokens read {sizes} of the {moe.num_experts} experts of a layer, {kind}"


def part_seconds(budget: float, remaining: float, share: float) -> float:
    """Return the seconds that a part may take: its share of the seconds that remain, but never less than a tenth of the
    budget."""
    return max(_MIN_SHARE * budget, remaining * share)


def _shared(common_prefix: int, page_size: int) -> int:
    """Return the cached tokens of a prompt that begins as all do: those of full pages. The last token is always
    computed, and a head's pages depend on the token after them."""
    return max(0, common_prefix - 1) // page_size * page_size


def _resolve_widest(config: Config, resolve: Callable[[Config], ResolvedRun]) -> tuple[ResolvedRun, SearchLimits]:
    """The run with an engine that can draft every shape that is searched."""
    if config.speculation.verify_budget not in (None, "none"):
        raise ConfigError(
            "tune measures rounds that verify all nodes, and speculation.verify_budget shares them",
            hint="set speculation.verify_budget: null, and compare the tuned schedule with it by generate",
        )
    speculation = replace(config.speculation, schedule=None, num_steps=None, topk=1, num_draft_tokens=None)
    engine = replace(config.engine, prefix_cache=False)
    first = resolve(replace(config, speculation=speculation, engine=engine))
    method = first.config.speculation.method
    if first.target.config.delta is not None:
        raise ConfigError(
            f"tune does not support hybrids ({first.target.config.model_type}): it repeats one round, and their states "
            "move from round to round",
            hint="try a few values of speculation.num_steps with generate",
        )
    if method in CORPUS_METHODS:
        raise ConfigError(
            f"tune does not support speculation.method {method}: how many drafts are right depends on the outputs of "
            "all rows, and a sample has few of them",
            hint="leave speculation.num_draft_tokens and speculation.schedule out, because its rounds choose how many "
            "nodes they verify; compare its seconds in stats.json with those of the tuned method",
        )
    if not first.speculation.has_network and method != "ngram":
        raise ConfigError(
            f"tune does not support speculation.method {method}: it tunes ngram and draft networks",
            hint="measure draft shapes of this method with generate",
        )
    on_cuda = first.on_cuda
    if on_cuda and first.engine.graphs != "round":
        raise ConfigError(
            f"tune measures rounds that are one CUDA graph, and engine.cuda_graphs is {first.engine.graphs} here",
            hint="leave engine.cuda_graphs and engine.attention out",
        )
    # What is measured is for batches of these sizes: they are not to be lowered where memory is short.
    batch, chunk = first.engine.max_batch_size, first.engine.prefill_chunk_tokens
    engine = replace(engine, max_batch_size=batch, prefill_chunk_tokens=chunk)
    max_drafts = first.draft.config.max_drafts if isinstance(first.draft, BlockCheckpoint) else None
    limits = SearchLimits.of(method, on_cuda, max_drafts)
    schedule = tuple(ScheduleSection(*entry) for entry in limits.schedule(batch))
    if on_cuda and engine.kv_cache_tokens is None:  # room for graphs that are captured later
        engine = replace(engine, memory_fraction=0.85 * first.engine.memory_fraction)
    widest = replace(speculation, schedule=schedule)
    run = resolve(replace(config, speculation=widest, engine=engine))
    if on_cuda:  # the session captures rounds itself; prompts are those of the job
        run = replace(run, engine=replace(run.engine, graphs="none"))
    return run, limits


def _limits(run: ResolvedRun, session: Session, limits: SearchLimits) -> Limits:
    net, engine = session.parts.net, session.engine
    return Limits(
        max_running=run.engine.max_batch_size,
        kv_tokens=engine.num_pages * engine.page_size,
        prefill_chunk=run.engine.prefill_chunk_tokens,
        page_size=engine.page_size,
        draft_kv_offset=None if net is None else net.draft_kv_offset,
        block_size=run.speculation.block_size,
        max_verify_tokens=limits.verify_tokens,
        async_depth=1 if session.on_cuda else 0,
        chunk_cost=engine.chunk_cost,
    )
