"""A check that a job survives kill -9, signals and bad rows, with the real command, engine and model. It takes 15 to 30
minutes.

    python scripts/check/check_faults.py [kill] [bad] [signals] [--model REF] [--set A.B=VALUE ...]

kill     25 runs die by SIGKILL at random moments (uniform over a run's work, after the model is loaded) and are resumed
         until their file is whole; each file must then be byte for byte that of a run that nothing disturbed. Half of
         the kills hit greedy rows, half sampled ones; rows ask for logprobs, n = 2, stop strings, shared prefixes.
bad      10,000 rows, 1,000 of them bad in every way: 9,000 results and 1,000 error rows, in order, exit code 1.
signals  SIGINT and SIGTERM, while loading and at work: exit code 130, how to resume, the same bytes after it.

The exit code is 0 only if all of that holds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The command, with a file that appears once the model is loaded. From then on there is work to interrupt.
_CHILD = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
from specbatch.setup import build
original = build.build_engine
def build_engine(*arguments):
    engine = original(*arguments)
    Path(sys.argv[1]).touch()
    return engine
build.build_engine = build_engine
from specbatch.cli import app
app(sys.argv[2:], prog_name="specbatch")
"""
_CHECKS = ("kill", "bad", "signals")
_KILLS = 25
_KILLS_A_FILE = 4  # about this number; a file is whole when its last resume was not killed
_TIMEOUT = 1800.0


