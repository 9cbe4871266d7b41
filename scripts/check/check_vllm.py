"""A check of a trained EAGLE-3 head in vLLM and in ours, with the same file and prompts, greedy: acceptance, texts and
speed.

    python scripts/check/check_vllm.py prepare --model TARGET --rows eval.jsonl -o ids.json           # our environment
    python scripts/check/check_vllm.py run ids.json --model HF_DIRECTORY --head HEAD --num-steps 5 -o vllm.json # vLLM's
    specbatch generate eval.jsonl -o ours.jsonl --set sampling.logprobs=2 --set model.generation_config=none ...  # ours
    python scripts/check/check_vllm.py compare vllm.json ours.jsonl -o report.json
    python scripts/check/check_vllm.py speed ids.json --engine vllm --model HF_DIRECTORY --head HEAD -o speed-vllm.json
    python scripts/check/check_vllm.py speed ids.json --engine ours --model TARGET --head HEAD -o speed-ours.json

`eval.jsonl` are rows with `messages`, such as those that `specbatch train-draft` leaves in training/. `compare` says
how far the acceptance lengths are apart, how many texts are equal, and by how much our target preferred its token to
the second best where a text first differs: in bfloat16, two engines part at ties. `speed` runs GSM8K prompts, N at
once, prompts included, twice each: the better run counts, as what is compiled or loaded first is in the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
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
    ran.add_argument("--max-batch-size", type=int, default=64)
    ran.set_defaults(command=run)
    compared = commands.add_parser("compare")
    compared.add_argument("vllm", type=Path)
    compared.add_argument("ours", type=Path)
    compared.set_defaults(command=compare)
    timed = commands.add_parser("speed")
    timed.add_argument("ids", type=Path)
    timed.add_argument("--engine", choices=("ours", "vllm"), required=True)
    timed.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 128])
    timed.set_defaults(command=speed)
    for command in (ran, timed):
        command.add_argument("--model", required=True)
        command.add_argument("--head")
        command.add_argument("--num-steps", type=int, default=5)
        command.add_argument("--max-tokens", type=int, default=256)
        command.add_argument("--memory", type=float, default=0.2, help="vLLM's share of the card's memory")
    for command in (prepared, ran, compared, timed):
        command.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    if args.command is speed:
        args.max_batch_size = max(128, *args.batches)
    found = args.command(args)
    args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def prepare(args: argparse.Namespace) -> dict[str, Any]:
    """Return the prompts as our engine encodes them, by the file that they come from."""
    from specbatch.config_load import load_config
    from specbatch.rows.row import Row
    from specbatch.rows.tokenizer import TextProcessor
    from specbatch.setup.resolve import resolve
    from specbatch.train.prompts import read_lines
    from specbatch.types import EngineLimits

    plan = resolve(load_config(None, [f"model.target={args.model}", "speculation.method=none"]))
    texts = TextProcessor(plan.tokenizer, plan.config.data)
    config = plan.target.config
    limits = EngineLimits(config.max_position_embeddings, config.vocab_size)
    rows = []
    for row in read_lines(args.rows):
        ids = texts.encode(Row(0, kind="messages", content=row["messages"]), limits)
        rows.append({"id": row["id"], "file": row["metadata"]["file"], "prompt": ids})
    return {"rows": rows, "stop": list(config.eos_token_ids)}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return vLLM's tokens and counters for each file."""
    import vllm

    given = json.loads(args.ids.read_text(encoding="utf-8"))
    llm, sampling = _vllm(args, given["stop"])
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


def _vllm(args: argparse.Namespace, stop: list[int]) -> tuple[Any, Any]:
    """Return vLLM's engine and its options for greedy sampling."""
    from vllm import LLM, SamplingParams

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
    return llm, SamplingParams(temperature=0, max_tokens=args.max_tokens, stop_token_ids=stop, detokenize=False)


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Measure output tokens per second by the number of requests at once."""
    given = json.loads(args.ids.read_text(encoding="utf-8"))
    rows = [row["prompt"] for row in given["rows"] if "gsm8k" in row["file"]]
    if len(rows) < max(args.batches):
        raise SystemExit(f"{args.ids}: {len(rows)} GSM8K rows, too few for {max(args.batches)} at once")
    count_tokens = _runs_in_vllm(args, given["stop"]) if args.engine == "vllm" else _runs_in_ours(args)
    found: dict[str, Any] = {"engine": args.engine, "head": args.head, "tok_s": {}}
    found |= {"num_steps": args.num_steps} if args.head else {}
    for batch in args.batches:
        speeds = []
        for _ in range(2):
            began, tokens = time.perf_counter(), 0
            for first in range(0, min(max(batch, 16), len(rows)), batch):
                tokens += count_tokens(rows[first : first + batch])
            speeds.append(round(tokens / (time.perf_counter() - began), 1))
        found["tok_s"][batch] = speeds
        print(args.engine, args.head, batch, speeds, flush=True)
    return found


def _runs_in_vllm(args: argparse.Namespace, stop: list[int]) -> Callable[[list[list[int]]], int]:
    """Return a function that runs prompts all at once in vLLM, and returns the number of output tokens."""
    llm, sampling = _vllm(args, stop)

    def count_tokens(prompts: list[list[int]]) -> int:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return count_tokens


def _runs_in_ours(args: argparse.Namespace) -> Callable[[list[list[int]]], int]:
    """Return the same function for our engine, with the same limits."""
    from specbatch.config_load import load_config
    from specbatch.setup.build import build
    from specbatch.setup.resolve import resolve
    from specbatch.types import Request, RngKey, SamplingParams

    drafts = ["method=none"]
    if args.head:
        drafts = ["method=eagle3", f"draft={args.head}", f"num_steps={args.num_steps}"]
    settings = [f"model.target={args.model}", *(f"speculation.{text}" for text in drafts)]
    settings += [f"engine.max_batch_size={args.max_batch_size}", "engine.prefix_cache=false"]
    engine = build(resolve(load_config(None, settings)), lambda doing: None).engine
    params = SamplingParams(max_tokens=args.max_tokens)

    def count_tokens(prompts: list[list[int]]) -> int:
        for i, ids in enumerate(prompts):
            engine.submit(Request(i, ids, params, RngKey(0, i, 0)))
        done, tokens = 0, 0
        while done < len(prompts):
            for completion in engine.step():
                done, tokens = done + 1, tokens + len(completion.token_ids)
        return tokens

    return count_tokens


def _counters(llm: Any) -> tuple[int, int]:
    """Return the number of drafts (rounds of a row) and of accepted draft tokens so far."""
    values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafts, accepted = (values.get(f"vllm:spec_decode_num_{what}", 0) for what in ("drafts", "accepted_tokens"))
    return int(drafts), int(accepted)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Compare for each file the acceptance lengths, the number of equal texts, and the margins where the others first
    differ."""
    from specbatch.results.stats import RowTotals

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
        ours, figures = total.speculation.acceptance_length or 0.0, theirs["files"][name]
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
