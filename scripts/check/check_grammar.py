"""A check of structured output: 20 JSON Schemas with every draft method, validated, and compared with plain decoding.

    python scripts/check/check_grammar.py -o grammar.json                                                # a CPU
    python scripts/check/check_grammar.py --rows 25 --max-batch-size 64 --max-tokens 512 --repeats 2 -o grammar.json
    python scripts/check/check_grammar.py --target random:qwen2.5-1.5b --draft random:eagle3-32k \\
        --rows 7 --max-batch-size 64 --max-tokens 256 --repeats 2 --time-limit 100                       # a GPU

Each schema of `json_schemas.jsonl` gets `--rows` rows, greedy and sampled. Every text that ends is parsed and validated
by the `jsonschema` package. Greedy texts must be those of plain decoding; sampled ones too with ngram and trees. On a
GPU in bfloat16 some texts can differ, because rounding depends on the batch: there the number is a figure to look at,
and with `--set engine.deterministic=true` it must be 0. Without `none` among the methods nothing is compared (`null`).
The same prompts run without schemas, each with as many tokens as it had with its schema: `share_of_free` compares the
speeds, and both have an acceptance length. The first of `--repeats` compiles and captures; the last one counts. Texts
of random weights end because the schemas bound them: strings have a maxLength, arrays a maxItems. `--generated N` adds
N schemas of `check_walks.py`, with a row for each; those that llguidance cannot compile are counted as `refused`.

One JSON line for each method and temperature, also where it fails. No method begins after `--time-limit`.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import datetime
from datetime import time as time_of_day
from pathlib import Path
from typing import Any

import jsonschema
import torch
from check_walks import generated_object

from specbatch import LLM
from specbatch.results.stats import commit, device_name, versions
from specbatch.strict.yaml import load_yaml

BUILT_IN = "builtin:smollm2-135m-instruct"
SCHEMAS = Path(__file__).with_name("json_schemas.jsonl")
GENERATED = "generated-"
# FormatChecker() is not used: it has the formats of all drafts, and draft 3 has no time zones. Without more packages,
# jsonschema does not check times and names of hosts.
FORMATS = copy.deepcopy(jsonschema.Draft202012Validator.FORMAT_CHECKER)
NAME = re.compile(r"(?:[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?\.?)+")
for _format, _reads in (
    ("date-time", lambda text: "T" in text and bool(datetime.fromisoformat(text))),
    ("time", lambda text: time_of_day.fromisoformat(text) is not None),
    ("hostname", lambda text: NAME.fullmatch(text) is not None),
):
    FORMATS.checks(_format, ValueError)(lambda value, reads=_reads: not isinstance(value, str) or reads(value))


def methods(draft: str | None) -> dict[str, dict[str, Any]]:
    """Return the options of each draft method by name. The others are compared with the first."""
    found: dict[str, dict[str, Any]] = {"none": {"method": "none"}, "ngram": {"method": "ngram"}}
    if draft is not None:
        head = {"method": "eagle3", "draft": draft, "num_steps": 3}
        found["chain"] = head | {"topk": 1}
        found["tree"] = head | {"topk": 4, "num_draft_tokens": 8}
    return found


def make_rows(count: int, max_tokens: int, temperature: float, num_generated: int = 0) -> list[dict[str, Any]]:
    """Make `count` rows for each schema, and one for each of `num_generated` schemas."""
    rows, rng = [], random.Random(1)
    entries = [json.loads(line) | {"rows": count} for line in SCHEMAS.read_text(encoding="utf-8").splitlines()]
    for number in range(num_generated):
        schema = generated_object(rng, 2)
        entries.append({"name": f"{GENERATED}{number}", "prompt": "Write something.", "schema": schema, "rows": 1})
    for entry in entries:
        form = {"name": entry["name"], "schema": entry["schema"]}
        for number in range(entry["rows"]):
            text = f"{entry['prompt']} Answer in JSON.{f' This is answer {number + 1}.' if number else ''}"
            row = {
                "id": f"{entry['name']} {number}",
                "messages": [{"role": "user", "content": text}],
                "max_tokens": max_tokens,
                "temperature": temperature,
                "response_format": {"type": "json_schema", "json_schema": form},
            }
            rows.append(row)
    return rows


def without_schemas(rows: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same rows without schemas. Their answers get the lengths that they had with schemas."""
    lengths = [result["usage"]["completion_tokens"] if "usage" in result else 1 for result in results]
    return [
        {name: value for name, value in row.items() if name != "response_format"}
        | {"max_tokens": max(length, 1), "ignore_eos": True}
        for row, length in zip(rows, lengths, strict=True)
    ]


def problems_of(results: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[str]:
    """List the texts that ended and do not match their schema, and the rows that failed."""
    found = []
    for result, row in zip(results, rows, strict=True):
        if is_refused(result, row):
            continue
        if result["finish_reason"] == "error":
            found.append(f"{row['id']}: {result['error']['message']}")
        elif result["finish_reason"] == "stop":
            # Python does not read the class of letters that some generated schemas have.
            text = json.dumps(row["response_format"]["json_schema"]["schema"]).replace(r"\\p{L}", r"[^\\W\\d_]")
            schema = json.loads(text)
            try:
                jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(result["text"]))
            except (ValueError, jsonschema.ValidationError) as exc:
                found.append(f"{row['id']}: {result['text'][:200]}: {str(exc).splitlines()[0]}")
    return found


