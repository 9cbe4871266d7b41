"""Compares the draft shape that `specbatch tune` would choose with fixed ones, at a simulated acceptance.

    python scripts/bench/bench_tune.py -o tune.json [--target random:qwen3-30b-a3b] [--rows 4,32] [--probability 0.7]

Rounds and prompts are timed as `specbatch tune` times them. A chain's token is accepted with the given probability if
those before it were. With these figures the search of `specbatch tune` chooses for each number of rows. Then all rows
are run, submitted at once, with plain decoding, with fixed chains, and with the choice; their times are of whole runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bench_work import UniformRows

from specbatch.config_load import load_config
from specbatch.draft.schedule import ByBatch
from specbatch.draft.shape import DraftShape
from specbatch.graphs.runner import ladder
from specbatch.models.pass_weights import measured_curve
from specbatch.results.stats import device_name, versions
from specbatch.setup.build import build
from specbatch.setup.resolve import ResolvedRun, resolve
from specbatch.tune.command import _limits, _resolve_widest
from specbatch.tune.costs import KINDS, CostModel, Measurement
from specbatch.tune.profile import FileProfile, Limits
from specbatch.tune.replay import Replay
from specbatch.tune.sample import Sample
from specbatch.tune.search import search
from specbatch.tune.session import Session
from specbatch.tune.tuner import SearchLimits, TuneCache, Tuner
from specbatch.types import Request, RngKey, SamplingParams

MAX_STEPS = 8
FIXED = (None, *(DraftShape(steps, 1, steps + 1) for steps in (1, 2, 3, 5, 8)))


def expected_tokens(shape: DraftShape | None, probability: float) -> float:
    """Return the mean number of tokens of a round."""
    return sum(probability**depth for depth in range(1 if shape is None else shape.num_draft_tokens))


def measure(session: Session, run: ResolvedRun, context: int, seconds: float) -> list[Measurement]:
    """Time prompts and rounds with chains."""
    sample = Sample([], 0, [], 0, 0, 0, 0, has_grammars=False, max_tokens=1)
    widest = SearchLimits(MAX_STEPS, 1, MAX_STEPS + 1, 4096)
    with tempfile.TemporaryDirectory() as folder:
        cache = TuneCache(Path(folder) / "measured", {"kinds": list(KINDS)})
        return Tuner(session, run, widest, sample, cache, print).measure(context, seconds)


def choose(
    costs: CostModel, limits: Limits, rows: int, tokens: tuple[int, int], probability: float
) -> DraftShape | None:
    """Return the shape that `specbatch tune` chooses for this number of rows, all of these numbers of tokens."""
    outputs = np.full(rows, tokens[1])
    replays = []
    for steps in range(1, MAX_STEPS + 1):
        shape = DraftShape(steps, 1, steps + 1)
        rounds = (outputs - 1) / expected_tokens(shape, probability)
        replays.append(Replay(shape, rounds, outputs - 1, np.zeros(rows), ()))
    profile = FileProfile(np.full(rows, tokens[0]), outputs, rows, max_tokens=tokens[1])
    return search(replays, costs, profile, replace(limits, max_running=rows)).best.schedule.at(rows)


def run_rows(session: Session, shape: DraftShape | None, rows: int, work: UniformRows, probability: float) -> float:
    """Return the output tokens per second of a run. A shorter one before it captures the graphs."""
    round_ = session.engine._round  # the rounds of every shape are made of it
    simulate = None if shape is None else expected_tokens(shape, probability)
    round_._acceptance = replace(round_._acceptance, simulate=simulate)
    session.use(ByBatch.always(shape))

    def run(number: int, length: int | None = None) -> float:
        drawn = work.draw(number) if length is None else work.draw(number, tokens_out=length)
        pairs = enumerate(zip(drawn.prompts, drawn.lengths, strict=True))
        requests = [
            Request(i, prompt, SamplingParams(max_tokens=length, ignore_eos=True), RngKey(0, i, 0))
            for i, (prompt, length) in pairs
        ]
        finished = session.run(requests)
        return finished.num_tokens / finished.seconds

    run(rows, 8)
    return run(rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--target", default="random:qwen3-30b-a3b")
    parser.add_argument("--draft", default="random:eagle3-32k")
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=(4, 32, 256))
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, text.split("/"))), default=(500, 256))
    parser.add_argument("--probability", type=float, default=0.7, help="of a draft whose former ones are accepted")
    parser.add_argument("--seconds", type=float, default=60, help="for timing rounds")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    began = time.perf_counter()
    sets = [f"model.target={args.target}", "speculation.method=eagle3", f"speculation.draft={args.draft}"]
    run, _ = _resolve_widest(load_config(None, [*sets, f"engine.max_batch_size={max(args.rows)}"]), resolve)
    built = build(run, lambda step: None)
    session = Session(built.engine, built.method, built.parts, "round" if run.on_cuda else "none")
    tokens_in, tokens_out = args.tokens
    work = UniformRows(tokens_in, tokens_out, vocab_size=run.target.config.vocab_size)
    session.texts = work.draw(64).prompts
    print(f"engine ready after {time.perf_counter() - began:.0f} s", flush=True)
    context = args.tokens[0] + args.tokens[1] // 2
    measured = measure(session, run, context, args.seconds)
    print(f"timed {len(measured)} parts at {time.perf_counter() - began:.0f} s", flush=True)
    moe = run.target.config.moe
    distinct = built.engine.stats.experts.distinct
    curve = None if moe is None else measured_curve(moe, {one.tokens: one.experts for one in distinct})
    costs = CostModel.fit(measured, ladder(max(args.rows)) if run.on_cuda else [], curve)
    limits = _limits(run, session, SearchLimits(MAX_STEPS, 1, MAX_STEPS + 1, 4096))
    file: dict[str, Any] = {"device": device_name(str(run.device)), "versions": versions(), "command": sys.argv}
    file |= {"measured": [[m.kind, m.batch, m.width, round(m.milliseconds, 4)] for m in measured], "cells": []}
    for rows in args.rows:
        chosen = choose(costs, limits, rows, args.tokens, args.probability)
        shapes: Sequence[DraftShape | None] = list(dict.fromkeys([*FIXED, chosen]))
        speeds = {shape: run_rows(session, shape, rows, work, args.probability) for shape in shapes}
        cell = {"rows": rows, "chosen": name(chosen), "of_best": round(speeds[chosen] / max(speeds.values()), 4)}
        cell["tok_s"] = {name(shape): round(speed, 1) for shape, speed in speeds.items()}
        cell["predicted_ms"] = {name(shape): round(costs.round_ms(rows, shape), 3) for shape in shapes}
        file["cells"].append(cell)
        print(f"at {time.perf_counter() - began:.0f} s: {json.dumps(cell)}", flush=True)
        args.output.write_text(json.dumps(file), encoding="utf-8")


def name(shape: DraftShape | None) -> str:
    return "plain" if shape is None else str(shape)


if __name__ == "__main__":
    main()
