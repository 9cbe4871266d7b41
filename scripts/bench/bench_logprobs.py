"""A benchmark of the cost of log-probabilities, margins and stop strings: rows with and without them run in turn over
the whole pipeline.

    python scripts/bench/bench_logprobs.py --rows 512 --batch 128 -o logprobs.json     # a GPU; SmolLM2, drafts as usual
    python scripts/bench/bench_logprobs.py --rows 512 --batch 128 --set speculation.method=none
    python scripts/bench/bench_logprobs.py --rows 512 --max-tokens 256 --kinds none stop 1 --time-limit 45 \\
        --set speculation.method=none
    python scripts/bench/bench_logprobs.py --batch 8 --max-tokens 32 --repeats 2       # a CPU, minutes

Speeds are output tokens over the wall time of `LLM.generate_lines`, which makes lines as for a file; with `--decode` of
`LLM.generate`. The best of the repeats counts, and `share` is that speed against rows without either. With `mixed`, one
row of 16 wants log-probabilities; `stop` has two texts that end no row. One JSON line for each kind and time, with the
share of the time in which the host only `waited` for the device: near 0, the host is the limit. No time begins after
`--time-limit`. On CUDA the kernels alone are timed, too: argmax with and without the margin, and log-probabilities, in
microseconds. An earlier commit has no `argmax_and_margin`: compare whole rounds by `bench.py` at both commits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from bench_kinds import num_rows, open_llm, parser_of, report_of, write

from specbatch import LLM

KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda i: {},
    "stop": lambda i: {"stop": ["quixotic zeal\n", "No such text!"]},
    "0": lambda i: {"logprobs": 0},
    "1": lambda i: {"logprobs": 1},
    "5": lambda i: {"logprobs": 5},
    "20": lambda i: {"logprobs": 20},
    "mixed": lambda i: {"logprobs": 1} if i % 16 == 3 else {},
}


def main() -> None:
    parser = parser_of(__doc__, KINDS, batch=128)
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds")
    parser.add_argument("--decode", action="store_true", help="results as dicts")
    args = parser.parse_args()
    rows, report = num_rows(args), {**report_of(args), "target": args.target, "batch": args.batch}
    began = time.perf_counter()
    with open_llm(args) as llm:
        report["notes"] = llm.notes
        speeds: dict[str, list[float]] = {kind: [] for kind in args.kinds}
        for repeat in range(args.repeats + 1):
            for kind, found in speeds.items():
                if time.perf_counter() - began > args.time_limit:
                    continue
                speed, waited = tokens_per_second(llm, rows, KINDS[kind], args.decode)
                line = {"kind": kind, "time": repeat, "tokens_per_second": round(speed, 1), "waited": round(waited, 3)}
                print(json.dumps(line), flush=True)
                if repeat:  # the first time compiles and captures, so it does not count
                    found.append(speed)
    best = {kind: max(found) for kind, found in speeds.items() if found}
    report["speeds"] = {
        kind: {"tokens_per_second": round(max(found), 1), "all": [round(one, 1) for one in found]}
        for kind, found in speeds.items()
        if found
    }
    if "none" in best:
        report["share"] = {kind: round(speed / best["none"], 4) for kind, speed in best.items()}
    if torch.cuda.is_available():
        report["kernels_us"] = {f"{size} rows of {vocab}": kernels(size, vocab) for size, vocab in GRID}
    write(report, args)


def tokens_per_second(
    llm: LLM, rows: int, fields: Callable[[int], dict[str, Any]], decode: bool
) -> tuple[float, float]:
    """Return the tokens per second, and the share of the time in which the host waited for the device."""
    began, before = time.perf_counter(), replace(llm.stats)
    run: Callable[..., Iterable[object]] = llm.generate if decode else llm.generate_lines
    for _ in run({"prompt": f"Tell me about the number {i}.", **fields(i)} for i in range(rows)):
        pass
    seconds, now = time.perf_counter() - began, llm.stats
    waited = now.device_wait_seconds - before.device_wait_seconds
    return (now.generated_tokens - before.generated_tokens) / seconds, waited / seconds


GRID = [(1, 49152), (128, 49152), (512, 49152), (1, 128256), (128, 128256), (512, 128256)]


def kernels(rows: int, vocab: int) -> dict[str, float]:
    """Measure the microseconds of each kernel, in a CUDA graph of 100 launches."""
    from specbatch.kernels import triton as ops

    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
    index, tokens = torch.arange(rows, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda")
    functions: dict[str, Callable[[], Any]] = {
        "argmax": lambda: ops.argmax(logits),
        "argmax_and_margin": lambda: ops.argmax_and_margin(logits),
    }
    for num_top in (0, 1, 5, 20):
        functions[f"logprobs, {num_top} top"] = lambda num_top=num_top: ops.logprobs(logits, index, tokens, num_top)  # type: ignore[misc]
    return {name: round(microseconds(function), 2) for name, function in functions.items()}


def microseconds(function: Callable[[], Any], count: int = 100) -> float:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            function()
    graph.replay()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    graph.replay()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1000 / count


if __name__ == "__main__":
    main()
