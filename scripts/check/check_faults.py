"""Check that a job survives kill -9 and signals. The real command, engine and model; 10 to 20 minutes.

    python scripts/check/check_faults.py [kill] [signals] [--model REF] [--set A.B=VALUE ...]

kill     25 runs die by SIGKILL at random moments (uniform over a run's work, after the model is loaded) and are resumed
         until their file is whole; each file must then be byte for byte that of a run that nothing disturbed. Half of
         the kills hit greedy rows, half sampled ones; rows ask for logprobs, n = 2, stop strings, shared prefixes.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The command itself, with a file that appears once the model is loaded: from then on there is work to interrupt.
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
_CHECKS = ("kill", "signals")
_KILLS = 25
_KILLS_A_FILE = 4  # about; a file is whole when its last resume was not killed
_TIMEOUT = 1800.0


class Command:
    """`specbatch generate` in a folder."""

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
                    return  # all rows were done: killed between the last one and the end
                raise SystemExit(f"the command ended while loading:\n{process.communicate()[1]}")
            assert time.monotonic() < deadline, "loading takes for ever"
            time.sleep(0.005)

    def run(self, name: str, *more: str, output: str) -> tuple[int, str, float]:
        """(exit code, stderr, seconds of work after loading)"""
        process = self.start(name, *more, output=output)
        self.wait_loaded(process)
        began = time.perf_counter()
        _, stderr = process.communicate(timeout=_TIMEOUT)
        return process.returncode, stderr, time.perf_counter() - began


def job_rows(count: int, sampled: bool) -> list[dict[str, Any]]:
    """Rows that use what makes resuming hard: requests of one row, common prefixes, texts that repeat, own seeds."""
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
                # Uniform over a part of the run; the file grows from kill to kill, so all of its length is met.
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
    """Results in a partial file."""
    return partial.read_bytes().count(b'","row":{') if partial.exists() else 0


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
    parser.add_argument("checks", nargs="*", metavar="CHECK", help="kill or signals; default: both")
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
