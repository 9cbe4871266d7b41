"""A check of `specbatch tune` against measurements: the predicted and the live speed of many draft shapes at several
batch sizes, and the result of an exhaustive grid over the same rows.

    python scripts/check/check_tune.py DATA.jsonl -c CONFIG -o check.json --batches 1,8,32,128 --budget 3m

Each cell runs --cell-rows of the traced rows, from the first on and again from there, as many at a time as the batch
size says. Prints a line for each cell and the median error. That is of tokens per second up to where the last row was
taken in: after it the batch shrinks, and the time depends on a row or two, whose texts end elsewhere in bfloat16
than when they were traced. With --whole-file all rows of the file are then run, --turns times: by the schedule that
tune chose and plain, first and last, and by candidates alone. The report is replaced as it grows.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from tune_cells import run_cell

from specbatch.config_load import load_config
from specbatch.draft.schedule import ByBatch, Schedule
from specbatch.draft.shape import DraftShape
from specbatch.errors import SpecbatchError
from specbatch.results.stats import commit, device_name, versions
from specbatch.rows.parser import RowParser
from specbatch.rows.sources import open_source
from specbatch.setup.build import build
from specbatch.setup.resolve import resolve
from specbatch.tune.command import Tuned, tune_file
from specbatch.tune.live import repeated
from specbatch.tune.output import live_comparisons
from specbatch.tune.predict import predict
from specbatch.tune.sample import sample_rows
from specbatch.tune.start import TuneOptions, open_input, seconds_of
from specbatch.types import Request

_FINALISTS = 3  # the fastest cells of a batch size that run again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("-c", "--config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--batches", type=numbers, default="1,8,32,128")
    parser.add_argument("--candidates", type=int, default=20)
    parser.add_argument("--also", default="", help="candidates among them in any case, as tune names them: 3/1/4,5/1/6")
    parser.add_argument(
        "--grid",
        type=grid_of,
        metavar="STEPS/TOPKS/TOKENS",
        help="all of these that were searched and that --batches allow: 1,3,5,7/1,2,4,8/2,4,8,16,32",
    )
    parser.add_argument(
        "--cell-rows", type=numbers, help="of a cell, for each of --batches; by default 8 times as many"
    )
    parser.add_argument("--finals", type=int, default=0, metavar="TURNS", help="of the best and the picked cells")
    parser.add_argument(
        "--whole-file",
        type=int,
        default=0,
        metavar="N",
        help="by N fixed shapes: of --also, then --grid, then the best",
    )
    parser.add_argument("--turns", type=int, default=1, help="of the whole file")
    parser.add_argument("--without-plain", action="store_true", help="leave plain decoding out of the whole file")
    parser.add_argument("--rows", type=int, help="to trace, as of tune")
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start none but plain after that")
    parser.add_argument("--commit")
    args = parser.parse_args()
    if args.output.is_dir():
        parser.error(f"-o {args.output}: a folder")
    with errors_of(parser):
        config = load_config(args.config, args.set)
        options = TuneOptions(args.data, args.output.with_suffix(".yaml"), args.rows, seconds_of(args.budget))
    batches = args.batches
    cell_rows = args.cell_rows or [8 * batch for batch in batches]
    if len(cell_rows) != len(batches) or any(rows < 2 * batch for rows, batch in zip(cell_rows, batches, strict=True)):
        parser.error("--cell-rows: a number for each of --batches, twice as many at least")
    rows_of = dict(zip(batches, cell_rows, strict=True))

    def check_batches(places: int) -> None:
        if max(batches) > places:
            parser.error(f"--batches: the engine runs {places} rows at most (engine.max_batch_size)")

    if config.engine.max_batch_size is not None:
        check_batches(config.engine.max_batch_size)
    began = time.perf_counter()
    with errors_of(parser):
        opened = open_input(options, config)
        tuned = tune_file(options, opened, resolve, build, lambda config: {}, Console(stderr=True))
    check_batches(tuned.run.engine.max_batch_size)  # the configuration may have left it to the device
    report: dict[str, Any] = {
        "commit": args.commit or commit(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "device": device_name(tuned.run.config.engine.device),
        "versions": versions(),
        "models": tuned.run.description,
        "tune_seconds": round(time.perf_counter() - began, 1),
        "best": str(tuned.result.best.schedule),
        "winner": None if tuned.winner is None else str(tuned.winner.schedule),
        "traced_rows": len(tuned.requests),
        "live_runs": [{"what": one.schedule.name, "seconds": one.seconds, "tokens": one.tokens} for one in tuned.live],
        "live": [asdict(comparison) for comparison in live_comparisons(tuned)],
        "costs": [asdict(residual) for residual in tuned.forecast.costs.residuals],
        "cells": [],
    }
    began = time.perf_counter()
    known = {str(shape): shape for shape in tuned.forecast.replays}
    if missing := [name for name in args.also.split(",") if name and name not in known]:
        parser.error(f"--also: {', '.join(missing)} was not searched")
    also = [known[name] for name in args.also.split(",") if name]
    if args.grid is not None:
        shapes = grid(args.grid, fitting(tuned, max(batches)))
        print(f"{len(shapes)} shapes of the grid", flush=True)
        also = list(dict.fromkeys([*also, *shapes]))
    # A shape runs at all batch sizes before the next one, so that its graphs are captured once.
    for shape in (None, *spread(tuned, batches, args.candidates, also)):
        if report["cells"] and args.time_limit is not None and time.perf_counter() - began > args.time_limit:
            report["cut_short"] = True
            break
        for batch in batches:
            report["cells"].append(run_cell(tuned, shape, batch, rows_of[batch]))
            print(json.dumps(report["cells"][-1]), flush=True)
        args.output.write_text(json.dumps(report, indent=1))
    report["grid_seconds"] = round(time.perf_counter() - began, 1)
    report["picked"] = against_fastest(report["cells"])
    report["median_error"] = statistics.median(abs(c["error"]) for c in report["cells"])
    args.output.write_text(json.dumps(report, indent=1))
    print(
        f"median error {report['median_error']:.1%} over {len(report['cells'])} cells; grid {report['grid_seconds']} s",
        flush=True,
    )
    if args.whole_file:
        report["whole_file"] = []
        for turn in range(args.turns):
            for chosen, predicted, seconds in whole_file(
                tuned, args.data, args.whole_file, also, not args.without_plain
            ):
                times = {"predicted_seconds": round(predicted, 3), "seconds": round(seconds, 3)}
                report["whole_file"].append({"turn": turn, "what": chosen, **times})
                print(json.dumps(report["whole_file"][-1]), flush=True)
                args.output.write_text(json.dumps(report, indent=1))
    if args.finals:
        report["finals"] = finals(tuned, report["cells"], known, args.finals, rows_of)
        report["picked_finals"] = against_fastest(report["finals"])  # computed from these runs alone
        args.output.write_text(json.dumps(report, indent=1))


@contextmanager
def errors_of(parser: argparse.ArgumentParser) -> Iterator[None]:
    try:
        yield
    except SpecbatchError as error:
        parser.error(f"{error}; {error.hint}" if error.hint else str(error))


def against_fastest(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare at each batch size the shape that was predicted to be fastest with the fastest one. All runs of a shape
    count together."""
    found = []
    for batch, of_batch in by_batch(cells).items():
        live: dict[str, list[float]] = defaultdict(list)
        for c in of_batch:
            live[c["what"]].append(c["live_tok_s"])
        speeds = {what: statistics.mean(runs) for what, runs in live.items()}
        picked = best_predicted(of_batch)
        fastest = max(speeds, key=lambda what: speeds[what])
        loss = 1 - speeds[picked] / speeds[fastest]
        print(f"batch {batch}: fastest live {fastest}, picked {picked}, {loss:.1%} slower", flush=True)
        found.append({"batch": batch, "picked": picked, "fastest": fastest, "loss": round(loss, 4)})
    return found


