"""Files whose prompts begin alike: without sharing, with the prefix cache alone, with the plan of the file, and with
rounds that read what requests share once.

    python scripts/bench/bench_prefix.py FOLDER [--target random:llama-3-8b] [--files gsm8k shared samples]
        [--rows 64] [--set engine.max_batch_size=512 ...] [-o FILE]

FOLDER has gsm8k_train.jsonl and gsm8k_test.jsonl (openai/grade-school-math). Text is tokenized by SmolLM2's tokenizer,
whose ids fit other models; rows write all of their `max_tokens`.

- gsm8k: the test questions, each after the same eight solved ones; as many tokens as the solution has.
- shared: 512 rows with one of `--texts` texts of 1,000 tokens, drawn at random, and 100 to 300 tokens of their own;
  128 to 896 tokens out.
- samples: 128 prompts of 1,000 tokens, 8 completions each, 512 tokens out.

Prints a JSON line for each run: seconds of prefill and rounds, from the first row to the last, and prompt tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from specbatch.config_load import load_config
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.stats import commit
from specbatch.models.download import resolve_model
from specbatch.models.formats.tokenizer import load_tokenizer
from specbatch.startup import open_pool, prepare_libraries

MODES = {
    "no sharing": ["engine.prefix_cache=false", "data.plan_rows=0"],
    "prefix cache": ["engine.cascade_attention=off", "data.plan_rows=0"],
    "plan": ["engine.cascade_attention=off"],
    "cascade": ["engine.cascade_attention=on"],
}
Rows = list[dict[str, Any]]
Encode = Callable[[str], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="random:llama-3-8b")
    parser.add_argument("--files", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rows", type=int, help="the first rows only")
    parser.add_argument("--texts", type=int, default=1, help="of the file `shared`")
    parser.add_argument("--set", nargs="+", default=[], help="options of the configuration")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    prepare_libraries()
    tokenizer = load_tokenizer(resolve_model("builtin:smollm2-135m-instruct"))
    cells = []
    with tempfile.TemporaryDirectory() as name:
        for file in args.files:
            rows = FILES[file](args.folder, tokenizer.encode, args.texts)[: args.rows]
            path = Path(name, f"{file}.jsonl")
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            for mode in args.modes:
                sets = [f"model.target={args.target}", "speculation.method=none", *MODES[mode], *args.set]
                cells.append({"file": file, "mode": mode, **run(path, sets)})
                print(json.dumps(cells[-1]), flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps({"commit": commit(), "arguments": vars(args), "runs": cells}, default=str))


def run(path: Path, sets: list[str]) -> dict[str, Any]:
    config, console = load_config(None, sets), Console(quiet=True)
    options = GenerateOptions(str(path), path.with_suffix(".out"), overwrite=True)
    began = time.perf_counter()
    outcome = run_file_job(options, config, open_pool(config, console), console, began=began, summary=False)
    assert outcome.report is not None, outcome
    session = outcome.report["session"]
    seconds = session["seconds"]
    return {
        "wall_seconds": round(seconds["total"] - seconds["load"], 2),
        "prefill_seconds": seconds["prefill"],
        "round_seconds": seconds["decode"],
        **{name: session[name] for name in ("prompt_tokens", "prefill_tokens", "output_tokens", "preemptions")},
        "max_batch_size": outcome.report["config"]["engine"]["max_batch_size"],
        "failed": outcome.report["rows"]["failed"],
    }


def gsm8k(folder: Path, encode: Encode, texts: int) -> Rows:
    train, test = solved(folder, "gsm8k_train.jsonl"), solved(folder, "gsm8k_test.jsonl")
    shots = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in train[:8])
    return [
        row(encode(f"{shots}Question: {question}\nAnswer:"), max_tokens=len(encode(answer)))
        for question, answer in test
    ]


def shared(folder: Path, encode: Encode, texts: int) -> Rows:
    rng, tokens = random.Random("shared"), real_tokens(folder, encode)
    prefixes = [tokens[1000 * i : 1000 * (i + 1)] for i in range(texts)]
    rows = []
    for _ in range(512):
        start, count = rng.randrange(1000 * texts, len(tokens) - 300), rng.randint(100, 300)
        prompt = rng.choice(prefixes) + tokens[start : start + count]
        rows.append(row(prompt, max_tokens=rng.randint(128, 896)))
    return rows


def samples(folder: Path, encode: Encode, texts: int) -> Rows:
    tokens = real_tokens(folder, encode)
    return [row(tokens[1000 * i : 1000 * (i + 1)], max_tokens=512, n=8, temperature=1.0) for i in range(128)]


FILES = {"gsm8k": gsm8k, "shared": shared, "samples": samples}


def row(prompt: list[int], **fields: Any) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "ignore_eos": True, **fields}


def real_tokens(folder: Path, encode: Encode) -> list[int]:
    return encode(" ".join(f"{question} {answer}" for question, answer in solved(folder, "gsm8k_train.jsonl")))


def solved(folder: Path, name: str) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
    return [(row["question"], row["answer"]) for row in rows]


if __name__ == "__main__":
    main()
