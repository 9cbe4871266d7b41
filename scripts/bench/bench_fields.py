"""Measure the cost of fields of rows: log-probabilities, stop strings and rules for tokens. Rows without any and with
each kind, in turn, over the whole pipeline.

    python scripts/bench/bench_fields.py --batch 128 -o fields.json                        # a GPU; drafts as usual
    python scripts/bench/bench_fields.py --target random:qwen2.5-1.5b --kinds none penalties all --time-limit 60 \\
        --set speculation.method=eagle3 --set speculation.draft=random:eagle3-32k \\
        --set speculation.simulate_acceptance=2.5
    python scripts/bench/bench_fields.py --batch 8 --max-tokens 32 --repeats 2             # a CPU, minutes

Speeds are output tokens over the wall time of `LLM.stream_lines`, which makes lines as for a file. The best of the
repeats counts, and `share` is that speed against rows of the kind `none`. The kinds hardly change the texts, so that
lengths and drafts stay what they are: `acceptance_length` shows it. Of a `mixed` kind, one row of 16 has the fields.
The first time of a kind compiles and captures, and does not count. One JSON line for each kind and time, with the share
of the time in which the host only `waited` for the device: near 0, the host is the limit. No time begins after
`--time-limit`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specbatch import LLM
from specbatch.results.stats import commit, device_name, versions
from specbatch.strict.yaml import load_yaml

MASK = {"min_tokens": 1}
PENALTIES = {"repetition_penalty": 1.001, "presence_penalty": 0.001}
BIAS = {"logit_bias": {"5": 0.001}}
BAD_WORDS = {"bad_words": ["quixotic zeal"]}
RULES: dict[str, Any] = MASK | PENALTIES | BIAS | BAD_WORDS
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "stop": {"stop": ["quixotic zeal\n", "No such text!"]},
    **{f"logprobs-{count}": {"logprobs": count} for count in (0, 1, 5, 20)},
    "logprobs-mixed": {"logprobs": 1},
    "mask": MASK,
    "penalties": PENALTIES,
    "bias": BIAS,
    "bad_words": BAD_WORDS,
    "rules": RULES,
    "rules-mixed": RULES,
}


@dataclass(frozen=True)
class Run:
    """One time of one kind."""

    tokens_per_second: float
    acceptance_length: float | None
    waited: float  # share of the time
    late_graphs: int
    late_graph_seconds: float


def run(llm: LLM, kind: str, num_rows: int) -> Run:
    began, before = time.perf_counter(), replace(llm.stats, speculation=replace(llm.stats.speculation))
    every = 16 if kind.endswith("mixed") else 1
    rows = [
        {"prompt": f"Tell me about the number {i}.", **(KINDS[kind] if i % every == 3 % every else {})}
        for i in range(num_rows)
    ]
    lines = list(llm.stream_lines(rows))
    seconds, now = time.perf_counter() - began, llm.stats
    assert not [line for line in lines if "error" in json.loads(line)]
    rounds = now.speculation.rounds - before.speculation.rounds
    committed = now.speculation.committed - before.speculation.committed
    return Run(
        round((now.generated_tokens - before.generated_tokens) / seconds, 1),
        round(committed / rounds, 3) if rounds else None,
        round((now.device_wait_seconds - before.device_wait_seconds) / seconds, 3),
        now.late_graphs - before.late_graphs,
        round(now.late_graph_seconds - before.late_graph_seconds, 2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin:smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, help="default: four batches")
    parser.add_argument("--batch", type=int, default=64, help="requests at the same time")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    options: dict[str, Any] = {"engine.max_batch_size": args.batch, "sampling.max_tokens": args.max_tokens}
    options |= {name: load_yaml(value) for name, _, value in (item.partition("=") for item in args.set)}
    num_rows, found = args.rows or 4 * args.batch, {kind: list[Run]() for kind in args.kinds}
    began = time.perf_counter()
    with LLM(args.target, **{"model.generation_config": "none", "sampling.ignore_eos": True, **options}) as llm:
        for repeat in range(args.repeats + 1):
            for kind, runs in found.items():
                if time.perf_counter() - began <= args.time_limit:
                    runs.append(run(llm, kind, num_rows))
                    print(json.dumps({"kind": kind, "time": repeat, **vars(runs[-1])}), flush=True)
        notes, shortages = llm.notes, llm.stats.memory_shortages
    best = {kind: max(runs[1:], key=lambda one: one.tokens_per_second) for kind, runs in found.items() if len(runs) > 1}
    report = {
        "command": sys.argv[1:],
        "commit": commit(),
        "versions": versions(),
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
        "rows": num_rows,
        "notes": notes,
        "memory_shortages": shortages,
        "kinds": {
            kind: {
                **vars(one),
                "share": round(one.tokens_per_second / best["none"].tokens_per_second, 4) if "none" in best else None,
                "all": [other.tokens_per_second for other in found[kind][1:]],
                "first": vars(found[kind][0]),
            }
            for kind, one in best.items()
        },
    }
    print(text := json.dumps(report, indent=1))
    if args.output is not None:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