def by_batch(cells: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for c in cells:
        found[c["batch"]].append(c)
    return found


def best_predicted(cells: list[dict[str, Any]]) -> str:
    """Return the best predicted cell. Among equal ones it is always the same."""
    what: str = max(cells, key=lambda c: (c["predicted_tok_s"], c["what"]))["what"]
    return what


def finals(
    tuned: Tuned, cells: list[dict[str, Any]], known: dict[str, DraftShape], turns: int, rows_of: dict[int, int]
) -> list[dict[str, Any]]:
    """Run the picked cell and the fastest cells of each batch size again, in turn, because the fastest of many cells
    that ran once can be fast by chance."""
    chosen: dict[str, set[int]] = defaultdict(set)
    for batch, of_batch in by_batch(cells).items():
        ranked = sorted(of_batch, key=lambda c: c["live_tok_s"])[-_FINALISTS:]
        for what in (*(c["what"] for c in ranked), best_predicted(of_batch)):
            chosen[what].add(batch)
    again = []
    for _ in range(turns):
        for what, batches in chosen.items():
            for batch in sorted(batches):
                again.append(run_cell(tuned, known.get(what), batch, rows_of[batch]))
                print(json.dumps(again[-1]), flush=True)
    return again


def whole_file(
    tuned: Tuned, data: str, count: int, also: list[DraftShape], with_plain: bool
) -> Iterator[tuple[str, float, float]]:
    """Run all rows of the file with several schedules, and yield (name, predicted seconds, seconds) of each. The first
    and the last is the tuned schedule, next to plain decoding if `with_plain`. Between them are the shapes that are
    predicted to be fastest for the whole file, each alone."""
    config = tuned.run.config
    parser, source = RowParser(config.sampling, config.data), open_source(data, config.data)
    limits = tuned.session.engine.limits

    def everything() -> list[Request]:
        return sample_rows(source, parser, tuned.texts, limits, 10**7, config.engine.seed).requests

    best = (tuned.winner or tuned.result.best).schedule
    plain: list[Schedule] = [ByBatch.always(None)] * with_plain
    forecast, most_rows = tuned.forecast, tuned.forecast.limits.max_running
    ranked = sorted(
        forecast.replays.values(), key=lambda r: forecast.costs.round_ms(most_rows, r.shape) / r.tokens_per_round
    )
    profile = replace(tuned.profile, shared_prefix=0)  # the session caches no prefixes
    allowed = set(fitting(tuned, most_rows))
    fixed = [c for c in dict.fromkeys([*also, *(r.shape for r in ranked)]) if c in allowed]
    shapes: list[DraftShape | None] = [*fixed[:count]]
    for schedule in (best, *plain, *(ByBatch.always(shape) for shape in shapes), *plain, best):
        name = f"tuned: {schedule}" if schedule is best else schedule.name
        predicted = predict(profile, forecast.limits, forecast.costs, forecast.replays, schedule)
        tuned.session.use(schedule)
        requests = everything()
        tuned.session.run(repeated(requests, 2, tuned.texts.stop_check))
        yield name, predicted.seconds, tuned.session.run(requests).seconds


def numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers from 1 on, with commas between them")
    return found


def grid_of(text: str) -> tuple[list[int], list[int], list[int]]:
    """Parse lists of num_steps, topk and num_draft_tokens."""
    parts = text.split("/")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"{text!r}: three lists, STEPS/TOPKS/TOKENS")
    steps, topks, tokens = map(numbers, parts)
    return steps, topks, tokens