class Command:
    """The command `specbatch generate` in a folder."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        self.folder = folder
        self.options = options
        self.loaded = folder / "loaded"

    def start(self, name: str, *more: str, output: str) -> subprocess.Popen[str]:
        self.loaded.unlink(missing_ok=True)
        arguments = ["generate", name, "-o", output, *self.options, *more]
        return subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(self.loaded), *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_loaded(self, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + _TIMEOUT
        while not self.loaded.exists():
            if (code := process.poll()) is not None:
                if code == 0:
                    return  # all rows were finished: the kill came between the last row and the end
                raise SystemExit(f"the command ended while loading:\n{process.communicate()[1]}")
            assert time.monotonic() < deadline, "loading takes for ever"
            time.sleep(0.005)

    def run(self, name: str, *more: str, output: str) -> tuple[int, str, float]:
        """Run the command. Return (exit code, stderr, seconds of work after loading)."""
        process = self.start(name, *more, output=output)
        self.wait_loaded(process)
        began = time.perf_counter()
        _, stderr = process.communicate(timeout=_TIMEOUT)
        return process.returncode, stderr, time.perf_counter() - began


def job_rows(count: int, sampled: bool) -> list[dict[str, Any]]:
    """Make rows with what makes a resume hard: several requests of one row, common prefixes, texts that repeat, seeds
    of rows."""
    examples = "\n".join(f"Q: What is {a} plus {b}?\nA: {a} plus {b} is {a + b}." for a, b in ((2, 3), (7, 1), (4, 4)))
    rows = []
    for i in range(count):
        row: dict[str, Any] = {"id": f"row-{i}", "max_tokens": 8 + 5 * i % 29}
        if i % 4 == 0:
            row["prompt"] = f"{examples}\nQ: What is {i} plus {i % 7}?\nA:"
        elif i % 4 == 1:
            row["prompt"] = f"Repeat: the cat sat on mat {i}, the cat sat on mat {i}, the cat sat on"
        elif i % 4 == 2:
            row["messages"] = [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"Count to {i}."},
            ]
        else:
            row["prompt"] = f"Name an animal that begins with {'abcdefghij'[i % 10]}."
        if i % 5 == 0:
            row["logprobs"] = i % 3
        if i % 7 == 0:
            row["n"] = 2
        if i % 6 == 0:
            row["stop"] = ["\n", "4"]
        if sampled:
            row |= ({"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3, "top_k": 40})[i % 3]
            if i % 8 == 0:
                row |= {"seed": i, "min_p": 0.02}
            if i % 10 == 0:
                row["temperature"] = 0
        rows.append(row)
    return rows


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))


def check_kill(command: Command, rng: random.Random, num_kills: int, num_rows: int) -> list[str]:
    problems: list[str] = []
    print(f"{'mode':8} {'kill':>4} {'moment':>8} {'rows before':>12} {'rows after':>11}", flush=True)
    for mode, kills in (("greedy", (num_kills + 1) // 2), ("sampled", num_kills // 2)):
        name = f"{mode}.jsonl"
        write_lines(command.folder / name, job_rows(num_rows, mode == "sampled"))
        code, stderr, work = command.run(name, output=f"{mode}.whole.jsonl")
        if code != 0:
            return [f"{mode}: the undisturbed run ended with {code}:\n{stderr}"]
        whole = (command.folder / f"{mode}.whole.jsonl").read_bytes()
        print(f"{mode:8}    - {work:7.2f}s {0:12} {num_rows:11}  (undisturbed)", flush=True)
        done = files = different = 0
        while done < kills:
            output = f"{mode}.{files}.jsonl"
            files += 1
            while True:
                partial = command.folder / f"{output}.partial"
                before = count_rows(partial)
                process = command.start(name, output=output)
                command.wait_loaded(process)
                # The moment is uniform over a part of the run. The file grows from kill to kill, so kills come at all
                # lengths of it.
                moment = rng.uniform(0, 2 * work / _KILLS_A_FILE)
                try:
                    process.communicate(timeout=moment if done < kills else _TIMEOUT)
                    break
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                    done += process.returncode == -signal.SIGKILL
                    print(f"{mode:8} {done:4} {moment:7.2f}s {before:12} {count_rows(partial):11}", flush=True)
            if process.returncode != 0 or (command.folder / output).read_bytes() != whole:
                problems.append(f"{output} is not the undisturbed run's file (exit code {process.returncode})")
                different += 1
        verdict = f"{different} of them DIFFERENT" if different else "all byte-identical to the undisturbed run's"
        print(f"{mode}: {done} kills over {files} files, {verdict}", flush=True)
    return problems


def count_rows(partial: Path) -> int:
    """Count the results in a partial file."""
    return partial.read_bytes().count(b'","row":{') if partial.exists() else 0


def bad_rows(rng: random.Random, longer_than: int) -> list[tuple[str, Callable[[int], Any]]]:
    """Return the kinds of bad rows: (error type, a function from a row number to a bad row)."""
    good = {"prompt": "One two"}
    return [
        ("invalid_json", lambda i: b'{"prompt": "One two", "id": %d' % i),
        ("invalid_json", lambda i: b"One two %d" % i),
        ("invalid_json", lambda i: b'["One", "two"]'),
        ("invalid_json", lambda i: b'{"prompt": "One", "temperature": NaN}'),
        ("missing_prompt", lambda i: {"id": i, "text": "One two"}),
        ("missing_prompt", lambda i: {"id": i, "prompt": None}),
        ("missing_prompt", lambda i: {}),
        ("invalid_type", lambda i: {"id": i, "prompt": 12}),
        ("invalid_type", lambda i: {"id": i, "prompt": ["One"]}),
        ("invalid_type", lambda i: {"id": i, "messages": "One"}),
        ("invalid_type", lambda i: {"id": i, "messages": [{"role": "user", "content": 5}]}),
        ("invalid_type", lambda i: {"id": i, "prompt_token_ids": ["a"]}),
        ("invalid_type", lambda i: {"id": i, "prompt_token_ids": [10**9]}),
        ("invalid_type", lambda i: {**good, "max_tokens": "2"}),
        ("invalid_type", lambda i: {**good, "temperature": True}),
        ("invalid_type", lambda i: {**good, "stop": 3}),
        ("invalid_value", lambda i: {**good, "top_p": 1.5}),
        ("invalid_value", lambda i: {**good, "max_tokens": 0}),
        ("prompt_too_long", lambda i: {"id": i, "prompt": "word " * (longer_than + rng.randrange(1000))}),
        ("prompt_too_long", lambda i: {"id": i, "prompt_token_ids": [1] * longer_than}),
        ("unsupported_parameter", lambda i: {**good, "presence_penalty": 0.5}),
        ("unsupported_parameter", lambda i: {**good, "tools": [{"type": "function"}]}),
        ("unsupported_parameter", lambda i: {**good, "response_format": {"type": "json_object"}}),
        ("empty_prompt", lambda i: {"id": i, "prompt": ""}),
        ("empty_prompt", lambda i: {"id": i, "messages": []}),
        ("empty_prompt", lambda i: {"id": i, "prompt_token_ids": []}),
        ("invalid_text", lambda i: b'{"prompt": "One \\ud800 two"}'),
        ("invalid_text", lambda i: b'{"prompt": "One \xff two"}'),
    ]


def check_bad(command: Command, rng: random.Random, num_rows: int, num_bad: int) -> list[str]:
    kinds = bad_rows(rng, longer_than=10_000)
    bad_at = {index: kinds[k % len(kinds)] for k, index in enumerate(rng.sample(range(num_rows), num_bad))}
    good = {i: {"prompt": f"{i} and", "id": i, "max_tokens": 1 + (i % 4 == 0)} for i in range(num_rows)}
    write_lines(command.folder / "bad.jsonl", [bad_at[i][1](i) if i in bad_at else good[i] for i in range(num_rows)])
    raw_text = "data.prompts_as_chat=false"  # a chat template would make every prompt 30 tokens long
    code, stderr, work = command.run("bad.jsonl", "--set", raw_text, output="bad.results.jsonl")
    last = stderr.strip().splitlines()[-1] if stderr.strip() else ""
    problems = []
    if code != 1:
        problems.append(f"exit code {code}, not 1:\n{stderr}")
        return problems
    if not last.startswith(f"{num_bad:,} of {num_rows:,} rows failed"):
        problems.append(f"the last line is {last!r}")
    results = [json.loads(line) for line in (command.folder / "bad.results.jsonl").read_bytes().splitlines()]
    if [r["index"] for r in results] != list(range(num_rows)):
        problems.append("the results are not one for each row in input order")
        return problems
    for result in results:
        i = result["index"]
        if i in bad_at:
            if (
                result["finish_reason"] != "error"
                or result["error"]["type"] != bad_at[i][0]
                or result["text"] is not None
            ):
                problems.append(f"row {i} should be {bad_at[i][0]}: {str(result)[:200]}")
        elif result["finish_reason"] not in ("stop", "length") or result["id"] != i or "error" in result:
            problems.append(f"row {i} was good: {str(result)[:200]}")
    # The neighbours of bad rows must have the same results as without the bad rows.
    near = [i for i in good if i not in bad_at and {i - 1, i + 1} & bad_at.keys()][:300]
    write_lines(command.folder / "near.jsonl", [good[i] for i in near])
    code, stderr, _ = command.run("near.jsonl", "--set", raw_text, output="near.results.jsonl")
    alone = [json.loads(line) for line in (command.folder / "near.results.jsonl").read_bytes().splitlines()]
    for i, row in zip(near, alone, strict=True):
        if {**row, "index": i} != results[i]:
            problems.append(f"row {i} is different without bad rows around it")
    counts = Counter(r["error"]["type"] for r in results if r["finish_reason"] == "error")
    ok = num_rows - sum(counts.values())
    print(f"{num_rows:,} rows: {ok:,} results, {sum(counts.values()):,} error rows {dict(sorted(counts.items()))}")
    print(f"in order; {len(near)} neighbours of bad rows equal to a run without those; {work:.0f} s of work")
    print(f"exit code 1, last line: {last}", flush=True)
    return problems


def check_signals(command: Command, rng: random.Random, num_rows: int) -> list[str]:
    problems = []
    write_lines(command.folder / "signals.jsonl", job_rows(num_rows, sampled=True))
    code, stderr, work = command.run("signals.jsonl", output="signals.whole.jsonl")
    if code != 0:
        return [f"the undisturbed run ended with {code}:\n{stderr}"]
    whole = (command.folder / "signals.whole.jsonl").read_bytes()
    for number in (signal.SIGINT, signal.SIGTERM):
        for when in ("while loading", "at work"):
            output = f"signals.{number.name}.{when.replace(' ', '_')}.jsonl"
            process = command.start("signals.jsonl", output=output)
            if when == "at work":
                command.wait_loaded(process)
                time.sleep(rng.uniform(0.2, 0.7) * work)
            else:
                wait_for(command.folder / f"{output}.partial")
            process.send_signal(number)
            sent = time.perf_counter()
            _, stderr = process.communicate(timeout=_TIMEOUT)
            seconds = time.perf_counter() - sent
            said = stderr.strip().splitlines()[-1] if stderr.strip() else ""
            if process.returncode != 130 or "run the same command again" not in stderr or "Traceback" in stderr:
                problems.append(f"{number.name} {when}: exit code {process.returncode}:\n{stderr}")
            kept = count_rows(command.folder / f"{output}.partial")
            code, stderr, _ = command.run("signals.jsonl", output=output)
            same = code == 0 and (command.folder / output).read_bytes() == whole
            if not same:
                problems.append(f"{number.name} {when}: the resumed file differs (exit code {code}):\n{stderr}")
            print(
                f"{number.name} {when}: exit code {process.returncode} after {seconds:.2f} s, {kept} rows kept, "
                f"said {said!r}; resumed: {'byte-identical' if same else 'DIFFERENT'}",
                flush=True,
            )
    return problems


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.005)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="kill, bad or signals; default: all three")
    parser.add_argument("--model", help="target; default: the built-in model")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=VALUE", help="as for specbatch")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the moments; default: the time")
    parser.add_argument("--kills", type=int, default=_KILLS)
    parser.add_argument("--rows", type=int, default=40, help="of the files that are interrupted")
    args = parser.parse_args()
    if unknown := set(args.checks) - set(_CHECKS):
        parser.error(f"unknown check {unknown.pop()!r}; there are {', '.join(_CHECKS)}")
    options = [word for item in args.set for word in ("--set", item)]
    if args.model:
        options += ["--set", f"model.target={Path(args.model).resolve() if Path(args.model).exists() else args.model}"]
    print(f"seed {args.seed}")
    problems: list[str] = []
    for check in args.checks or _CHECKS:
        rng = random.Random(args.seed)
        began = time.perf_counter()
        print(f"== {check}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            command = Command(Path(folder), options)
            if check == "kill":
                found = check_kill(command, rng, args.kills, args.rows)
            elif check == "bad":
                found = check_bad(command, rng, 10_000, 1_000)
            else:
                found = check_signals(command, rng, args.rows)
        for problem in found[:20]:
            print(f"PROBLEM: {problem}")
        print(f"== {check}: {'ok' if not found else f'{len(found)} problems'} in {time.perf_counter() - began:.0f} s")
        problems += found
    print("faults: all checks passed" if not problems else f"faults: FAILED, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
