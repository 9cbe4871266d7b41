"""`specbatch tune` against the truth: predicted and live speed of many candidates at several batch sizes, and what an
exhaustive grid over the same rows finds.

    python scripts/check_tune.py DATA.jsonl -c CONFIG -o check.json --batches 1,8,32,128 --budget 3m

Each cell runs as many of the traced rows at once as the batch size says, to their end. Prints a line for each cell and
the median error; the file is replaced after each candidate.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from specbatch.config_load import load_config
from specbatch.engine.build import build
from specbatch.engine.resolve import resolve
from specbatch.pipeline.stats import commit, device_name, versions
from specbatch.tuning.candidates import Candidate, label, num_nodes
from specbatch.tuning.command import Tuned, predicted_seconds, tune_file
from specbatch.tuning.confirm import confirm, repeated
from specbatch.tuning.options import TuneOptions, seconds_of
from specbatch.tuning.schedule import Schedule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("-c", "--config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--candidates", type=int, default=20)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="start no candidate of the grid after that")
    parser.add_argument("--commit")
    args = parser.parse_args()
    began = time.perf_counter()
    options = TuneOptions(args.data, args.output.with_suffix(".yaml"), args.rows, seconds_of(args.budget))
    tuned = tune_file(
        options, load_config(args.config, args.set), resolve, build, lambda config: {}, Console(stderr=True)
    )
    report: dict[str, Any] = {
        "commit": args.commit or commit(),
        "command": shlex.join(["python", *sys.argv]),
        "device": device_name(tuned.run.config.engine.device),
        "versions": versions(),
        "models": tuned.run.description,
        "tune_seconds": round(time.perf_counter() - began, 1),
        "best": str(tuned.result.best.schedule),
        "cells": [],
    }
    began = time.perf_counter()
    batches = [int(part) for part in args.batches.split(",")]
    # A candidate at all batch sizes, then the next: its graphs are captured once.
    for candidate in (None, *spread(tuned, batches, args.candidates)):
        if args.time_limit is not None and time.perf_counter() - began > args.time_limit:
            report["cut_short"] = True
            break
        for batch in batches:
            report["cells"].append(cell(tuned, candidate, batch))
            print(json.dumps(report["cells"][-1]), flush=True)
        args.output.write_text(json.dumps(report, indent=1))
    for batch in batches:
        of_batch = [c for c in report["cells"] if c["batch"] == batch]
        fastest = max(of_batch, key=lambda c: c["live_tok_s"])
        picked = max(of_batch, key=lambda c: c["predicted_tok_s"])
        loss = 1 - picked["live_tok_s"] / fastest["live_tok_s"]
        print(f"batch {batch}: fastest live {fastest['what']}, picked {picked['what']}, {loss:.1%} slower", flush=True)
        report.setdefault("picked_loss", {})[batch] = round(loss, 4)
    report["grid_seconds"] = round(time.perf_counter() - began, 1)
    report["median_error"] = statistics.median(abs(c["error"]) for c in report["cells"])
    args.output.write_text(json.dumps(report, indent=1))
    print(
        f"median error {report['median_error']:.1%} over {len(report['cells'])} cells; grid {report['grid_seconds']} s"
    )


def spread(tuned: Tuned, batches: list[int], count: int) -> list[Candidate]:
    """`count` candidates: at each batch size the one that should be fastest, and others down to the slowest, evenly."""
    most = tuned.limits.max_verify_tokens
    known = [r for r in tuned.replays if most is None or max(batches) * num_nodes(r.candidate) <= most]
    rankings = [
        sorted(known, key=lambda r: tuned.costs.round_ms(batch, r.candidate) / r.tokens_per_round) for batch in batches
    ]
    chosen: dict[Candidate, None] = {ranking[0].candidate: None for ranking in rankings}
    places = len(known) - 1
    # Of each ranking in turn, twice as finely each time, until there are enough.
    for parts in (2**k for k in range(1, 12)):
        for i in range(parts + 1):
            for ranking in rankings:
                if len(chosen) < count:
                    chosen[ranking[round(i * places / parts)].candidate] = None
    return list(chosen)


def cell(tuned: Tuned, candidate: Candidate | None, batch: int) -> dict[str, Any]:
    schedule = Schedule.always(candidate)
    live = confirm(
        tuned.session, [schedule], lambda: repeated(tuned.requests, batch, tuned.texts.stop_check), lambda turns: True
    )[0]
    replays = {r.candidate: r for r in tuned.replays}
    seconds = predicted_seconds(
        schedule, batch, tuned.trace, replays, tuned.costs, tuned.profile.max_tokens, tuned.limits
    )
    return {
        "batch": batch,
        "what": label(candidate),
        "predicted_tok_s": round(live.tokens[0] / seconds, 1),
        "live_tok_s": round(live.tokens_per_second, 1),
        "live_tokens_per_round": round(live.tokens_per_round, 3),
        "replayed_tokens_per_round": None
        if candidate is None
        else round(replays[candidate].first_rows(batch).tokens_per_round, 3),
        "error": round(live.seconds[0] / seconds - 1, 4),
    }


if __name__ == "__main__":
    main()
