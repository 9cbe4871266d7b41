"""Writes the result of tuning: a configuration to run with, a report, tables and plots."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specbatch.config import Config
from specbatch.config_load import config_to_dict
from specbatch.draft.schedule import shapes_of
from specbatch.errors import InputError, TuningError
from specbatch.files.local import write_whole
from specbatch.files.stats_types import SCHEMA_VERSION
from specbatch.job.terminal import print_table
from specbatch.results.stats import device_name
from specbatch.tune.command import Tuned
from specbatch.tune.live import speedups
from specbatch.tune.plots import plot_acceptance, plot_comparisons, plot_throughput
from specbatch.tune.report import (
    Comparison,
    comparisons_table,
    costs_table,
    duration,
    evidence,
    json_report,
    jsonable,
    plans_table,
    rankings_table,
    tuned_yaml,
)
from specbatch.tune.start import MARK, plot_paths, report_path

_PLOTTED = 5  # shapes in the plot over batch sizes


def write_tuned(tuned: Tuned, config: Config, output: Path, made_by: dict[str, Any], console: Console) -> None:
    """`config` as the user gave it. The report and the plots are written next to the output.

    Raises TuningError where they cannot be written.
    """
    hint = "the measurements are cached; for another -o, copy the .measured folder along"
    try:
        _write(tuned, config, output, made_by, console)
    except OSError as error:
        reason = error.strerror or str(error)
        raise TuningError(f"cannot write {error.filename or output}: {reason}", hint=hint) from error
    except InputError as error:
        raise TuningError(error.message, hint=hint) from error


def _write(tuned: Tuned, config: Config, output: Path, made_by: dict[str, Any], console: Console) -> None:
    comparisons = live_comparisons(tuned)
    for table in (costs_table(tuned.forecast.costs), rankings_table(tuned.result), plans_table(tuned.result)):
        print_table(table, console)
    print_table(comparisons_table(comparisons), console)
    schedule = None if tuned.winner is None else tuned.winner.schedule
    header, comments = evidence(tuned.result)
    if schedule != tuned.result.best.schedule:  # all of that is of the predicted best
        header, comments = [f"(Predicted to be the fastest was {tuned.result.best.schedule}.)"], []
    verdict = _verdict(tuned)
    lines = [MARK, verdict, *_live_lines(tuned), *header]
    # The schedule is of these drafts: with another target, `auto` would be others.
    if schedule is not None:
        decided = tuned.run.config.speculation
        config = replace(config, speculation=replace(config.speculation, method=decided.method, draft=decided.draft))
    config = replace(config, sampling=tuned.run.config.sampling)
    text = tuned_yaml(config_to_dict(config), schedule, header=lines, comments=comments)
    write_whole(output, text.encode())
    report = json_report(tuned.result, tuned.forecast.costs, list(tuned.forecast.replays.values()), comparisons)
    report |= {"schema_version": SCHEMA_VERSION}
    report |= {
        "verdict": verdict,
        "winner": None if schedule is None else str(schedule),
        "made_by": made_by,
    }
    report["experts"] = [one._asdict() for one in tuned.session.engine.stats.experts.distinct]
    names = ("seconds", "tokens", "tokens_per_round")
    runs = [{"what": o.schedule.name} | {n: getattr(o, n) for n in names} for o in tuned.live]
    files = zip(runs, tuned.file_seconds, strict=True)
    report["live_runs"] = jsonable([run | {"file_seconds": seconds} for run, seconds in files])
    report_file = report_path(output)
    write_whole(report_file, json.dumps(report, indent=1).encode())
    written = [output, report_file, *_plots(tuned, comparisons, output, console)]
    console.print(verdict, style="bold", markup=False, soft_wrap=True)
    console.print(f"written: {', '.join(str(path) for path in written)}", markup=False, soft_wrap=True)
    console.print(f"specbatch generate DATA -c {output}", markup=False)


def live_comparisons(tuned: Tuned) -> list[Comparison]:
    """Predicted and measured tokens per second of the live runs."""
    found = []
    for one, predicted in zip(tuned.live, tuned.predicted_live, strict=True):
        speeds = predicted.tokens_per_second, one.tokens_per_second
        found.append(Comparison(one.schedule.name, *speeds, min(one.rates), max(one.rates)))
    return found


def _verdict(tuned: Tuned) -> str:
    if tuned.winner is None:
        pairs = zip(tuned.live, speedups(tuned.live), strict=False)
        found = "; ".join(
            f"{one.schedule.name}: {gain:.2f}x, {_interval(low, high)}" for one, (gain, low, high) in pairs
        )
        return (
            f"Undecided: nothing was clearly faster or slower than plain decoding ({found}). Your settings are kept. "
            "A longer --budget or a quiet machine may decide it."
        )
    if not shapes_of(tuned.winner.schedule):
        return "Speculation does not pay on this file: plain decoding was faster, outside the noise."
    index = next(i for i, one in enumerate(tuned.live) if one.schedule == tuned.winner.schedule)
    gain, low, high = speedups(tuned.live)[index]
    return f"{gain:.2f}x as fast as plain decoding ({_interval(low, high)}), live, over the same rows."


def _interval(low: float, high: float) -> str:
    return f"90% interval {low:.2f} to {high:.2f}" if math.isfinite(high) else "one run, so the noise is unknown"


def _live_lines(tuned: Tuned) -> list[str]:
    """Return a line for each live schedule, with the seconds of the whole file by which the schedule was chosen."""
    return [
        f"Live, {len(one.seconds)} runs: {one.schedule.name}: {one.tokens_per_second:,.1f} tok/s,"
        f" {one.tokens_per_round:.2f} tokens a round; the whole file by that: {duration(seconds)}."
        for one, seconds in zip(tuned.live, tuned.file_seconds, strict=True)
    ]


def _plots(tuned: Tuned, comparisons: list[Comparison], output: Path, console: Console) -> list[Path]:
    caption = f"{', '.join(tuned.run.description.values())}, on {device_name(tuned.run.config.engine.device)}"
    paths = plot_paths(output)
    shown = [ranking.ranked[0].shape for ranking in tuned.result.rankings]
    shown += [shape for plan in tuned.result.fixed for shape in plan.schedule.items]
    plotted = list(dict.fromkeys(shape for shape in shown if shape is not None))[:_PLOTTED]
    batches, replays = [ranking.batch for ranking in tuned.result.rankings], list(tuned.forecast.replays.values())
    try:
        plot_acceptance(replays, tuned.rank_shares, caption, paths[0])
        plot_throughput(replays, tuned.forecast.costs, batches, plotted, caption, paths[1])
        plot_comparisons(comparisons, caption, paths[2])
    except TuningError as error:
        console.print(f"no plots: {error.message} ({error.hint})", markup=False)
        return []
    return paths
