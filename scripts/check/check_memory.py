"""A check of a file job's host memory without the model: a million rows through the command's code over a stub engine.

    python scripts/check/check_memory.py [--rows 1000000] [--limit-mb 200] [--plan-rows 65536]

Every row is read, parsed, tokenised, written, and sorted into input order; only the engine is made up (it answers at
once), so that what grows is the job's own. Prints the resident set on the way; exit code 1 if it grew by more than
--limit-mb. `--plan-rows` is data.plan_rows. Needs a checkout (the stub engine is that of the tests). About 5 minutes on
one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from specbatch.config import Config, DataSection
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.pool import LocalPool
from specbatch.job.worker import Runtime, Worker
from specbatch.types import Completion
from tests.stub_engine import StubEngine, StubRun, resolve

_MB = 1e6
_SAMPLES = 10  # the number of lines in the printed table
_BATCH = 64


class Watch:
    """The largest memory that was measured for this process."""

    def __init__(self, rows: int) -> None:
        self._process = psutil.Process()
        self._every = max(rows // _SAMPLES, 1)
        self._rows = 0
        gc.collect()
        self.before = self.most = self._process.memory_info().rss

    def look(self, finished: int = 0) -> None:
        rss = self._process.memory_info().rss
        self.most = max(self.most, rss)
        if self._rows // self._every != (self._rows + finished) // self._every:
            print(f"{self._rows + finished:>10,} rows  {rss / _MB:7.1f} MB  +{self.growth:.1f} MB at most", flush=True)
        self._rows += finished

    @property
    def growth(self) -> float:
        return (self.most - self.before) / _MB


class WatchedEngine(StubEngine):
    def __init__(self, watch: Watch) -> None:
        super().__init__(_BATCH)
        self._watch = watch

    def step(self) -> list[Completion]:
        finished = super().step()
        self._watch.look(len(finished))
        return finished


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--limit-mb", type=float, default=200)
    parser.add_argument("--plan-rows", type=int, default=DataSection().plan_rows)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "data.jsonl").open("w") as file:
            for i in range(args.rows):
                file.write(json.dumps({"prompt": f"row {i} " + "x" * 100, "id": i, "topic": "y" * 50}) + "\n")
        watch = Watch(args.rows)

        def build(run: StubRun, show: Callable[[str], None]) -> StubEngine:
            return WatchedEngine(watch)

        began = time.perf_counter()
        options = GenerateOptions(str(folder / "data.jsonl"))
        pool = LocalPool(Worker(Runtime(resolve, build, lambda _: {})))
        code = run_file_job(
            options, Config(data=DataSection(plan_rows=args.plan_rows)), pool, Console(quiet=True), began=began
        ).exit_code
        seconds = time.perf_counter() - began
        watch.look()
        output = folder / "data.results.jsonl"
        with output.open("rb") as lines:
            in_order = all(json.loads(line)["index"] == i for i, line in enumerate(lines))
        size = output.stat().st_size
    ok = code == 0 and in_order and watch.growth < args.limit_mb
    print(
        f"memory: {'ok' if ok else 'FAILED'}: {args.rows:,} rows, {size / _MB:,.0f} MB of results in input order: "
        f"{in_order}, grew by {watch.growth:.1f} MB (limit {args.limit_mb:.0f}), {args.rows / seconds:,.0f} rows/s"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
