"""A check of the GPU engine against the CPU oracle, on real text.

    python scripts/check/check_gpu.py record --model MODEL --data gsm8k_test.jsonl --rows 200 -o oracle.json  # on CPU
    python scripts/check/check_gpu.py noise oracle.json --model HF_DIRECTORY -o noise.json  # on CPU
    python scripts/check/check_gpu.py check oracle.json --model MODEL -o report.json                             # CUDA

`record` keeps the greedy tokens of the CPU engine, and the margin between the two most likely tokens at each of them.
`noise` says how much bfloat16 alone moves such margins: transformers, same text, float32 against bfloat16, on CPU.
`check` runs the same rows on the GPU by every method, shape, page size and kind of graph, and says where the first
difference of a row is and what the oracle's margin was there. A difference at a margin above --tie is an error.
Drafts: a `draft_model` of the target's own first layers would need files; here the heads are random (`random:eagle`,
`random:eagle3`), since text must not depend on how good a draft is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from prompts import question_prompts
from transformers import AutoModelForCausalLM

from specbatch.config_load import load_config
from specbatch.results.stats import commit, device_name, versions
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.types import BatchEngine, Completion, Request, RngKey, SamplingParams

# The options of each run, in addition to the model and the data type.
RUNS: dict[str, list[str]] = {
    "none": ["speculation.method=none"],
    "none, eager": ["speculation.method=none", "engine.cuda_graphs=none"],
    "none, batch 1": ["speculation.method=none", "engine.max_batch_size=1"],
    "none, page size 1": ["speculation.method=none", "engine.page_size=1"],
    "none, page size 16": ["speculation.method=none", "engine.page_size=16"],
    "none, chunks of 100, no prefix cache": [
        "speculation.method=none",
        "engine.prefill_chunk_tokens=100",
        "engine.prefix_cache=false",
    ],
    "ngram": ["speculation.method=ngram"],
    "eagle3 1/1/2": ["eagle3", "1/1/2"],
    "eagle3 3/1/4": ["eagle3", "3/1/4"],
    "eagle3 3/1/4, eager": ["eagle3", "3/1/4", "engine.cuda_graphs=none"],
    "eagle3 5/4/8": ["eagle3", "5/4/8"],
    "eagle3 5/4/8, eager": ["eagle3", "5/4/8", "engine.cuda_graphs=none"],
    "eagle3 7/10/60": ["eagle3", "7/10/60"],
    "eagle 5/4/8": ["eagle", "5/4/8"],
    "eagle3 5/4/8, preempted": ["eagle3", "5/4/8", "engine.kv_cache_tokens=5120", "engine.page_size=16"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    record = commands.add_parser("record")
    record.add_argument("--data", required=True)
    record.add_argument("--rows", type=int, default=200)
    record.add_argument("--max-tokens", type=int, default=128)
    check = commands.add_parser("check")
    check.add_argument("oracle", type=Path)
    check.add_argument("--dtype", default="bfloat16")
    check.add_argument("--tie", type=float, default=0.25, help="margin in logits under which bf16 may decide otherwise")
    check.add_argument("--run", action="append", help="only these; may be repeated")
    check.add_argument("--rows", type=int)
    check.add_argument("--commit")
    rng = commands.add_parser("noise")
    rng.add_argument("oracle", type=Path)
    rng.add_argument("--rows", type=int, default=50)
    for command in (record, check, rng):
        command.add_argument("--model", required=True)
        command.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    run = {"record": record_oracle, "check": check_all, "noise": measure_noise}[args.command]
    sys.exit(run(args))


def options(text: Sequence[str]) -> list[str]:
    sets = []
    for part in text:
        if part in ("eagle", "eagle3"):
            sets += [f"speculation.method={part}", f"speculation.draft=random:{part}"]
        elif part.count("/") == 2:
            names = ("num_steps", "topk", "num_draft_tokens")
            sets += [f"speculation.{name}={value}" for name, value in zip(names, part.split("/"), strict=True)]
        else:
            sets.append(part)
    return sets


def run_rows(engine: BatchEngine, prompts: list[list[int]], params: SamplingParams) -> tuple[list[Completion], float]:
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.submit(Request(i, prompt, params, RngKey(0, i, 0)))
    done: dict[int, Completion] = {}
    while len(done) < len(prompts):
        done |= {c.request_id: c for c in engine.step()}
    return [done[i] for i in range(len(prompts))], time.perf_counter() - began


def record_oracle(args: argparse.Namespace) -> int:
    run = resolve(load_config(None, [f"model.target={args.model}", "engine.device=cpu", "engine.max_batch_size=8"]))
    prompts = question_prompts(Path(args.data), run.tokenizer, args.rows)
    rows, seconds = run_rows(build_engine(run), prompts, SamplingParams(max_tokens=args.max_tokens, logprobs=2))
    out = []
    for prompt, row in zip(prompts, rows, strict=True):
        assert row.logprobs is not None
        margins = [round(t.top[0][1] - t.top[1][1], 5) for t in row.logprobs]
        out.append({"prompt": prompt, "tokens": row.token_ids, "margins": margins})
    report = {"commit": commit(), "seconds": round(seconds, 1), "max_tokens": args.max_tokens, "rows": out}
    args.output.write_text(json.dumps(report))
    print(f"{len(out)} rows, {seconds:.0f} s")
    return 0


@torch.inference_mode()
def measure_noise(args: argparse.Namespace) -> int:
    """Measure how far bfloat16 moves the margin between float32's two most likely tokens, at every token of the
    oracle's text, and the margins at which it changes the choice."""
    rows = json.loads(args.oracle.read_text())["rows"][: args.rows]
    models = [AutoModelForCausalLM.from_pretrained(args.model, dtype=d) for d in (torch.float32, torch.bfloat16)]
    shifts, turned = [], []
    for row in rows:
        first = len(row["prompt"]) - 1
        text = torch.tensor([row["prompt"] + row["tokens"][:-1]])
        exact, rounded = (model(text).logits[0, first:].float() for model in models)
        pair = exact.topk(2, dim=-1).indices
        margin, other = ((x.gather(1, pair) * torch.tensor([1.0, -1.0])).sum(dim=1) for x in (exact, rounded))
        shifts.append(other - margin)
        turned.append(margin[exact.argmax(dim=1) != rounded.argmax(dim=1)])
    shift, flips = torch.cat(shifts).abs(), torch.cat(turned)
    report = {
        "commit": commit(),
        "positions": len(shift),
        "shift_mean": float(shift.mean()),
        "shift_99.9_percent": float(shift.quantile(0.999)),
        "shift_max": float(shift.max()),
        "choices_turned": len(flips),
        "largest_margin_turned": float(flips.max()) if len(flips) else None,
    }
    args.output.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))
    return 0


