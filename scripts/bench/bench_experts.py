"""A mixture of experts on several GPUs: the ways to divide it, for prompts and rounds apart.

    python scripts/bench/bench_experts.py --ways tensors,requests,requests+lanes --rows 256,1024 -o experts.jsonl

Prints a line of JSON for each way, skew of the router and number of rows of a GPU: tokens per second of prompts, and
milliseconds of a round. `retries`: how often rank 0 found no free memory and first gave cached memory back to the
driver, which waits for the GPU. Before them comes a line with the floors: the time that the exchanges of a round and of
a chunk take at the speed of the links. Two lanes can hide no more than that.

- `tensors`: each GPU has a part of every expert and some of the heads, for the rows of all GPUs.
- `experts`: whole experts, and some of the heads.
- `requests`: whole experts, and rows of its own. Tokens travel to their experts and back.
- `+lanes` after a name: `engine.two_batch_overlap: on`; `+auto`: what the start measures.

On a CPU (`--device cpu --target random:tiny-experts`) it shows that the script runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch

from specbatch.config_load import load_config
from specbatch.setup.ranks.ranked_engine import build_ranked
from specbatch.setup.resolve import ResolvedRun, resolve
from specbatch.types import BatchEngine, Request, RngKey, SamplingParams

_DIVISIONS = {
    "tensors": ["engine.expert_parallel=off"],
    "experts": ["engine.expert_parallel=on", "engine.dp_attention=off"],
    "requests": ["engine.expert_parallel=on", "engine.dp_attention=on"],
}
_LANES = {"": "off", "lanes": "on", "auto": "auto"}
_LINK = 450e9  # bytes a second of NVLink of an H100, in one direction
Line = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="random:qwen3-30b-a3b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ways", default="tensors,experts,requests,requests+lanes")
    parser.add_argument("--skews", default="0,1", help="of the router; 0 is uniform")
    parser.add_argument("--rows", default="256,512,1024", help="of a GPU")
    parser.add_argument("--context", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    if args.output is not None:
        args.output.unlink(missing_ok=True)
    for skew in args.skews.split(","):
        for way in args.ways.split(","):
            # A process of its own gives back all memory of its GPU.
            process = multiprocessing.get_context("spawn").Process(target=measure_or_say, args=(args, way, float(skew)))
            process.start()
            process.join()


def measure_or_say(args: argparse.Namespace, way: str, skew: float) -> None:
    try:
        measure(args, way, skew)
    except Exception as error:  # the other ways still run
        say(args.output, {"way": way, "skew": skew, "error": f"{type(error).__name__}: {error}"[-1500:]})


def say(output: Path | None, line: Line) -> None:
    print(json.dumps(line), flush=True)
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps(line) + "\n")


def measure(args: argparse.Namespace, way: str, skew: float) -> None:
    """Build the engine of one way, and measure each number of rows, the largest last."""
    run, rows = resolved(args, way, skew), sorted(map(int, args.rows.split(",")))
    began = time.perf_counter()
    engine = build_ranked(run)
    try:
        shown = ("two_batch_overlap", "expert_parallel", "ready in", "compiled")
        notes = [note for note in run.notes if any(word in note for word in shown)]
        found: Line = {"way": way, "skew": skew, "ranks": args.ranks, "start": round(time.perf_counter() - began, 1)}
        say(args.output, found | {"notes": notes})
        run_rows(engine, args, rows[0] * args.ranks)  # compiles kernels, and captures graphs
        for count in rows:
            times = run_rows(engine, args, count * args.ranks)
            floors = floor_of(run, way.partition("+")[0], args.ranks, count)
            say(args.output, found | {"rows": count, **times, "floor_ms": floors})
    finally:
        engine.close()


def resolved(args: argparse.Namespace, way: str, skew: float) -> ResolvedRun:
    division, _, lanes = way.partition("+")
    most = max(map(int, args.rows.split(",")))
    target = args.target if not skew else f"{args.target}?skew={skew:g}"
    sets = [
        f"model.target={target}",
        "speculation.method=none",
        "engine.prefix_cache=false",
        f"engine.device={args.device}",
        f"engine.tensor_parallel={args.ranks}",
        f"engine.two_batch_overlap={_LANES[lanes]}",
        # A batch of ranks that share all rows is as large as those of ranks with rows of their own together.
        f"engine.max_batch_size={most if division == 'requests' else most * args.ranks}",
        *_DIVISIONS[division],
        *args.set,
    ]
    return resolve(load_config(None, sets))


def run_rows(engine: BatchEngine, args: argparse.Namespace, count: int) -> Line:
    """Run rows from their prompts to their ends, all at once."""
    params = SamplingParams(max_tokens=args.rounds, ignore_eos=True)
    before, retries = engine.stats, allocation_retries()
    prefill, decode, rounds = before.prefill_seconds, before.decode_seconds, before.rounds
    for i in range(count):
        prompt = [(i * 7919 + j * 104729) % engine.limits.vocab_size for j in range(args.context)]
        engine.submit(Request(i, prompt, params, RngKey(0, i, 0)))
    done, began = 0, time.perf_counter()
    while done < count:
        done += len(engine.step())
    seconds, after = time.perf_counter() - began, engine.stats
    prefill, decode, rounds = after.prefill_seconds - prefill, after.decode_seconds - decode, after.rounds - rounds
    return {
        "prompt_tokens_per_second": round(count * args.context / prefill),
        "round_ms": round(1e3 * decode / rounds, 3),
        "round_tokens_per_second": round(count * args.rounds / decode),
        "seconds": round(seconds, 2),
        "retries": allocation_retries() - retries,
    }


def allocation_retries() -> int:
    return torch.cuda.memory_stats(0).get("num_alloc_retries", 0)  # there are no statistics if no GPU is used


def floor_of(run: ResolvedRun, division: str, ranks: int, rows: int) -> dict[str, float]:
    """Return the milliseconds that the exchanges of a round, and of prompt chunks of all ranks, take at the speed of
    the links. With rows of its own, a rank sends its tokens to each other one and gets them back; otherwise all ranks
    add two tensors of all tokens in each layer."""
    config, chunk = run.target.config, run.engine.prefill_chunk_tokens

    def milliseconds(tokens_of_rank: int) -> float:
        tensor = tokens_of_rank * config.hidden_size * 2
        # The least that a sum of all tokens sends is two parts of (N - 1) / N.
        sent = (2 if division == "requests" else 4) * tensor * (ranks - 1)
        return round(1e3 * config.num_layers * sent / _LINK, 3)

    return {"round": milliseconds(rows), "chunk": milliseconds(chunk if division == "requests" else chunk // ranks)}


if __name__ == "__main__":
    main()
