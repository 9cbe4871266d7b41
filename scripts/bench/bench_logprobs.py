"""What log-probabilities and margins cost: rows with and without `logprobs`, in turn, over the whole pipeline.

    python scripts/bench/bench_logprobs.py --rows 512 --batch 128 -o logprobs.json     # a GPU; SmolLM2, drafts as usual
    python scripts/bench/bench_logprobs.py --rows 512 --batch 128 --set speculation.method=none
    python scripts/bench/bench_logprobs.py --batch 8 --max-tokens 32 --repeats 2       # a CPU, minutes

Speeds are output tokens over the wall time of `LLM.generate`, results made and read. The best of the repeats counts,
and `share` is that speed against rows without log-probabilities. With `mixed`, one row of 16 wants them. On CUDA the
kernels alone are timed, too: argmax with and without the margin, and log-probabilities, in microseconds. An earlier
commit has no `argmax_and_margin`: compare whole rounds by `bench.py` at both commits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from bench_kinds import num_rows, open_llm, parser_of, report_of, write

from specbatch import LLM

KINDS: dict[str, Callable[[int], int | None]] = {
    "none": lambda i: None,
    "0": lambda i: 0,
    "1": lambda i: 1,
    "5": lambda i: 5,
    "20": lambda i: 20,
    "mixed": lambda i: 1 if i % 16 == 3 else None,
}


def main() -> None:
    parser = parser_of(__doc__, KINDS, batch=128)
    args = parser.parse_args()
    rows, report = num_rows(args), report_of(args)
    with open_llm(args) as llm:
        report["notes"] = llm.notes
        speeds: dict[str, list[float]] = {kind: [] for kind in args.kinds}
        for repeat in range(args.repeats + 1):
            for kind, found in speeds.items():
                speed = tokens_per_second(llm, rows, KINDS[kind])
                if repeat:  # the first time compiles and captures
                    found.append(speed)
    best = {kind: max(found) for kind, found in speeds.items()}
    report["speeds"] = {
        kind: {"tokens_per_second": round(best[kind], 1), "all": [round(one, 1) for one in found]}
        for kind, found in speeds.items()
    }
    if "none" in best:
        report["share"] = {kind: round(speed / best["none"], 4) for kind, speed in best.items()}
    if torch.cuda.is_available():
        report["kernels_us"] = {f"{size} rows of {vocab}": kernels(size, vocab) for size, vocab in GRID}
    write(report, args)


def tokens_per_second(llm: LLM, rows: int, wanted: Callable[[int], int | None]) -> float:
    began, before = time.perf_counter(), llm.stats.generated_tokens
    for _ in llm.generate({"prompt": f"Tell me about the number {i}.", "logprobs": wanted(i)} for i in range(rows)):
        pass
    return (llm.stats.generated_tokens - before) / (time.perf_counter() - began)


GRID = [(1, 49152), (128, 49152), (512, 49152), (1, 128256), (128, 128256), (512, 128256)]


def kernels(rows: int, vocab: int) -> dict[str, float]:
    """Microseconds of each kernel, in a CUDA graph of 100."""
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
