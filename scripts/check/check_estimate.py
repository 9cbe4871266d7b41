"""A check of `specbatch estimate` against the runs that it estimates: six small jobs.

    python scripts/check/check_estimate.py [--rows-factor 1] [--jobs plain,drafts] [-o FILE] [OPTION ...]
    python scripts/check/check_estimate.py --rows-factor 40 --batch-factor 8 --jobs plain,mixed --time-limit 110 \\
        --model random:qwen2.5-1.5b --draft random:eagle3-32k                                      # a GPU

The jobs differ in lengths, batch size, draft method, shared beginnings of prompts and completions of a row. For each,
`estimate` and then `generate` run as commands, and both times are printed, in one JSON line; none begins after
`--time-limit`. Other arguments go to both commands, such as `--model org/model --draft org/head`; batch sizes are
multiplied by `--batch-factor`. Exit code 1 if a job failed, or took 15% more or less than estimated. On one core with
the built-in model it takes about 8 minutes. On a GPU, take factors that make jobs of minutes. There the first start
with an option compiles kernels, and the run finds them on disk: with `--warm` another estimate comes before.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOPICS = ["rivers", "metals", "birds", "planets", "bridges", "poems", "engines", "islands", "cheese", "chess", "maps"]
SHOTS = "".join(f"Q: What is {a}+{a + 3}?\nA: {a} plus {a + 3} is {2 * a + 3}.\n" for a in range(8))
TOLERANCE = 0.15


def ask(number: int) -> str:
    return f"Write some sentences about {TOPICS[number % len(TOPICS)]} and number {number}."


def jobs(factor: float) -> dict[str, tuple[list[dict[str, Any]], int, list[str]]]:
    """Return the jobs by name: (rows, batch size, options)."""

    def count(rows: int) -> range:
        return range(max(round(rows * factor), 8))

    rng = random.Random(1)
    limits = [8, 16, 32, 64, 128]
    mixed = [{"prompt": ask(i) * rng.choice([1, 1, 2, 6]), "max_tokens": rng.choice(limits)} for i in count(64)]
    shots = [{"prompt": f"{SHOTS}Q: What is {i}+{i + 7}?\nA:", "max_tokens": 24} for i in count(140)]
    return {
        "plain": ([{"prompt": ask(i), "max_tokens": 32} for i in count(96)], 8, ["--method", "none"]),
        "drafts": ([{"prompt": ask(i), "max_tokens": 40} for i in count(120)], 8, []),
        "single": ([{"prompt": ask(i), "max_tokens": 48} for i in count(28)], 1, []),
        "8-shot": (shots, 16, ["--set", "data.prompts_as_chat=false"]),
        "samples": (
            [{"prompt": ask(i), "max_tokens": 96, "n": 4} for i in count(20)],
            8,
            ["--temperature", "0.8", "--method", "none"],
        ),
        "mixed": (mixed, 4, []),
    }


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of specbatch. It raises RuntimeError for exit codes above 1; exit code 1 says that rows failed."""
    done = subprocess.run([sys.executable, "-m", "specbatch", *arguments], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise failure(done)
    return done


def failure(done: subprocess.CompletedProcess[str]) -> RuntimeError:
    """Make an error with the end of the command's stderr."""
    return RuntimeError(f"exit code {done.returncode}: {done.stderr[-2000:]}")


def run_estimate(path: Path, options: list[str]) -> dict[str, Any]:
    """Run the estimate of a job and return its report. It raises RuntimeError if there is none."""
    done = command("estimate", str(path), "--json", *options)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise failure(done) from None
    return report


def run_job(path: Path, options: list[str]) -> dict[str, Any]:
    """Run a job and return its statistics. It raises RuntimeError if there are none."""
    output = path.with_name("results.jsonl")
    done = command("generate", str(path), "-o", str(output), *options)
    try:
        report: dict[str, Any] = json.loads(output.with_name("results.stats.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise failure(done) from None
    return report


def check(name: str, rows: list[dict[str, Any]], options: list[str], *, warm: bool = False) -> dict[str, Any]:
    """Check one job. In the result, `error` is the error of the estimate relative to the run, and `run_error` the same
    without the time for loading. `warm`: another estimate runs before, which compiles kernels."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        if warm:
            run_estimate(path, options)
        estimated, stats = run_estimate(path, options), run_job(path, options)
    seconds, ran = estimated["seconds"], stats["session"]["seconds"]
    return {
        "job": name,
        "rows": len(rows),
        "estimated": seconds,
        "ran": ran,
        "error": round(seconds["expected"] / ran["total"] - 1, 3),
        "run_error": round((seconds["expected"] - seconds["load"]) / max(ran["total"] - ran["load"], 1e-3) - 1, 3),
        "in_range": seconds["low"] <= ran["total"] <= seconds["high"],
        "estimated_tokens": estimated["completion_tokens"],
        "tokens": stats["tokens"]["completion"],
        "trial": estimated["trial"],
        "device": stats["device"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows-factor", type=float, default=1.0)
    parser.add_argument("--batch-factor", type=int, default=1)
    parser.add_argument("--jobs", help="names, with commas between them")
    parser.add_argument("-o", "--output", type=Path, help="a JSON file of all figures")
    parser.add_argument("--warm", action="store_true", help="an estimate before each, which compiles kernels")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds")
    given, options = parser.parse_known_args()
    found, began = list[dict[str, Any]](), time.perf_counter()
    for name, (rows, batch, own) in jobs(given.rows_factor).items():
        if given.jobs is not None and name not in given.jobs.split(","):
            continue
        if time.perf_counter() - began > given.time_limit:
            found.append({"job": name, "left_out": f"after {given.time_limit:g} s"})
        else:
            size = ["--set", f"engine.max_batch_size={batch * given.batch_factor}"]
            try:
                found.append(check(name, rows, [*own, *size, *options], warm=given.warm))
            except (RuntimeError, OSError) as error:  # the other jobs are checked all the same
                found.append({"job": name, "failed": str(error)})
        print(json.dumps({"check": "estimate", **found[-1]}), flush=True)
    if given.output is not None:
        given.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(
        int(any(abs(one.get("error", TOLERANCE + 1)) > TOLERANCE for one in found if "left_out" not in one))
    )


if __name__ == "__main__":
    main()