def compare(expected: dict[str, Any], tokens: list[int]) -> float | None:
    """Return the oracle's margin where the row first differs, or None if it does not."""
    for i, token in enumerate(expected["tokens"]):
        if i >= len(tokens) or tokens[i] != token:
            margin: float = expected["margins"][i]
            return margin
    return None if len(tokens) == len(expected["tokens"]) else 0.0


def check_all(args: argparse.Namespace) -> int:
    oracle = json.loads(args.oracle.read_text())
    rows = oracle["rows"][: args.rows]
    report: dict[str, Any] = {
        "commit": args.commit or commit(),
        "oracle_commit": oracle["commit"],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else device_name("cpu"),
        "versions": versions(),
        "dtype": args.dtype,
        "model": args.model,
        "num_rows": len(rows),
        "runs": {},
    }
    failed = False
    plain: list[list[int]] = []
    for name in args.run or RUNS:
        common = [f"model.target={args.model}", f"model.dtype={args.dtype}", "engine.max_batch_size=64"]
        sets = [*common, *options(RUNS[name])]
        try:
            run = resolve(load_config(None, sets))
            began = time.perf_counter()
            engine = build_engine(run)
            ready = time.perf_counter() - began
            params = SamplingParams(max_tokens=oracle["max_tokens"])
            done, seconds = run_rows(engine, [row["prompt"] for row in rows], params)
        except Exception as error:  # the other runs are checked all the same
            report["runs"][name] = {"error": f"{type(error).__name__}: {error}"}
            print(name, report["runs"][name], flush=True)
            failed = True
            continue
        tokens = [c.token_ids for c in done]
        plain = plain or tokens
        margins = [m for m in map(compare, rows, tokens) if m is not None]
        result = {
            "ready_seconds": round(ready, 1),
            "seconds": round(seconds, 2),
            "acceptance_length": engine.stats.speculation.acceptance_length,
            "preemptions": engine.stats.preemptions,
            "rows_equal_to_the_oracle": len(rows) - len(margins),
            "largest_margin_at_a_difference": max(margins, default=None),
            "differences_above_tie": sum(m >= args.tie for m in margins),
            "rows_equal_to_the_first_run": sum(a == b for a, b in zip(tokens, plain, strict=True)),
        }
        failed |= result["differences_above_tie"] > 0
        report["runs"][name] = result
        args.output.write_text(json.dumps(report, indent=1))
        print(name, json.dumps(result), flush=True)
        del engine, run
        torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    main()
