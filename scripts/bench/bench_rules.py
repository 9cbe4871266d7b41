"""A benchmark of the cost of rules for tokens: rows without rules and with each kind of rule run in turn over the whole
pipeline.

    python scripts/bench/bench_rules.py --target random:qwen2.5-1.5b --batch 64 --set speculation.method=none \\
        --time-limit 60                                                                    # a GPU
    python scripts/bench/bench_rules.py --target random:qwen2.5-1.5b --batch 64 --set speculation.method=eagle3 \\
        --set speculation.draft=random:eagle3-32k --set speculation.simulate_acceptance=2.5 --time-limit 60
    python scripts/bench/bench_rules.py --batch 8 --max-tokens 32 --repeats 2              # a CPU, minutes

Speeds are output tokens over the wall time of `LLM.generate`, results made and read. The best of the repeats counts,
and `share` is that speed against rows without rules. The kinds hardly change the texts, so that lengths and drafts stay
what they are: `acceptance_length` shows it. With `mixed`, one row of 16 has all of them. The first time of a kind
captures graphs: `first` says how many, and the seconds. One JSON line for each kind and time; no time begins after
`--time-limit`.
"""

from __future__ import annotations

import json
import time
from typing import Any

from bench_kinds import num_rows, open_llm, parser_of, report_of, write

from specbatch import LLM

MASK = {"min_tokens": 1}
PENALTIES = {"repetition_penalty": 1.001, "presence_penalty": 0.001}
BIAS = {"logit_bias": {"5": 0.001}}
BAD_WORDS = {"bad_words": ["quixotic zeal"]}
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "mask": MASK,
    "penalties": PENALTIES,
    "bias": BIAS,
    "bad_words": BAD_WORDS,
    "all": MASK | PENALTIES | BIAS | BAD_WORDS,
    "mixed": {},
}


def main() -> None:
    parser = parser_of(__doc__, KINDS, batch=64)
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds")
    args = parser.parse_args()
    rows, report = num_rows(args), report_of(args)
    measured: dict[str, list[tuple[float, float | None]]] = {kind: [] for kind in args.kinds}
    first: dict[str, dict[str, float]] = {}
    began = time.perf_counter()
    with open_llm(args) as llm:
        report["notes"] = llm.notes
        for repeat in range(args.repeats + 1):
            for kind, found in measured.items():
                if time.perf_counter() - began > args.time_limit:
                    continue
                graphs, seconds = llm.stats.late_graphs, llm.stats.late_graph_seconds
                one = run(llm, kind, rows)
                late = {"graphs": llm.stats.late_graphs - graphs, "seconds": llm.stats.late_graph_seconds - seconds}
                if repeat:  # the first time compiles and captures, so it does not count
                    found.append(one)
                else:
                    first[kind] = late
                line = {"bench": "rules", "kind": kind, "time": repeat, "tokens_per_second": round(one[0], 1), **late}
                print(json.dumps(line), flush=True)
        report["memory_shortages"] = llm.stats.memory_shortages
    best = {kind: max(found) for kind, found in measured.items() if found}
    report["kinds"] = {
        kind: {
            "tokens_per_second": round(speed, 1),
            "acceptance_length": None if length is None else round(length, 3),
            "share": round(speed / best["none"][0], 4) if "none" in best else None,
            "all": [round(one, 1) for one, _ in measured[kind]],
            "first": first[kind],
        }
        for kind, (speed, length) in best.items()
    }
    write(report, args)


def run(llm: LLM, kind: str, num_rows: int) -> tuple[float, float | None]:
    """Return the tokens per second, and the acceptance length."""
    stats = llm.stats.speculation
    began, tokens, rounds, committed = time.perf_counter(), llm.stats.generated_tokens, stats.rounds, stats.committed
    rows = [
        {"prompt": f"Tell me about the number {i}.", **KINDS["all" if kind == "mixed" and i % 16 == 3 else kind]}
        for i in range(num_rows)
    ]
    for result in llm.generate(rows):
        assert "error" not in result, result
    seconds, stats = time.perf_counter() - began, llm.stats.speculation
    length = (stats.committed - committed) / (stats.rounds - rounds) if stats.rounds > rounds else None
    return (llm.stats.generated_tokens - tokens) / seconds, length


if __name__ == "__main__":
    main()
