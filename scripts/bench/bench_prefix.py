"""Files whose prompts begin alike: without sharing, with the prefix cache alone, with the plan of the file, and with
rounds that read what requests share once.

    python scripts/bench/bench_prefix.py [--target random:llama-3-8b] [--method none eagle3:3/1/4@2.5=random:eagle3-32k]
        [--files shared samples] [--modes "prefix cache" plan cascade] [--shorter 2] [--time-limit 150]
        [--set engine.max_batch_size=512 ...] [-o FILE]

Text is GSM8K's, tokenized by SmolLM2's tokenizer, whose ids fit other models; where that is not on the machine, words
are numbered. Each run has other token ids, so that no run finds what one before it has left in the cache. Rows write
all of their `max_tokens`.

- gsm8k: the test questions, each after the same eight solved ones; as many tokens as the solution has.
- shared: 512 rows with one of `--texts` texts of 1,000 tokens, drawn at random, and 100 to 300 tokens of their own;
  128 to 896 tokens out.
- samples: 128 prompts of 1,000 tokens, 8 completions each, 512 tokens out.

--shorter divides the tokens out. The files of a mode share an engine, and its start is in no figure but
`ready_seconds`. Prints a JSON line for each run: seconds of the run, of prefill and of rounds, and prompt tokens;
`late_graph_seconds` of `wall_seconds` are of graphs that were captured during the run. A run that fails is a line, too,
and so is one for which --time-limit leaves no time.

The smallest run that shows what cascade attention gains (140 s on an H200, as estimated) is without `plan` alone, which
changes nothing where all rows run at once:

    python scripts/bench/bench_prefix.py --method none eagle3:3/1/4@2.5=random:eagle3-32k --files shared samples
        --modes "prefix cache" cascade --shorter 4 --time-limit 130 --set engine.max_batch_size=512
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import random
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import specbatch
from specbatch.config import Config
from specbatch.config_load import config_to_dict, load_config
from specbatch.errors import SpecbatchError
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.pool import LocalPool
from specbatch.job.worker import Runtime, Worker
from specbatch.models.download import resolve_model
from specbatch.models.formats.tokenizer import load_tokenizer
from specbatch.results.stats import commit, device_name, versions
from specbatch.setup.build import build_engine
from specbatch.setup.resolve import resolve
from specbatch.startup import model_paths, prepare_libraries

MODES = {
    "no sharing": ["engine.prefix_cache=false", "data.plan_rows=0"],
    "prefix cache": ["engine.cascade_attention=off", "data.plan_rows=0"],
    "plan": ["engine.cascade_attention=off"],
    "cascade": ["engine.cascade_attention=on"],
    "auto": ["engine.cascade_attention=auto"],
}
# Of an engine since its start, as its seconds.
SUMS = ("prompt_tokens", "prefill_tokens", "output_tokens", "preemptions", "late_graphs", "late_graph_seconds")
PARTS = {"prefill": "prefill_seconds", "decode": "round_seconds"}
VOCABULARY = 49152
DATA = Path(specbatch.__file__).parent / "evals/data"
Rows = list[dict[str, Any]]
Encode = Callable[[str], list[int]]


class Engines:
    """Builds engines, and keeps the last one for jobs that want the same. Memory is measured when a run is resolved, so
    the last engine is gone before that."""

    def __init__(self) -> None:
        self._wanted: dict[str, Any] | None = None
        self._run: Any = None
        self._engine: Any = None
        self.ready_seconds = 0.0
        self.sums: dict[str, float] = {}  # statistics of the kept engine when the last job ended

    def runtime(self) -> Runtime:
        return Runtime(self._resolve, self._build, model_paths)

    def _resolve(self, config: Config) -> Any:
        wanted = config_to_dict(config)
        if config.engine.cascade_attention == "auto":  # which decides by this number
            wanted["shared_tokens"] = config.engine.shared_tokens
        if self._wanted != wanted:
            self.forget()
            self._run = resolve(config)
            self._wanted = wanted
        return self._run

    def _build(self, run: Any, on_progress: Callable[[str], None]) -> Any:
        if self._engine is None:
            began = time.perf_counter()
            self._engine = build_engine(run, on_progress)
            self.ready_seconds = time.perf_counter() - began
        return self._engine

    def forget(self) -> None:
        self._wanted = self._run = self._engine = None
        self.sums = {}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="random:llama-3-8b")
    parser.add_argument("--method", nargs="+", default=["none"], help="NAME[:STEPS/TOPK/TOKENS][@ACCEPTANCE][=DRAFT]")
    parser.add_argument("--files", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[mode for mode in MODES if mode != "auto"])
    parser.add_argument("--rows", type=int, help="the first rows only")
    parser.add_argument("--texts", type=int, default=1, help="of the file `shared`")
    parser.add_argument("--shorter", type=int, default=1)
    parser.add_argument("--time-limit", type=float, help="seconds, after which no run begins")
    parser.add_argument("--set", nargs="+", default=[], help="options of the configuration")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    prepare_libraries()
    began, lines = time.perf_counter(), []
    name, encode = tokenizer()
    head = {"commit": commit(), "versions": versions(), "arguments": vars(args), "tokens": name}
    engines = Engines()
    cells = [(method, mode, file) for method in args.method for mode in args.modes for file in args.files]
    for number, (method, mode, file) in enumerate(cells):
        line: dict[str, Any] = {"method": method, "mode": mode, "file": file}
        if args.time_limit is not None and time.perf_counter() - began > args.time_limit:
            line["error"] = "no time was left"
        else:
            rows = varied(rows_of(file, encode, args.texts)[: args.rows], number, args.shorter)
            sets = [f"model.target={args.target}", *method_sets(method), *MODES[mode], *args.set]
            try:
                line |= run(rows, load_config(None, sets), engines)
            except Exception as error:
                hint = f" ({error.hint})" if isinstance(error, SpecbatchError) else ""
                line["error"] = f"{type(error).__name__}: {str(error)[:300]}{hint}"
                engines.forget()
        line["at"] = round(time.perf_counter() - began, 1)
        lines.append(line)
        print(json.dumps(line), flush=True)
        if args.output is not None:  # as far as it got
            args.output.write_text(json.dumps(head | {"runs": lines}, default=str, indent=1) + "\n")


def run(rows: Rows, config: Config, engines: Engines) -> dict[str, Any]:
    console, ready = Console(quiet=True), engines.ready_seconds
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "rows.jsonl")
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = GenerateOptions(str(path), path.with_suffix(".out"), overwrite=True)
        began = time.perf_counter()
        pool = LocalPool(Worker(engines.runtime()))
        outcome = run_file_job(options, config, pool, console, began=began, summary=False)
    assert outcome.report is not None, outcome
    session, used = outcome.report["session"], outcome.report["config"]["engine"]
    seconds = session["seconds"]
    now = {PARTS[name]: seconds[name] for name in PARTS} | {name: session[name] for name in SUMS}
    since = {name: round(value - engines.sums.get(name, 0), 3) for name, value in now.items()}
    engines.sums = now
    return {
        "wall_seconds": round(seconds["total"] - seconds["load"], 2),
        **since,
        "input_wait_seconds": seconds["input_wait"],
        "io_seconds": seconds["io"],
        "joules": session["joules"],
        "failed": outcome.report["rows"]["failed"],
        "ready_seconds": round(engines.ready_seconds, 1) if engines.ready_seconds != ready else 0.0,
        **{name: used[name] for name in ("max_batch_size", "cascade_attention")},
        "device": device_name(used["device"]),
    }


def method_sets(method: str) -> list[str]:
    """Read a method as `bench.py` does."""
    method, _, draft = method.partition("=")
    method, _, acceptance = method.partition("@")
    name, _, shape = method.partition(":")
    sets = [f"speculation.method={name}"]
    if shape:
        options = ("num_steps", "topk", "num_draft_tokens")
        sets += [f"speculation.{option}={value}" for option, value in zip(options, shape.split("/"), strict=True)]
    if acceptance:
        sets.append(f"speculation.simulate_acceptance={acceptance}")
    return sets + ([f"speculation.draft={draft}"] if draft else [])


def tokenizer() -> tuple[str, Encode]:
    try:
        return "SmolLM2's", load_tokenizer(resolve_model("builtin:smollm2-135m-instruct", allow_download=False)).encode
    except SpecbatchError:
        return "numbered words", lambda text: [zlib.crc32(word.encode()) % VOCABULARY for word in text.split()]


@cache
def rows_of(file: str, encode: Encode, texts: int) -> Rows:
    return FILES[file](encode, texts)


def gsm8k(encode: Encode, texts: int) -> Rows:
    train, test = solved("gsm8k_train"), solved("gsm8k_test")
    shots = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in train[:8])
    return [
        row(encode(f"{shots}Question: {question}\nAnswer:"), max_tokens=len(encode(answer)))
        for question, answer in test
    ]


def shared(encode: Encode, texts: int) -> Rows:
    rng, tokens = random.Random("shared"), real_tokens(encode)
    prefixes = [tokens[1000 * i : 1000 * (i + 1)] for i in range(texts)]
    rows = []
    for _ in range(512):
        start, count = rng.randrange(1000 * texts, len(tokens) - 300), rng.randint(100, 300)
        prompt = rng.choice(prefixes) + tokens[start : start + count]
        rows.append(row(prompt, max_tokens=rng.randint(128, 896)))
    return rows


def samples(encode: Encode, texts: int) -> Rows:
    tokens = real_tokens(encode)
    return [row(tokens[1000 * i : 1000 * (i + 1)], max_tokens=512, n=8, temperature=1.0) for i in range(128)]


FILES = {"gsm8k": gsm8k, "shared": shared, "samples": samples}


def row(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "ignore_eos": True, **fields}


def varied(rows: Rows, number: int, shorter: int) -> Rows:
    """The same rows with other token ids, and fewer tokens out."""
    return [
        one
        | {
            "prompt_token_ids": [(token + 997 * number) % VOCABULARY for token in one["prompt_token_ids"]],
            "max_tokens": max(1, one["max_tokens"] // shorter),
        }
        for one in rows
    ]


def real_tokens(encode: Encode) -> list[int]:
    return encode(" ".join(f"{question} {answer}" for question, answer in solved("gsm8k_train")[:2000]))


def solved(name: str) -> list[tuple[str, str]]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [(row["question"], row["answer"]) for row in rows]


if __name__ == "__main__":
    main()
