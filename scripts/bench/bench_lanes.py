"""A benchmark of one lane against two on CUDA (engine.two_batch_overlap): the microseconds of a round, and a check that
outputs are equal.

    python scripts/bench/bench_lanes.py -o lanes.jsonl
    python scripts/bench/bench_lanes.py --check -o lanes_check.jsonl        # tokens with the option off and on, float32

Prints a JSON line for each case. A case that fails is a line with `error`, and the next one runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench import parse_method

from specbatch.config_load import load_config
from specbatch.engine.engine import Engine
from specbatch.engine.overlap.lanes import LaneSizes
from specbatch.setup.autotune_lanes import time_lanes
from specbatch.setup.build import build_engine
from specbatch.setup.dummies import dummy_batch
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams

TARGETS = "random:smollm2-135m,random:qwen2.5-1.5b"
METHODS = "none,eagle3:3/1/4@2.5"
CHECK_METHODS = "none,eagle3:3/1/4,eagle3:3/3/8,ngram:3/1/4"
_PRIMES = 7919, 104729


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TARGETS, help="several: with commas between them")
    parser.add_argument("--method", help=f"default: {METHODS}; with --check: {CHECK_METHODS}")
    parser.add_argument("--batch", default="32,64,128,256")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--check", action="store_true", help="compare tokens instead of times")
    parser.add_argument("--rows", type=int, default=40, help="of --check")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS", help="start no case after that")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    if args.output is not None:
        args.output.unlink(missing_ok=True)
    for target in args.target.split(","):
        for method in (args.method or (CHECK_METHODS if args.check else METHODS)).split(","):
            case = {"target": target, "method": method}
            if time.perf_counter() - began > args.time_limit:
                say(args.output, case | {"skipped": "time limit"})
                continue
            try:
                for line in (check if args.check else measure)(args, target, method):
                    say(args.output, case | line)
            except Exception as error:
                say(args.output, case | {"error": "".join(traceback.format_exception(error))[-1500:]})
            gc.collect()


def say(output: Path | None, line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps(line) + "\n")


def engine_of(args: argparse.Namespace, target: str, method: str, *sets: str) -> Engine:
    config = load_config(
        None,
        [f"model.target={target}", *parse_method(method).sets(), "engine.prefix_cache=false", *sets, *args.set],
    )
    engine = build_engine(resolve(config))
    assert isinstance(engine, Engine), "only the device engine has lanes"
    return engine


def measure(args: argparse.Namespace, target: str, method: str) -> Iterator[dict[str, Any]]:
    batches = sorted(int(part) for part in args.batch.split(","))
    began = time.perf_counter()
    # Graphs are captured here, for the sizes that are timed only.
    engine = engine_of(
        args, target, method, "engine.two_batch_overlap=on", "engine.cuda_graphs=none",
        f"engine.max_batch_size={batches[-1]}",
    )  # fmt: skip
    start, sizes = time.perf_counter() - began, LaneSizes.up_to(batches[-1], 1)
    with torch.inference_mode(), dummy_batch(engine, batches[-1], args.context):
        running = engine.prepare_round()
        for batch in batches:
            round_ = engine.executor.rounds.at(batch)
            times = time_lanes(round_, running[:batch], engine.executor.padded_size(batch), sizes.of(batch))
            yield {
                "rows": batch,
                "one_lane_us": round(times.one, 1),
                "two_lanes_us": round(times.two, 1),
                "gain": round(times.one / times.two - 1, 4),
                "start_seconds": round(start, 1),
            }


def check(args: argparse.Namespace, target: str, method: str) -> Iterator[dict[str, Any]]:
    """Check rows of different lengths, more than run at once: lanes are divided, drained and merged."""
    found = {}
    for option in ("off", "on"):
        sets = ("model.dtype=float32", "engine.max_batch_size=32", f"engine.two_batch_overlap={option}")
        engine = engine_of(args, target, method, *sets)
        found[option] = answers(engine, args.rows)
        del engine
        gc.collect()
    differing = [i for i in found["off"] if found["off"][i][0] != found["on"][i][0]]
    yield {
        "rows": args.rows,
        "equal": len(found["off"]) - len(differing),
        # A row with a small margin may differ: sums over other numbers of rows are added in another order.
        "margins_of_others": [min(found[option][i][1] for option in found) for i in differing],
    }


def answers(engine: Engine, count: int) -> dict[int, tuple[list[int], float]]:
    """Return the tokens and the lowest margin of each row."""
    vocab = engine.limits.vocab_size
    for i in range(count):
        prompt = [(i * _PRIMES[0] + j * _PRIMES[1]) % vocab for j in range(20 + 37 * i % 300)]
        params = SamplingParams(max_tokens=8 + 11 * i % 56, ignore_eos=True)
        engine.submit(Request(i, prompt, params, RngKey(0, i, 0)))
    done: dict[int, tuple[list[int], float]] = {}
    while len(done) < count:
        done |= {c.request_id: (c.token_ids, c.margin.value) for c in engine.step()}
    return done


if __name__ == "__main__":
    main()
