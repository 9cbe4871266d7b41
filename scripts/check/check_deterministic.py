"""A check of engine.deterministic: the same rows with other batches, chunks, graphs and draft methods, compared bit for
bit.

    python scripts/check/check_deterministic.py --target random:qwen2.5-1.5b --draft random:eagle3-32k   # a GPU
    python scripts/check/check_deterministic.py --target random:tiny --rows 12 --repeats 3 --longest 60     # a CPU
    python scripts/check/check_deterministic.py --target random:qwen3-8b --rows 100 --repeats 300 --only first \
        --set tensor_parallel=4 --set kv_cache_tokens=200000                       # four GPUs, one way of running

Rows are token ids from a generator with a seed: greedy and sampled ones, short and long, some with a common beginning.
Texts, tokens, log-probabilities and usage must be equal; the field `speculation` is left out, for it says how the
tokens were drafted. One prompt is repeated among other rows, after beginnings of several lengths that it shares with
others: each gives one output. With random weights many logits are close, so that a wrong bit soon shows. A real model
gets questions of GSM8K with `--questions N`.

Last, a file job is killed and goes on at another batch size: its file must have the bytes of one that ran through.

`--fast` counts the rows that differ without the mode. Nothing begins after `--time-limit`.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specbatch import LLM
from specbatch.evals.data import DATA_FOLDER
from specbatch.results.stats import commit, versions

PREFIXES = (1, 511, 2048, 4097)
_IDS = 500  # token ids are below this number, so that each model has them
_RESUME = "resume at another batch size"


def variants(target: str, draft: str | None) -> dict[str, dict[str, Any]]:
    """Return the settings that must not change results, by name. The others are compared with the first."""
    same = {"method": "draft_model", "draft": target}  # drafts of the target are often right, so paths are long
    tree = {"num_steps": 4, "topk": 2, "num_draft_tokens": 15}
    found: dict[str, dict[str, Any]] = {
        "plain": {"method": "none", "max_batch_size": 64},
        "plain, 7 rows, chunks of 200": {"method": "none", "max_batch_size": 7, "prefill_chunk_tokens": 200},
        "ngram": {"method": "ngram", "max_batch_size": 33},
        "draft model, chain 4/1/5": same | {"num_steps": 4, "max_batch_size": 50},
        "draft model, tree 4/2/15": same | tree | {"max_batch_size": 64},
    }
    if draft is not None:
        head = {"method": "eagle3", "draft": draft}
        found["head, chain 3/1/4"] = head | {"num_steps": 3, "max_batch_size": 64}
        found["head, tree 5/4/16, 20 rows"] = head | {
            "num_steps": 5,
            "topk": 4,
            "num_draft_tokens": 16,
            "max_batch_size": 20,
        }
    preempted = {"method": "none", "kv_cache_tokens": 40_000, "page_size": 16, "max_batch_size": 200}
    found["plain, 200 rows, pages of 16, preempted"] = preempted
    found["plain, no prefix cache, no graphs"] = {"method": "none", "prefix_cache": False, "cuda_graphs": "none"}
    return found


def make_rows(count: int, repeats: int, longest: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    common = [rng.randrange(_IDS) for _ in range(longest)]
    rows: list[dict[str, Any]] = []
    for i in range(count):
        ids = common[: rng.choice((0, 16, 40))] + [rng.randrange(_IDS) for _ in range(rng.randint(1, 300))]
        row = {"id": f"row {i}", "prompt_token_ids": ids, "max_tokens": rng.randint(1, 120), "logprobs": i % 3}
        rows.append(row | ({"temperature": 0.9, "top_p": 0.95} if i % 2 else {}))
    for length in (n for n in PREFIXES if n <= longest):
        for greedy in (True, False):
            sampling = {} if greedy else {"temperature": 1.0, "seed": 7}
            one = {"id": f"prefix {length} {greedy}", "prompt_token_ids": common[:length], "max_tokens": 40} | sampling
            rows += [one] * repeats
    rng.shuffle(rows)
    return rows


def questions(count: int) -> list[dict[str, Any]]:
    """Return rows with the first questions of GSM8K's test set, for greedy answers."""
    with gzip.open(DATA_FOLDER / "gsm8k_test.jsonl.gz", "rt") as file:
        texts = [json.loads(line)["question"] for line in itertools.islice(file, count)]
    return [
        {"id": f"question {i}", "messages": [{"role": "user", "content": text}], "max_tokens": 256}
        for i, text in enumerate(texts)
    ]


def _content(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "speculation"}


def wait_for(file: Path) -> list[dict[str, Any]]:
    """Wait for the file that another process writes, and return its results."""
    while not file.exists():
        time.sleep(0.5)
    results: list[dict[str, Any]] = json.loads(file.read_text())
    return results