def is_refused(result: dict[str, Any], row: dict[str, Any]) -> bool:
    """Return whether llguidance cannot compile the generated schema of this row."""
    is_error = result["finish_reason"] == "error" and result["error"]["type"] == "invalid_value"
    return is_error and str(row["id"]).startswith(GENERATED)


def run(llm: LLM, rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    before, began = copy.deepcopy(llm.stats), time.perf_counter()
    results: list[dict[str, Any]] = [*llm.generate(rows)]
    seconds, after = time.perf_counter() - began, llm.stats
    old, new = before.grammar, after.grammar
    rounds = after.speculation.rounds - before.speculation.rounds
    committed = after.speculation.committed - before.speculation.committed
    tokens = after.generated_tokens - before.generated_tokens
    masks = new.masks - old.masks
    host = sum(getattr(new, name) - getattr(old, name) for name in ("mask_seconds", "check_seconds", "tree_seconds"))
    return results, {
        "rows": len(rows),
        "ended": sum(result["finish_reason"] == "stop" for result in results),
        "tokens": tokens,
        "acceptance_length": round(committed / max(rounds, 1), 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "engine_rounds": after.rounds - before.rounds,
        "ms_per_round": round(
            1e3 * (after.decode_seconds - before.decode_seconds) / max(after.rounds - before.rounds, 1), 3
        ),
        "late_graphs": after.late_graphs - before.late_graphs,
        "late_graph_seconds": round(after.late_graph_seconds - before.late_graph_seconds, 2),
        "requests": dict(new.requests - old.requests),
        "drafted": after.speculation.drafted - before.speculation.drafted,
        "forced_nodes": new.forced - old.forced,
        "forbidden_drafts": new.forbidden - old.forbidden,
        "refused_choices": new.refused - old.refused,
        "masks": masks,
        "masks_per_token": round(masks / max(tokens, 1), 3),
        "us_per_token": round(1e6 * host / max(tokens, 1), 1),
        "advance_share_of_time": round((new.advance_seconds - old.advance_seconds) / seconds, 4),
        "tree_share_of_time": round((new.tree_seconds - old.tree_seconds) / seconds, 4),
        "check_share_of_time": round((new.check_seconds - old.check_seconds) / seconds, 4),
        "mask_share_of_time": round((new.mask_seconds - old.mask_seconds) / seconds, 4),
    }


class Check:
    """The check of one target. `expected`: the texts of plain decoding, by temperature."""

    def __init__(self, args: argparse.Namespace, *, exact: bool) -> None:
        """`exact`: texts must not depend on the batch."""
        self.args, self.exact = args, exact
        self.expected: dict[float, list[str]] = {}
        self.failed = False

    def method(self, name: str, llm: LLM, temperature: float) -> dict[str, Any]:
        args = self.args
        rows = make_rows(args.rows, args.max_tokens, temperature, args.generated)
        for _ in range(args.repeats):
            results, found = run(llm, rows)
        texts = [result.get("text", "") for result in results]
        if name == "none":
            self.expected[temperature] = texts
        expected = self.expected.get(temperature)
        differ = None
        if expected is not None and (temperature == 0 or name != "chain"):
            differ = sum(one != other for one, other in zip(texts, expected, strict=True))
        found["texts_that_differ_from_plain"] = differ
        found["refused"] = sum(map(is_refused, results, rows))
        found["problems"] = problems_of(results, rows)
        self.failed |= bool(found["problems"]) or (self.exact and bool(differ))
        if temperature == 0 and not args.no_free:
            for _ in range(args.repeats):
                _, free = run(llm, without_schemas(rows, results))
            names = ("tokens", "acceptance_length", "tokens_per_second", "engine_rounds", "ms_per_round")
            found["without_schema"] = {key: free[key] for key in names}
            found["share_of_free"] = round(found["tokens_per_second"] / free["tokens_per_second"], 4)
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=BUILT_IN)
    parser.add_argument("--draft", help="an EAGLE-3 head; default: the built-in one, for the built-in model")
    parser.add_argument("--rows", type=int, default=2, help="of each schema")
    parser.add_argument("--generated", type=int, default=0, help="number of generated schemas")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--no-free", action="store_true", help="no rows without a schema")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--max-batch-size", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.7, help="of sampled rows")
    parser.add_argument("--only", nargs="*", help="names of methods: none ngram chain tree")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds")
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
    given = {name: load_yaml(value) for name, _, value in (item.partition("=") for item in args.set)}
    exact = not torch.cuda.is_available() or bool(given.get("engine.deterministic"))
    check, began = Check(args, exact=exact), time.perf_counter()

    def add(name: str, found: dict[str, Any]) -> None:
        report[name] = found
        print(json.dumps({"check": "grammar", "case": name, **found}), flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    for name, method in chosen.items():
        if time.perf_counter() - began > args.time_limit:
            add(name, {"left_out": f"after {args.time_limit:g} s"})
            continue
        try:
            loading = time.perf_counter()
            with LLM(
                args.target, max_batch_size=args.max_batch_size, generation_config="none", **method, **given
            ) as llm:
                seconds = round(time.perf_counter() - loading, 1)
                for temperature in (0.0, args.temperature):
                    if time.perf_counter() - began <= args.time_limit:
                        found = check.method(name, llm, temperature)
                        add(f"{name}, temperature {temperature:g}", {"load_seconds": seconds, **found})
        except Exception as error:  # the other methods are checked all the same
            check.failed = True
            add(name, {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-2000:]})
    print("grammar: FAILED" if check.failed else "grammar: ok")
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
