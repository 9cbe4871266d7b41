"""Times whole files of rows whose texts repeat themselves or each other, with several draft methods.

    python scripts/bench/bench_drafts.py --batch 512 --time-limit 140 -o files.json                   # a GPU
    python scripts/bench/bench_drafts.py --files long --batch 512,2048 --methods suffix,ngram -o long.json
    python scripts/bench/bench_drafts.py --target wide/target --head wide/head --batch 64 --files extract,gsm8k:512
    python scripts/bench/bench_drafts.py --batch 4 --share 0.005 --max-tokens 16 --methods none,suffix    # a CPU

Files, of the built-in data and Python's standard library:

- `gsm8k`: 256 questions, 8 sampled completions of each (temperature 0.7).
- `extract`: 2,000 messages, whose fields are to be written as JSON.
- `edits`: 600 functions, each with one edit: the answer repeats most of the prompt.
- `twice`: 1,000 questions, greedy. They run twice in one engine, and the second time counts. `suffix` has the first
  texts in its corpus then, as it has with `speculation.corpus`.
- `long`: texts of about 900 tokens to rewrite in up to 1,024 tokens, greedy, in a context of 2,048. There are as many
  rows as run at once, and at least 1,024.

`--files gsm8k:512` has another number of requests, for models whose rounds take long. `--target` and `--head` are the
model and its EAGLE-3 head; `widen.py` writes larger ones with the texts of the built-in model.

A cell is one method and one number of rows at once (`--batch`); it has an engine of its own, which runs all files. Each
file begins with a few other rows, which do not count. One JSON line for each file: seconds, output tokens, tokens a
second, acceptance length, rounds, the share of the time in which the host only `waited` for the device, graphs that
were captured late, and drafts by source. `ratio` is the speed against the best method before it. No file begins after
`--time-limit`.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import gzip
import heapq
import inspect
import json
import random
import shlex
import statistics
import string
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from specbatch import LLM
from specbatch.results.stats import commit, device_name, versions
from specbatch.strict.yaml import load_yaml

DATA = Path(__file__).parents[2] / "specbatch" / "evals" / "data"
METHODS: dict[str, dict[str, Any]] = {
    "none": {"speculation.method": "none"},
    "ngram": {"speculation.method": "ngram"},
    "budget": {"speculation.method": "ngram", "speculation.verify_budget": "auto"},
    "head": {"speculation.method": "eagle3", "speculation.draft": "builtin:smollm2-135m-instruct-eagle3"},
    "block": {"speculation.method": "block", "speculation.draft": "builtin:smollm2-135m-instruct-block"},
    "suffix": {"speculation.method": "suffix"},
    "hybrid": {"speculation.method": "hybrid"},
    "suffix-whole": {"speculation.method": "suffix", "speculation.verify_budget": "none"},
    "hybrid-whole": {"speculation.method": "hybrid", "speculation.verify_budget": "none"},
}
_NAMES = [
    "Ada",
    "Bob",
    "Cem",
    "Dora",
    "Emil",
    "Fay",
    "Gus",
    "Hana",
    "Ivo",
    "Jun",
    "Kai",
    "Lea",
    "Mia",
    "Noa",
    "Oda",
    "Pia",
]
_SURNAMES = ["Smith", "Jones", "Miller", "Garcia", "Novak", "Rossi", "Tanaka", "Weber", "Olsen", "Costa"]
_PRODUCTS = ["laptop stand", "coffee machine", "desk lamp", "water bottle", "phone case", "garden hose", "office chair"]
_PROBLEMS = ["arrived broken", "does not turn on", "is the wrong colour", "never arrived", "is missing a part"]
_CITIES = ["Berlin", "Lisbon", "Osaka", "Denver", "Oslo", "Milan"]
_EDITS = ["Rename the first parameter to `first_arg`.", "Add a comment to each line.", "Remove the docstring."]


def questions(name: str) -> list[dict[str, str]]:
    with gzip.open(DATA / f"gsm8k_{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def asked(text: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **options}


def gsm8k_rows(count: int) -> list[dict[str, Any]]:
    """Make rows with 8 completions each."""
    options = {"n": 8, "temperature": 0.7, "seed": 1}
    return [asked(f"{x['question']}\nThink step by step.", **options) for x in questions("test")[: max(1, count // 8)]]


def twice_rows(count: int) -> list[dict[str, Any]]:
    return [asked(f"{x['question']}\nThink step by step.") for x in questions("test")[300 : 300 + count]]


def extract_rows(count: int) -> list[dict[str, Any]]:
    rng = random.Random(0)

    def example() -> tuple[str, str]:
        name, surname = rng.choice(_NAMES), rng.choice(_SURNAMES)
        product, problem, city = rng.choice(_PRODUCTS), rng.choice(_PROBLEMS), rng.choice(_CITIES)
        number = rng.randrange(10000, 99999)
        text = f"Hello, my name is {name} {surname} from {city}. The {product} of order {number} {problem}. Help me."
        fields: dict[str, Any] = {"customer_name": f"{name} {surname}", "customer_city": city, "product": product}
        fields |= {"order_number": number, "problem": problem, "category": "complaint", "requires_follow_up": True}
        return text, json.dumps(fields)

    head = "Extract the fields as JSON.\n\n"
    head += "".join(f"Message: {text}\nJSON: {fields}\n\n" for text, fields in (example() for _ in range(2)))
    return [{"prompt": f"{head}Message: {example()[0]}\nJSON:", "stop": ["\n"]} for _ in range(count)]


def functions() -> Iterator[str]:
    """Yield the sources of short functions of the standard library."""
    modules = (argparse, copy, fnmatch, gzip, heapq, inspect, json, random, shlex, statistics, string, textwrap)
    for module in modules:
        for owner in (module, *(item for item in vars(module).values() if inspect.isclass(item))):
            for item in vars(owner).values():
                if inspect.isfunction(item) and item.__module__ == module.__name__:
                    source = textwrap.dedent(inspect.getsource(item))
                    if 200 <= len(source) <= 1500:
                        yield source


def edit_rows(count: int) -> list[dict[str, Any]]:
    texts = [
        f"{edit} Answer with the whole changed function in a code block.\n```python\n{source}```"
        for source in dict.fromkeys(functions())
        for edit in _EDITS
    ]
    return [asked(text) for text in (texts * (1 + count // len(texts)))[:count]]


def long_rows(count: int) -> list[dict[str, Any]]:
    known = [f"{x['question']}\n{x['answer'].split('####')[0]}" for x in questions("train")]
    rng = random.Random(0)
    return [
        asked("Rewrite this text as a tutorial for students:\n\n" + "\n\n".join(rng.sample(known, 4)), max_tokens=1024)
        for _ in range(count)
    ]


FILES: dict[str, tuple[int, Callable[[int], list[dict[str, Any]]]]] = {
    "extract": (2000, extract_rows),
    "edits": (600, edit_rows),
    "gsm8k": (2048, gsm8k_rows),
    "twice": (1000, twice_rows),
    "long": (0, long_rows),  # as many as run at once
}


def sizes_of(text: str) -> dict[str, int]:
    """Read names of files, with the number of requests; 0: the file's own number."""
    return {name: int(count or 0) for name, _, count in (part.partition(":") for part in text.split(","))}


