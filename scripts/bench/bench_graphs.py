"""What each kind of CUDA graph gains: milliseconds of a round with it and without, by batch size (CUDA only).

    python scripts/bench/bench_graphs.py --method eagle3:3/1/4@2.5 --batch 1,4,16,32 -o graphs.json

One engine, whose graphs are captured anew for each variant: none at all; draft, verify and draft-extend as graphs of
their own; each of the three left out (its output is then copied to where the other graphs look for it, which is counted
here); the whole round as one. Rounds are timed as they run, scheduling, reading and all, prompts not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench import generate, parse_method
from bench_work import UniformRows

from specbatch.config_load import load_config
from specbatch.engine.build import build_engine
from specbatch.engine.engine import Engine
from specbatch.engine.executor import PHASES, GraphMode
from specbatch.engine.resolve import resolve
from specbatch.graphs.runner import GraphRunner
from specbatch.job.stats import commit, versions

REPEATS = 2


def variants() -> dict[str, tuple[GraphMode, frozenset[str]]]:
    left_out: dict[str, tuple[GraphMode, frozenset[str]]] = {
        f"phases but {phase}": ("phases", frozenset([phase])) for phase in PHASES
    }
    return {
        "none": ("none", frozenset()),
        "phases": ("phases", frozenset()),
        **left_out,
        "round": ("round", frozenset()),
    }


class EagerPhases(GraphRunner):
    """Runs some of a round's phases without their graphs. What they return is copied to where the graphs of the other
    phases read it."""

    def __init__(self, device: torch.device, eager: frozenset[str]) -> None:
        super().__init__(device)
        self._eager = eager
        self._functions: dict[tuple[Any, ...], Callable[[], Any]] = {}
        self._returned: dict[tuple[Any, ...], Any] = {}

    def capture(self, key: tuple[Any, ...], function: Callable[[], Any]) -> Any:
        self._functions[key] = function
        self._returned[key] = output = super().capture(key, function)
        return output

    def replace_output(self, key: tuple[Any, ...], output: Any) -> None:
        """The graph's own output is still written to."""
        self._returned[key] = output

    def replay(self, key: tuple[Any, ...]) -> Any:
        if key[0] in self._eager:
            copy_into(self.output(key), self._functions[key]())
        else:
            super().replay(key)
        return self._returned[key]


def copy_into(target: Any, source: Any) -> None:
    """Copy every tensor of a nest of dataclasses, tuples and lists onto its counterpart."""
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif isinstance(target, tuple | list):
        for mine, theirs in zip(target, source, strict=True):
            copy_into(mine, theirs)
    elif dataclasses.is_dataclass(target):
        for field in dataclasses.fields(target):
            copy_into(getattr(target, field.name), getattr(source, field.name))


def capture(engine: Engine, mode: GraphMode, eager: frozenset[str]) -> None:
    """Replace the engine's graphs, which are those of greedy rounds."""
    engine.set_methods(engine.executor.rounds.map(lambda round_: round_.method), mode, ahead=False)
    if engine.executor.runner is not None:
        engine.executor.runner = EagerPhases(engine.device, eager)
        with torch.inference_mode():
            engine.executor.capture(sampled=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="random:llama-3-8b")
    parser.add_argument("--method", default="eagle3:3/1/4@2.5", type=parse_method)
    parser.add_argument("--batch", default="1,4,16,32")
    parser.add_argument("--tokens-in", type=int, default=1000)
    parser.add_argument("--tokens-out", type=int, default=128)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--commit")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    batches = [int(part) for part in args.batch.split(",")]
    sets = [f"model.target={args.target}", *args.method.sets(), f"engine.max_batch_size={max(batches)}"]
    run = resolve(load_config(None, [*sets, "engine.prefix_cache=false", *args.set]))
    engine = build_engine(run)
    assert isinstance(engine, Engine), "only the device engine has graphs"
    times: dict[str, dict[int, float]] = {}
    for name, (mode, eager) in variants().items():
        capture(engine, mode, eager)
        times[name] = {batch: milliseconds(engine, batch, args.tokens_in, args.tokens_out) for batch in batches}
        print(f"{name:20}", "  ".join(f"{batch}: {ms:.3f} ms" for batch, ms in times[name].items()), flush=True)
    report: dict[str, Any] = {
        "commit": args.commit or commit(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "device": torch.cuda.get_device_name(),
        "versions": versions(),
        "target": args.target,
        "method": args.method.text,
        "ms_per_round": times,
        "gain": {
            name: {b: round(pair[0][b] / pair[1][b] - 1, 4) for b in batches} for name, pair in pairs(times).items()
        },
    }
    for name, gain in report["gain"].items():
        print(f"{name:28}", "  ".join(f"{batch}: {value:+.1%}" for batch, value in gain.items()))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def pairs(times: dict[str, dict[int, float]]) -> dict[str, tuple[dict[int, float], dict[int, float]]]:
    """(without, with) for each kind."""
    found = {f"{phase} graph": (times[f"phases but {phase}"], times["phases"]) for phase in PHASES}
    found["three graphs, over none"] = times["none"], times["phases"]
    found["one graph, over three"] = times["phases"], times["round"]
    return found


def milliseconds(engine: Engine, batch: int, tokens_in: int, tokens_out: int) -> float:
    """The mean of a few runs."""
    rows = UniformRows(tokens_in, tokens_out, engine.limits.vocab_size)
    found = []
    for _ in range(1 + REPEATS):  # the first one warms up
        whole, prefill = generate(engine, rows.draw(batch)), generate(engine, rows.draw(batch, tokens_out=1))
        found.append((whole.seconds - prefill.seconds) / whole.rounds * 1e3)
    return statistics.mean(found[1:])


if __name__ == "__main__":
    main()