def outputs_of_repeats(results: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count the different outputs of each repeated row."""
    found: dict[str, set[str]] = {}
    for result in results:
        if str(result["id"]).startswith("prefix"):
            found.setdefault(result["id"], set()).add(json.dumps({**_content(result), "index": 0}))
    return {name: len(texts) for name, texts in sorted(found.items())}


def check_resume(target: str, draft: str | None, rows: Sequence[dict[str, Any]], mode: list[str]) -> dict[str, Any]:
    """Compare the bytes of a file job that runs through with those of one that is killed and goes on at another batch
    size."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "rows.jsonl")
        unique = [row | {"id": f"{i} {row['id']}"} for i, row in enumerate(rows)]
        source.write_text("".join(json.dumps(row) + "\n" for row in unique))
        method = (
            ["speculation.method=none"]
            if draft is None
            else ["speculation.method=eagle3", f"speculation.draft={draft}"]
        )
        options = [*mode, *method, f"model.target={target}", "model.generation_config=none"]

        def start(name: str, batch: int) -> subprocess.Popen[bytes]:
            command = [
                sys.executable,
                "-m",
                "specbatch",
                "generate",
                str(source),
                "-o",
                f"{folder}/{name}",
            ]
            for option in (*options, f"engine.max_batch_size={batch}"):
                command += ["--set", option]
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        codes = [start("whole.jsonl", 64).wait()]
        killed = start("killed.jsonl", 64)
        lines = 0
        while killed.poll() is None and lines < len(rows) // 3:
            time.sleep(0.05)
            lines = sum(file.read_bytes().count(b"\n") for file in Path(folder).glob("killed.jsonl.*"))
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        was_killed = not Path(folder, "killed.jsonl").exists()
        codes.append(start("killed.jsonl", 9).wait())
        results = [Path(folder, name) for name in ("whole.jsonl", "killed.jsonl")]
        texts = [file.read_bytes() if file.exists() else b"" for file in results]
        return {
            "killed_after_lines": lines if was_killed else "the job had ended",
            "exit_codes": codes,
            "equal": bool(texts[0]) and texts[0] == texts[1],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="random:qwen2.5-1.5b")
    parser.add_argument("--draft", help="an EAGLE-3 head")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--questions", type=int, default=0, help="in addition, of GSM8K")
    parser.add_argument("--repeats", type=int, default=125, help="of each of the 8 repeated rows")
    parser.add_argument("--longest", type=int, default=4097, help="tokens of the longest repeated row")
    parser.add_argument("--fast", action="store_true", help="without engine.deterministic: how many rows differ then")
    parser.add_argument(
        "--only", default="", help="variants whose names hold one of these (A;B), and the first in each case"
    )
    parser.add_argument("--keep", type=Path, help="a file for the results of the first variant")
    parser.add_argument("--expect", type=Path, help="such a file, waited for: the first variant is not run")
    parser.add_argument("--set", action="append", default=[], dest="options", help="NAME=JSON, of each variant")
    parser.add_argument("--time-limit", type=float, default=450.0, help="seconds")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    began, failed = time.perf_counter(), False
    rows = questions(args.questions) + make_rows(args.rows, args.repeats, args.longest)
    common = {name: json.loads(value) for name, value in (option.split("=", 1) for option in args.options)}
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "commit": os.environ.get("COMMIT") or commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": versions(),
        "rows": len(rows),
    }

    def add(name: str, found: dict[str, Any]) -> None:
        report[name] = found
        report["seconds"] = round(time.perf_counter() - began, 1)
        print(json.dumps({name: found}), flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    expected: list[dict[str, Any]] = []
    for number, (name, options) in enumerate(variants(args.target, args.draft).items()):
        is_first = number == 0 and args.expect is None
        if not is_first and (number == 0 or not any(part in name for part in args.only.split(";"))):
            continue
        if time.perf_counter() - began > args.time_limit:
            add(name, {"skipped": "no time is left"})
            continue
        start = time.perf_counter()
        try:
            with LLM(
                args.target,
                deterministic=not args.fast,
                certificate=True,
                **({"generation_config": "none"} | common | options),
            ) as llm:
                ready = time.perf_counter()
                results: list[dict[str, Any]] = [*llm.generate(rows)]
                length = llm.stats.speculation.acceptance_length
                notes = [note for note in llm.notes if "ready in" in note or "compiled" in note]
        except Exception as error:  # the other variants run all the same
            add(name, {"error": f"{type(error).__name__}: {error}"})
            failed = True
            if is_first:
                break
            continue
        if args.expect is not None and not expected:
            expected = wait_for(args.expect)
        first = expected or results
        if is_first and args.keep is not None:
            args.keep.with_suffix(".part").write_text(json.dumps(results))
            args.keep.with_suffix(".part").replace(args.keep)
        differ = [
            one for one, other in zip(results, first, strict=True) if "error" in one or _content(one) != _content(other)
        ]
        expected = first
        repeats = outputs_of_repeats(results)
        others = {row["id"]: row["text"] for row in first}
        texts = [one for one in differ if one["text"] != others[one["id"]]]
        found = {
            "rows_that_differ": len(differ),
            "texts_that_differ": len(texts),
            # Greedy rows only: where two tokens were nearly equally likely, a rounding decides.
            "largest_smallest_margin": max(
                (one["certificate"]["margin"] for one in texts if "certificate" in one), default=None
            ),
            "some_of_them": [one["id"] for one in differ[:5]],
            "outputs_of_repeats": repeats,
            "acceptance_length": length,
            "start_seconds": round(ready - start, 1),
            "start": notes,
            "seconds": round(time.perf_counter() - start, 1),
        }
        add(name, found)
        failed |= not args.fast and (bool(differ) or any(count > 1 for count in repeats.values()))
    wanted = not args.fast and any(part in _RESUME for part in args.only.split(";"))
    if wanted and time.perf_counter() - began < args.time_limit:
        mode = ["engine.deterministic=true", *(f"engine.{name}={value}" for name, value in common.items())]
        found = check_resume(args.target, args.draft, rows[:300], mode)
        add(_RESUME, found)
        failed |= not found["equal"]
    print("deterministic: FAILED" if failed else "deterministic: ok")
    return failed


if __name__ == "__main__":
    sys.exit(main())
