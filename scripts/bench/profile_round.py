"""A profile of a round, and of a prompt chunk, on CUDA: the time of each kernel by name.

    python scripts/bench/profile_round.py --target random:llama-3-8b --method eagle3:3/1/4@2.5 --batch 1,64 -o x.json

Prints for each batch size the phases (of a round that is one graph), then the kernels of whole rounds: how often, how
many microseconds in a round, and what share; how much of the span the GPU was idle, and in how much of it at least two
kernels ran (two lanes, or a kernel that starts while the one before it ends). `--trace FILE.json`: the rounds of the
largest batch as a Chrome trace, for https://ui.perfetto.dev; kernels of each stream are a line, and phases and lanes of
rounds that are no graphs (`engine.cuda_graphs=none`) have names. scripts/bench/trace_timeline.py draws it.
`--trace-prompts FILE.json`: the same of its prompts. On a CPU, and with `engine.tensor_parallel` (of rank 0), there are
the traces only.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from bench import parse_method
from torch.profiler import ProfilerActivity, profile

from specbatch.config_load import load_config
from specbatch.engine.engine import Engine
from specbatch.setup.build import build_engine
from specbatch.setup.ranks.ranked_engine import build_ranked
from specbatch.setup.resolve import resolve
from specbatch.tune.timing import time_phases
from specbatch.types import BatchEngine, Request, RngKey, SamplingParams

CONTEXT = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="random:llama-3-8b")
    parser.add_argument("--method", type=parse_method, default="none")
    parser.add_argument("--batch", default="1,16,64,256")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--top", type=int, default=14)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--trace", type=Path, metavar="FILE.json")
    parser.add_argument("--trace-prompts", type=Path, metavar="FILE.json")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    batches = [int(part) for part in args.batch.split(",")]
    method = parse_method(args.method) if isinstance(args.method, str) else args.method
    sets = [f"model.target={args.target}", *method.sets(), f"engine.max_batch_size={max(batches)}", *args.set]
    run = resolve(load_config(None, ["engine.prefix_cache=false", *sets]))
    if run.config.engine.tensor_parallel > 1 or not run.on_cuda:
        ranked = build_ranked(run) if run.config.engine.tensor_parallel > 1 else build_engine(run)
        try:
            profile_rounds(ranked, max(batches), args.rounds, args.trace, args.trace_prompts, args.context)
        finally:
            ranked.close()
        return
    engine = build_engine(run)
    assert isinstance(engine, Engine), "only the device engine is profiled"
    print("ready", {k: round(v, 1) for k, v in engine.start_seconds.items()}, flush=True)
    for note in run.notes:
        print(" ", note)
    report: dict[str, Any] = {"method": method.text, "target": args.target, "batches": {}}
    for batch in batches:
        phases = time_phases(engine, batch, args.context)
        print(f"\n== batch {batch}:", {k: round(v, 3) for k, v in phases.items()}, "ms", flush=True)
        trace, trace_prompts = (args.trace, args.trace_prompts) if batch == max(batches) else (None, None)
        prompts, rounds = profile_rounds(engine, batch, args.rounds, trace, trace_prompts, args.context)
        kernels = {"prompts": summed(prompts, 1), "round": summed(rounds, args.rounds)}
        report["batches"][batch] = {"phases": phases, **kernels}
        show(kernels["round"], f"round of {batch}", args.top)
        if batch == max(batches):
            show(kernels["prompts"], "prompts", args.top)
        if args.output:
            args.output.write_text(json.dumps(report, indent=1))


def profile_rounds(
    engine: BatchEngine, batch: int, rounds: int, trace: Path | None, trace_prompts: Path | None, context: int
) -> tuple[profile, profile]:
    """Profile the prefill of `batch` prompts (all steps), and `rounds` rounds after it. `trace`: the file for the trace
    of the rounds. `trace_prompts`: the file for that of the prefill."""
    on_cuda, traces = torch.cuda.is_available(), trace is not None or trace_prompts is not None
    activities = [ProfilerActivity.CUDA] if on_cuda and not traces else [ProfilerActivity.CPU]
    if on_cuda and traces:
        activities.append(ProfilerActivity.CUDA)
    params = SamplingParams(max_tokens=(rounds + 8) * 8, ignore_eos=True)
    for i in range(batch):
        prompt = [(i * 7919 + j * 104729) % engine.limits.vocab_size for j in range(context)]
        engine.submit(Request(-1 - i, prompt, params, RngKey(0, i, 0)))
    with profile(activities=activities) as prompts:
        while engine.num_waiting:
            engine.step()
        if on_cuda:
            torch.cuda.synchronize()
    if trace_prompts is not None:  # before the next profile, which drops these times
        prompts.export_chrome_trace(str(trace_prompts))
    for _ in range(3):
        engine.step()
    with profile(activities=activities) as decode:
        for _ in range(rounds):
            engine.step()
        if on_cuda:
            torch.cuda.synchronize()
    if trace is not None:
        decode.export_chrome_trace(str(trace))
    while engine.num_running:
        engine.step()
    return prompts, decode


def summed(trace: profile, repeats: int) -> dict[str, Any]:
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    spans = []
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            totals[event.name][0] += 1
            totals[event.name][1] += event.time_range.elapsed_us()
            spans.append((event.time_range.start, event.time_range.end))
    busy, concurrent = times_with_kernels(spans)
    whole = max(end for _, end in spans) - min(first for first, _ in spans)
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    return {
        "span_us": whole / repeats,
        "idle_share": 1 - busy / whole,
        "concurrent_share": concurrent / whole,
        "kernels": [{"name": n[:110], "count": c / repeats, "us": us / repeats} for n, (c, us) in ordered],
    }


def times_with_kernels(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the time in which at least one of the spans ran, and the time in which at least two did."""
    changes = sorted([(first, 1) for first, _ in spans] + [(last, -1) for _, last in spans])
    running, before, times = 0, changes[0][0], [0.0, 0.0]
    for at, change in changes:
        for count in range(min(running, 2)):
            times[count] += at - before
        running, before = running + change, at
    return times[0], times[1]


def show(part: dict[str, Any], title: str, top: int) -> None:
    idle, concurrent = f"idle {part['idle_share']:.1%}", f"two kernels {part['concurrent_share']:.1%}"
    print(f"{title}: {part['span_us'] / 1e3:.3f} ms, {idle}, {concurrent}")
    for kernel in part["kernels"][:top]:
        share = kernel["us"] / part["span_us"]
        print(f"  {kernel['us']:10.1f} us {share:6.1%} {kernel['count']:8.1f}x  {kernel['name']}", flush=True)


if __name__ == "__main__":
    main()