def fitting(tuned: Tuned, batch: int) -> list[DraftShape]:
    """List the shapes that were searched and that a batch of this size may draft."""
    most = tuned.forecast.limits.max_verify_tokens
    return [c for c in tuned.forecast.replays if most is None or batch * c.num_draft_tokens <= most]


def grid(of: tuple[list[int], list[int], list[int]], known: Iterable[DraftShape]) -> list[DraftShape]:
    """Return the known shapes with these num_steps, topk and num_draft_tokens. The num_draft_tokens of chains follows
    from num_steps, so it is not compared."""
    steps, topks, tokens = of
    shapes = [c for c in known if c.ngram_match is None and c.num_steps in steps and c.topk in topks]
    return [shape for shape in shapes if shape.topk == 1 or shape.num_draft_tokens in tokens]


def spread(tuned: Tuned, batches: list[int], count: int, also: list[DraftShape]) -> list[DraftShape]:
    """Choose `count` shapes: for each batch size the one that should be fastest, and others evenly down to the
    slowest."""
    costs, known = tuned.forecast.costs, [tuned.forecast.replays[c] for c in fitting(tuned, max(batches))]
    if not known:  # nothing may be drafted for this batch size
        return []
    rankings = [sorted(known, key=lambda r: costs.round_ms(batch, r.shape) / r.tokens_per_round) for batch in batches]
    chosen: dict[DraftShape, None] = dict.fromkeys([*also, *(ranking[0].shape for ranking in rankings)])
    last = len(known) - 1
    # Take shapes from each ranking in turn, twice as finely each time, until there are enough.
    for parts in (2**k for k in range(1, 12)):
        for i in range(parts + 1):
            for ranking in rankings:
                if len(chosen) < count:
                    chosen[ranking[round(i * last / parts)].shape] = None
    return list(chosen)


if __name__ == "__main__":
    main()
