"""A benchmark of the cost of workers on Ray for the process that drives them, against one process. The engine is the
stub of the tests.

    python scripts/bench/bench_workers.py [--rows 20000] [--batch 16 128] [--workers 1 2 4] [--repeats 2] [-o FILE]
    python scripts/bench/bench_workers.py --step 0.02 --rows 2000 --batch 16     # an engine with steps of 20 ms
    python scripts/bench/bench_workers.py --memory --rows 1000000 --batch 128 --workers 2

Each cell is a file job in a process of its own. Its CPU time is user and system time of that process alone, from the
first row to the last result. "reading and writing" has no engine: each row finishes at once, with the same line.
Prints a JSON line for each cell; `us_per_row_beyond` is what a cell needs beyond reading and writing.
`idle_mb` is the resident memory before the first row, `peak_mb` the most until the output is written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `tests` is imported

from specbatch.config import Config
from specbatch.config_load import load_config
from specbatch.job.pool import LocalPool, WorkerPool
from specbatch.job.worker import Runtime, Worker
from specbatch.results.finished import Finished, FinishedRow
from specbatch.results.stats import commit, device_name
from specbatch.rows.sources import RawRow
from tests import stub_engine

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"gsm8k": (120, 420), "4 KB": (4096, 4096)}  # the least and the most characters of a prompt
FLOOR, ONE_PROCESS = "reading and writing", "one process"
_STEP = "BENCH_STEP"  # the environment variable of the workers with the seconds of an engine's step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20000, help="a fifth of them where a row has 4 KB")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 128], help="engine.max_batch_size")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--step", type=float, default=0.0, help="seconds of an engine's step")
    parser.add_argument("--repeats", type=int, default=1, help="the run with the least CPU time counts")
    parser.add_argument("--memory", action="store_true", help="only workers, and rows of 100 bytes")
    parser.add_argument("--profile", type=Path, help="write cProfile's figures of the last cell to this file")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell is not None:
        print(json.dumps(run_cell(**args.cell)))
        return
    cells = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in ["100 bytes"] if args.memory else args.kind:
            rows = args.rows // 5 if kind == "4 KB" else args.rows
            data = Path(folder, f"{kind}.jsonl".replace(" ", "-"))
            write_rows(data, rows, *KINDS.get(kind, (80, 80)))
            floor = None
            for batch in args.batch:
                for where in args.workers if args.memory else [FLOOR, ONE_PROCESS, *args.workers]:
                    if where == FLOOR and floor is not None:
                        continue
                    cell = {"data": str(data), "batch": batch, "where": where, "profile": str(args.profile or "")}
                    figures = min((start(cell, args.step) for _ in range(args.repeats)), key=lambda f: f["cpu_seconds"])
                    micros = figures["cpu_seconds"] / rows * 1e6
                    if where == FLOOR:
                        floor = micros
                    shown = {
                        "rows_of": kind,
                        "rows": rows,
                        "batch": batch,
                        "where": where,
                        "us_per_row": round(micros, 1),
                    }
                    if floor is not None:
                        shown["us_per_row_beyond"] = round(micros - floor, 1)
                    cells.append({**shown, "rows_per_second": round(rows / figures["wall_seconds"]), **figures})
                    print(json.dumps(cells[-1]), flush=True)
    if args.output is not None:
        args.output.write_text(json.dumps(report(cells), indent=1) + "\n", encoding="utf-8")


def report(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "ray": metadata.version("ray")}
    command = " ".join(["python", "scripts/bench/bench_workers.py", *sys.argv[1:]])
    return {"commit": commit(), "command": command, "device": device_name("cpu"), "versions": versions, "cells": cells}


def write_rows(path: Path, rows: int, shortest: int, longest: int) -> None:
    rng = random.Random(0)
    words = [
        f"{word} " for word in ("clips", "sold", "to", "friends", "in", "April", "and", "then", "half", "as", "many")
    ]
    with path.open("w", encoding="utf-8") as file:
        for index in range(rows):
            prompt = "".join(rng.choices(words, k=longest // 2))[: rng.randint(shortest, longest)]
            file.write(json.dumps({"id": f"row-{index}", "prompt": prompt, "max_tokens": 24}) + "\n")


def start(cell: dict[str, Any], step: float) -> dict[str, Any]:
    """Run a cell in a new process."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), _STEP: str(step)}
    command = [sys.executable, __file__, "--cell", json.dumps(cell)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def run_cell(data: str, batch: int, where: str | int, profile: str) -> dict[str, Any]:
    """Run a cell. `where`: a number of workers, or FLOOR or ONE_PROCESS."""
    from rich.console import Console

    from specbatch.job.command import GenerateOptions, run_file_job

    sets = [f"engine.max_batch_size={batch}", "model.target=stub", "engine.device=cpu"]
    if isinstance(where, int):
        sets.append(f"cluster.workers={where}")
    config = load_config(None, sets)
    pool = Metered(open_pool(config, where), profile)
    with tempfile.TemporaryDirectory() as folder:
        options = GenerateOptions(data, Path(folder, "out.jsonl"))
        began = time.perf_counter()
        outcome = run_file_job(options, config, pool, Console(quiet=True), began=began, summary=False)
    assert outcome.exit_code == 0, outcome
    return {"start_seconds": round(pool.began - began, 2), **pool.figures, "peak_mb": megabytes("VmHWM")}


def open_pool(config: Config, where: str | int) -> WorkerPool:
    if isinstance(where, int):
        from specbatch.scaleout import cluster

        return cluster.open_pool(config, new_worker, print)
    return LocalPool(new_worker()) if where == ONE_PROCESS else EchoPool(new_worker())


def new_worker() -> Worker:
    """Make a worker with the stub engine."""

    def build(run: stub_engine.StubRun, on_progress: Callable[[str], None]) -> stub_engine.StubEngine:
        batch = run.config.engine.max_batch_size
        assert batch is not None
        return stub_engine.StubEngine(batch, max_prompt_tokens=8192, sleep=float(os.environ.get(_STEP, "0")))

    return Worker(Runtime(stub_engine.resolve, build, lambda config: {}))


class EchoPool(LocalPool):
    """A pool in which each row finishes at once, with the line of the first row."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._rows: list[RawRow] = []
        self._first: Finished | None = None

    @property
    def has_room(self) -> bool:
        return len(self._rows) < 64

    def submit(self, row: RawRow, deaths: int = 0) -> None:
        self._rows.append(row)

    @property
    def is_idle(self) -> bool:
        return not self._rows

    def collect(self, last: bool) -> Finished:
        if self._first is None:
            super().submit(self._rows[0])
            self._first = super().collect(last)
        made = self._first.rows[0]
        rows = [FinishedRow(row.index, row.digest(), made.line, made.remark, made.margin) for row in self._rows]
        self._rows = []
        return Finished(rows, self._first.totals)


class Metered:
    """A pool that measures the cost between its first row and its last result."""

    def __init__(self, pool: WorkerPool, profile: str) -> None:
        self._pool = pool
        self._profile = profile
        self.began = 0.0
        self.figures: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    @contextmanager
    def recording(self, results: Any) -> Iterator[None]:
        import cProfile

        profiler = cProfile.Profile()
        idle = reset_peak()
        cpu = cpu_seconds()
        self.began = time.perf_counter()
        if self._profile:
            profiler.enable()
        with self._pool.recording(results):
            yield
        profiler.disable()
        self.figures = {
            "cpu_seconds": round(cpu_seconds() - cpu, 3),
            "wall_seconds": round(time.perf_counter() - self.began, 3),
            "idle_mb": idle,
        }
        if self._profile:
            profiler.dump_stats(self._profile)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, with all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def reset_peak() -> float:
    """Reset the peak of resident memory, and return the resident memory in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return megabytes("VmRSS")


def megabytes(field: str) -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (kilobytes,) = (line.split()[1] for line in status.splitlines() if line.startswith(f"{field}:"))
    return round(int(kilobytes) / 1024, 1)


if __name__ == "__main__":
    main()
