"""The engine against the oracle of the tests, on a CPU in float32: tokens per second of both, with the same weights,
prompts and threads, in one process, by turns.

    OMP_NUM_THREADS=1 python scripts/bench/bench_engines.py --methods none ngram -o part.json

The oracle was the engine for CPUs up to commit 0484224. Of each cell (method, greedy or sampled, batch size) the
median of --repeats runs is kept, and their ratio; texts of both must be the same.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # the oracle is one of the tests' parts

from specbatch.config import Config, EngineSection, ModelSection, SpeculationSection
from specbatch.engine.engine import Engine
from specbatch.setup.build import build
from specbatch.setup.resolve import resolve
from specbatch.types import Request, RngKey, SamplingParams
from tests.oracle.build import build_oracle
from tests.oracle.engine import OracleEngine

TARGET = "builtin:smollm2-135m-instruct"
METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram"},
    "draft_model": {"method": "draft_model", "draft": TARGET},
    "eagle3": {"method": "eagle3", "draft": "builtin:smollm2-135m-instruct-eagle3"},
}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--questions", type=Path, default=Path("examples/questions.jsonl"))
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    questions = [json.loads(line)["prompt"] for line in args.questions.read_text().splitlines()]
    report: dict[str, Any] = {"command": " ".join(sys.argv), "commit": commit(), **machine(), "cells": []}
    for method in args.methods:
        for batch in args.batches:
            run = resolve(config_for(METHODS[method], batch))
            engines: dict[str, Engine | OracleEngine] = {"oracle": build_oracle(run), "engine": build(run).engine}
            prompts: list[Any] = [
                run.tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
                )
                for question in questions[:batch]
            ]
            for sampling in ({}, SAMPLED):
                params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True, seed=1, **sampling)
                cell = {"method": method, "batch": batch, "sampled": bool(sampling)}
                report["cells"].append(cell | compare(engines, prompts, params, args.repeats))
                print(json.dumps(report["cells"][-1]), flush=True)
            del engines
            gc.collect()
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


def config_for(speculation: dict[str, Any], batch: int) -> Config:
    return Config(
        model=ModelSection(target=TARGET, dtype="float32"),
        speculation=SpeculationSection(**speculation),
        engine=EngineSection(device="cpu", max_batch_size=batch, kv_cache_tokens=8192, prefix_cache=False),
    )


def compare(
    engines: dict[str, Engine | OracleEngine], prompts: list[list[int]], params: SamplingParams, repeats: int
) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(repeats + 1):  # the first warms up
        for name, engine in engines.items():
            texts[name], speed = generate(engine, prompts, params)
            if turn:
                speeds[name].append(speed)
    assert texts["engine"] == texts["oracle"], "the texts differ"
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return {
        "oracle": round(medians["oracle"], 2),
        "engine": round(medians["engine"], 2),
        "ratio": round(medians["engine"] / medians["oracle"], 3),
        "runs": {name: [round(value, 2) for value in values] for name, values in speeds.items()},
    }


def generate(
    engine: Engine | OracleEngine, prompts: list[list[int]], params: SamplingParams
) -> tuple[list[list[int]], float]:
    """Texts, and output tokens per second of the decoding rounds and prompts together."""
    began, done = time.perf_counter(), dict[int, list[int]]()
    for i, prompt in enumerate(prompts):
        engine.submit(Request(i, prompt, params, RngKey(1, i, 0)))
    while len(done) < len(prompts):
        done |= {completion.request_id: completion.token_ids for completion in engine.step()}
    tokens = sum(map(len, done.values()))
    return [done[i] for i in range(len(prompts))], tokens / (time.perf_counter() - began)


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()


def machine() -> dict[str, Any]:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    return {
        "processor": model.split(":")[-1].strip() or platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
