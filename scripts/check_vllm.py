"""A trained EAGLE-3 head in vLLM beside ours: the same file, the same prompts, greedy.

    python scripts/check_vllm.py prepare --model TARGET --rows eval.jsonl -o ids.json           # our environment
    python scripts/check_vllm.py run ids.json --model HF_DIRECTORY --head HEAD --num-steps 5 -o vllm.json      # vLLM's
    specbatch generate eval.jsonl -o ours.jsonl --set sampling.logprobs=2 ...                   # our environment
    python scripts/check_vllm.py compare vllm.json ours.jsonl -o report.json

`eval.jsonl` are rows with `messages`, such as those that train_draft.py leaves in training/. `compare` says how far the
acceptance lengths are apart, how many texts are equal, and by how much our target preferred its token to the second
best where a text first differs: in bfloat16, two engines part at ties.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    prepared = commands.add_parser("prepare")
    prepared.add_argument("--model", required=True)
    prepared.add_argument("--rows", type=Path, required=True)
    prepared.set_defaults(command=prepare)
    ran = commands.add_parser("run")
    ran.add_argument("ids", type=Path)
    ran.add_argument("--model", required=True)
    ran.add_argument("--head")
    ran.add_argument("--num-steps", type=int, default=5)
    ran.add_argument("--max-tokens", type=int, default=256)
    ran.add_argument("--max-batch-size", type=int, default=64)
    ran.add_argument("--memory", type=float, default=0.2, help="share of the card's memory")
    ran.set_defaults(command=run)
    compared = commands.add_parser("compare")
    compared.add_argument("vllm", type=Path)
    compared.add_argument("ours", type=Path)
    compared.set_defaults(command=compare)
    for command in (prepared, ran, compared):
        command.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    found = args.command(args)
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """Prompts as our engine encodes them, by the file that they come from."""
    from drafttrain.prompts import read_lines

    from specbatch.config_load import load_config
    from specbatch.engine.resolve import resolve
    from specbatch.pipeline.rows import Job
    from specbatch.pipeline.tokenizer import TextProcessor
    from specbatch.types import EngineLimits, SamplingParams

    plan = resolve(load_config(None, [f"model.target={args.model}", "speculation.method=none"]))
    texts = TextProcessor(plan.tokenizer, plan.config.data)
    config = plan.target.config
    limits = EngineLimits(config.max_position_embeddings, config.vocab_size)
    rows = []
    for row in read_lines(args.rows):
        ids = texts.encode(Job("messages", row["messages"], SamplingParams(), False), limits)
        rows.append({"id": row["id"], "file": row["metadata"]["file"], "prompt": ids})
    return {"rows": rows, "stop": list(config.eos_token_ids)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """vLLM's tokens and its own counters, file by file."""
    import vllm
    from vllm import LLM, SamplingParams

    given = json.loads(args.ids.read_text(encoding="utf-8"))
    speculative = {}
    if args.head:
        speculation = {"method": "eagle3", "model": args.head, "num_speculative_tokens": args.num_steps}
        speculative = {"speculative_config": speculation}
    llm = LLM(
        model=args.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=args.max_batch_size,
        gpu_memory_utilization=args.memory,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **speculative,
    )
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, stop_token_ids=given["stop"], detokenize=False)
    by_file: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in given["rows"]:
        by_file[row["file"]].append(row)
    files, tokens = {}, {}
    for name, rows in by_file.items():
        before, began = _counters(llm), time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": r["prompt"]} for r in rows], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        drafts, accepted = (b - a for a, b in zip(before, _counters(llm), strict=True))
        for row, output in zip(rows, outputs, strict=True):
            tokens[row["id"]] = list(output.outputs[0].token_ids)
        files[name] = {
            "rows": len(rows),
            "rounds": drafts,
            "acceptance_length": round(1 + accepted / drafts, 4) if drafts else None,
            "seconds": round(seconds, 2),
        }
        print(name, files[name], flush=True)
    return {"vllm": vllm.__version__, "num_steps": args.num_steps, "files": files, "tokens": tokens}


def _counters(llm: Any) -> tuple[int, int]:
    """Drafts (rounds of a row) and accepted draft tokens so far."""
    values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return tuple(int(values.get(f"vllm:spec_decode_num_{what}", 0)) for what in ("drafts", "accepted_tokens"))


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """By file: acceptance lengths, texts that are equal, margins where the others part."""
    from specbatch.pipeline.totals import RowTotals

    theirs = json.loads(args.vllm.read_text(encoding="utf-8"))
    totals: dict[str, RowTotals] = defaultdict(RowTotals)
    equal: dict[str, int] = defaultdict(int)
    margins: dict[str, list[float]] = defaultdict(list)
    with args.ours.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            name = row["metadata"]["file"]
            totals[name].add(row)
            mine, other = [t["token_id"] for t in row["logprobs"]], theirs["tokens"][row["id"]]
            parted = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
            if parted is None and len(mine) == len(other):
                equal[name] += 1
            elif parted is not None:
                first, second = (t["logprob"] for t in row["logprobs"][parted]["top"][:2])
                margins[name].append(first - second)
    report: dict[str, Any] = {"vllm": theirs["vllm"], "num_steps": theirs["num_steps"], "files": {}}
    for name, total in totals.items():
        ours, figures = total.committed / max(total.rounds, 1), theirs["files"][name]
        vllm_length = figures["acceptance_length"]
        report["files"][name] = {
            "rows": total.ok,
            "acceptance_length": round(ours, 4),
            "acceptance_length_vllm": vllm_length,
            "difference": round(ours / vllm_length - 1, 4) if vllm_length else None,
            "texts_equal": equal[name],
            "margins_nats": {
                "median": round(statistics.median(margins[name]), 4),
                "largest": round(max(margins[name]), 4),
            }
            if margins[name]
            else None,
        }
        print(name, report["files"][name])
    return report


if __name__ == "__main__":
    main()
