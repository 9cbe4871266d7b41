"""The shared parts of bench_logprobs.py and bench_rules.py, which run rows of several kinds in turn over the whole
pipeline."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from specbatch import LLM
from specbatch.options.strict_yaml import load_yaml
from specbatch.results.stats import commit, device_name, versions


def parser_of(description: str | None, kinds: Iterable[str], batch: int) -> argparse.ArgumentParser:
    """Make the parser of options. `batch`: the default number of requests at the same time."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="builtin:smollm2-135m-instruct")
    parser.add_argument("--rows", type=int, help="default: four batches")
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(kinds), default=list(kinds))
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json")
    return parser


def open_llm(args: argparse.Namespace) -> LLM:
    options: dict[str, Any] = {"engine.max_batch_size": args.batch, "sampling.max_tokens": args.max_tokens}
    options |= {name: load_yaml(value) for name, _, value in (item.partition("=") for item in args.set)}
    return LLM(args.target, **{"model.generation_config": "none", "sampling.ignore_eos": True, **options})


def num_rows(args: argparse.Namespace) -> int:
    return int(args.rows or 4 * args.batch)


def report_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the part of the report that says which command ran, and on which device."""
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "command": sys.argv[1:], "commit": commit(), "versions": versions(), "device": device, "rows": num_rows(args)
    }  # fmt: skip


def write(report: dict[str, Any], args: argparse.Namespace) -> None:
    text = json.dumps(report, indent=1)
    print(text)
    if args.output is not None:
        args.output.write_text(text + "\n")
