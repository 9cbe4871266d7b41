"""Structured output: 20 JSON Schemas under every draft method, validated, and compared with plain decoding.

    python scripts/check/check_grammar.py -o grammar.json                                                # a CPU
    python scripts/check/check_grammar.py --rows 25 --max-batch-size 64 --max-tokens 512 -o grammar.json # a GPU

Each schema of `json_schemas.jsonl` gets `--rows` rows, greedy and sampled. Every text that ends is parsed and validated
by the `jsonschema` package. Greedy texts must be those of plain decoding; sampled ones too with ngram and trees. On a
GPU in bfloat16 some texts can differ, because rounding depends on the batch: there the number is a figure to look at.
The same prompts run without schemas, for the acceptance length.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import torch

from specbatch import LLM
from specbatch.job.stats import commit, device_name, versions

SCHEMAS = Path(__file__).with_name("json_schemas.jsonl")
BUILT_IN = "builtin:smollm2-135m-instruct"


def methods(draft: str | None) -> dict[str, dict[str, Any]]:
    """By name; the first is what the others are compared with."""
    found: dict[str, dict[str, Any]] = {"none": {"method": "none"}, "ngram": {"method": "ngram"}}
    if draft is not None:
        head = {"method": "eagle3", "draft": draft, "num_steps": 3}
        found["chain"] = head | {"topk": 1}
        found["tree"] = head | {"topk": 4, "num_draft_tokens": 8}
    return found


def read_schemas() -> list[dict[str, Any]]:
    return [json.loads(line) for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]


def make_rows(count: int, max_tokens: int, *, constrained: bool) -> list[dict[str, Any]]:
    """`count` rows of each schema."""
    rows = []
    for entry in read_schemas():
        for number in range(count):
            text = f"{entry['prompt']} Answer in JSON.{f' This is answer {number + 1}.' if number else ''}"
            row = {
                "id": f"{entry['name']} {number}",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": max_tokens,
            }
            if constrained:
                form = {"name": entry["name"], "schema": entry["schema"]}
                row["response_format"] = {"type": "json_schema", "json_schema": form}
            rows.append(row)
    return rows


def problems_of(results: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Texts that ended and are not what their schema wants, and rows that failed."""
    found = []
    for result, row in zip(results, rows, strict=True):
        if result["finish_reason"] == "error":
            found.append(f"{row['id']}: {result['error']['message']}")
        elif result["finish_reason"] == "stop":
            schema = row["response_format"]["json_schema"]["schema"]
            try:
                # Not FormatChecker(): that has the formats of all drafts, and draft 3 knows no time zones.
                validator = jsonschema.Draft202012Validator
                validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(result["text"]))
            except (ValueError, jsonschema.ValidationError) as exc:
                found.append(f"{row['id']}: {result['text'][:200]}: {str(exc).splitlines()[0]}")
    return found


def run(target: str, rows: Sequence[dict[str, Any]], options: dict[str, Any]) -> tuple[list[dict[str, Any]], dict]:
    began = time.perf_counter()
    with LLM(target, **options) as llm:
        loaded = time.perf_counter()
        results = list(llm.generate(rows))
        stats = llm.stats
    seconds = time.perf_counter() - loaded
    tokens = sum(result["usage"]["completion_tokens"] for result in results if result["finish_reason"] != "error")
    grammar = stats.grammar
    report = {
        "rows": len(rows),
        "ended": sum(result["finish_reason"] == "stop" for result in results),
        "tokens": tokens,
        "acceptance_length": round(stats.speculation.acceptance_length or 0, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "load_seconds": round(loaded - began, 1),
        "forced_nodes": grammar.forced,
        "forbidden_drafts": grammar.forbidden,
        "masks": grammar.masks,
        "us_per_mask": round(1e6 * grammar.mask_seconds / max(grammar.masks, 1), 1),
        "us_per_token": round(1e6 * (grammar.mask_seconds + grammar.tree_seconds) / max(tokens, 1), 1),
        "share_of_time": round((grammar.mask_seconds + grammar.tree_seconds) / seconds, 4),
    }
    return results, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=BUILT_IN)
    parser.add_argument("--draft", help="an EAGLE-3 head; default: the built-in one, for the built-in model")
    parser.add_argument("--rows", type=int, default=2, help="of each schema")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--free-tokens", type=int, default=100, help="max_tokens of rows without a schema; 0: none run")
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampled rows")
    parser.add_argument("--only", nargs="*", help="names of methods: none ngram chain tree")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    draft = args.draft or (f"{BUILT_IN}-eagle3" if args.target == BUILT_IN else None)
    chosen = {name: one for name, one in methods(draft).items() if not args.only or name in args.only}
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "commit": commit(),
        "versions": versions(),
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
    }
    failed = False
    for temperature in (0.0, args.temperature):
        expected: list[str] = []
        for name, method in chosen.items():
            options = {**method, "temperature": temperature, "max_batch_size": args.max_batch_size}
            rows = make_rows(args.rows, args.max_tokens, constrained=True)
            results, found = run(args.target, rows, options)
            texts = [result["text"] for result in results]
            expected = expected or texts
            is_exact = temperature == 0 or name != "chain"
            found["texts_that_differ_from_plain"] = (
                sum(one != other for one, other in zip(texts, expected, strict=True)) if is_exact else None
            )
            found["problems"] = problems_of(results, rows)
            failed |= bool(found["problems"]) or bool(found["texts_that_differ_from_plain"])
            if temperature == 0 and args.free_tokens:
                free = make_rows(args.rows, args.free_tokens, constrained=False)
                found["without_schema"] = {
                    key: value
                    for key, value in run(args.target, free, options)[1].items()
                    if key in ("tokens", "acceptance_length", "tokens_per_second")
                }
            report[f"{name}, temperature {temperature:g}"] = found
            print(json.dumps({f"{name}, {temperature:g}": found}), flush=True)
            if args.output is not None:
                args.output.write_text(json.dumps(report, indent=1) + "\n")
    print("grammar: FAILED" if failed else "grammar: ok")
    return failed


if __name__ == "__main__":
    sys.exit(main())