class Cells:
    """The cells that were measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._began = args, time.perf_counter()
        self._best: dict[tuple[str, int], float] = {}  # the best speed so far
        self.report: dict[str, Any] = {
            "command": ["python", *sys.argv],
            "commit": commit(),
            "versions": versions(),
            "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
            "cells": [],
        }

    @property
    def is_over(self) -> bool:
        return time.perf_counter() - self._began > self._args.time_limit

    def run(self, method: str, batch: int) -> None:
        """Start an engine and run the files."""
        args = self._args
        options = {"engine.max_batch_size": batch, "sampling.max_tokens": args.max_tokens}
        options |= {"model.generation_config": "none", "model.max_model_len": 2048, **METHODS[method]}
        if args.head is not None and method in ("head", "hybrid", "hybrid-whole"):
            options["speculation.draft"] = args.head
        options |= {name: load_yaml(value) for name, _, value in (item.partition("=") for item in args.set)}
        began = time.perf_counter()
        with LLM(args.target, **options) as llm:
            ready = time.perf_counter() - began
            self.report["cells"].append({"method": method, "batch": batch, "ready_s": round(ready, 1)})
            self.report["cells"][-1]["notes"] = llm.notes
            print(json.dumps(self.report["cells"][-1]), flush=True)
            for name, given in args.files.items():
                if self.is_over:
                    print(f"{method}, {batch} rows at once, {name}: the time is over", flush=True)
                    return
                size, make = FILES[name]
                count = max(1, round((given or size or max(batch, 1024)) * args.share))
                more = make(count + max(8, count // 50))
                rows, first = more[: len(make(count))], more[len(make(count)) :]
                if args.ignore_eos:
                    rows, first = ([{**row, "ignore_eos": True} for row in part] for part in (rows, first))
                self._pass(llm, first)
                if name == "twice":
                    self._pass(llm, rows)
                self._keep(name, batch, {"method": method, **self._pass(llm, rows)})

    def _pass(self, llm: LLM, rows: list[dict[str, Any]]) -> dict[str, Any]:
        before, began = copy.deepcopy(llm.stats), time.perf_counter()
        lines = [json.loads(line) for line in llm.stream_lines(rows)]
        seconds, now = time.perf_counter() - began, llm.stats
        failed = [line["error"] for line in lines if line.get("error")]
        assert not failed, failed[0]
        tokens = now.generated_tokens - before.generated_tokens
        row_rounds = now.speculation.rounds - before.speculation.rounds
        committed = now.speculation.committed - before.speculation.committed
        sources = copy.deepcopy(now.draft_sources)
        sources.add(before.draft_sources, times=-1)
        rounds = now.rounds - before.rounds
        return {
            "rows": len(rows),
            "seconds": round(seconds, 3),
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds, 1),
            "acceptance_length": round(committed / row_rounds, 3) if row_rounds else None,
            "rounds": rounds,
            "mean_batch": round(row_rounds / rounds, 1) if rounds else None,
            "drafts_a_round": round((now.speculation.drafted - before.speculation.drafted) / max(1, row_rounds), 2),
            "waited": round((now.device_wait_seconds - before.device_wait_seconds) / seconds, 3),
            "prefill_seconds": round(now.prefill_seconds - before.prefill_seconds, 2),
            "late_graphs": now.late_graphs - before.late_graphs,
            "late_graph_seconds": round(now.late_graph_seconds - before.late_graph_seconds, 2),
            "preemptions": now.preemptions - before.preemptions,
            "drafts_by_source": sources.tokens,
        }

    def _keep(self, name: str, batch: int, cell: dict[str, Any]) -> None:
        speed, best = cell["tokens_per_second"], self._best.get((name, batch))
        cell = {"file": name, "batch": batch, **cell, "ratio": round(speed / best, 3) if best else None}
        self._best[name, batch] = max(speed, best or 0.0)
        self.report["cells"].append(cell)
        print(json.dumps(cell), flush=True)
        if self._args.output is not None:
            self._args.output.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin:smollm2-135m-instruct")
    parser.add_argument("--head", metavar="PATH", help="the target's EAGLE-3 head, if it is not the built-in model")
    parser.add_argument("--files", type=sizes_of, default=",".join([*FILES][:-1]), metavar="NAME[:REQUESTS],...")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=["none", "ngram", "head", "suffix"])
    parser.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], default=[256])
    parser.add_argument("--max-tokens", type=int, default=256, help="of all files but `long`, whose rows have 1,024")
    parser.add_argument("--share", type=float, default=1.0, help="share of the rows of each file")
    parser.add_argument("--ignore-eos", action="store_true", help="rows end at their number of tokens only")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json")
    args = parser.parse_args()
    for unknown in {*args.files} - {*FILES} | {*args.methods} - {*METHODS}:
        parser.error(f"{unknown} is no file ({', '.join(FILES)}) and no method ({', '.join(METHODS)})")
    cells = Cells(args)
    for batch in args.batch:
        for method in args.methods:
            if not cells.is_over:
                cells.run(method, batch)


if __name__ == "__main__":
    main()
