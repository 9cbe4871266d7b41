"""The jobs of check_workers.py: rows, engines by name, commands as processes.

Run as a program, this is `specbatch generate` over the stub engine of the tests. There, a prompt with `SEGV` in it ends
the process by that signal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from specbatch.cli.endings import user_errors
from specbatch.config_load import load_config
from specbatch.job.command import GenerateOptions, run_file_job
from specbatch.job.pool import LocalPool
from specbatch.job.terminal import print_notes
from specbatch.job.worker import Runtime, Worker
from specbatch.rows.shard import Shard
from specbatch.scaleout import cluster
from specbatch.types import Completion, Request
from tests.stub_engine import StubEngine, StubRun, resolve

ROOT = Path(__file__).resolve().parents[2]
DEADLY = "SEGV"
ENGINES = ("stub", "tiny", "smollm2")
_TIMEOUT = 600.0
_FLOAT32 = ["--set", "model.dtype=float32", "--set", "engine.device=cpu", "--set", "engine.max_batch_size=16"]


class DeadlyEngine(StubEngine):
    _has_deadly = False

    def submit(self, request: Request) -> None:
        super().submit(request)
        self._has_deadly |= DEADLY.encode() in bytes(token % 256 for token in request.prompt_token_ids)

    def step(self) -> list[Completion]:
        if self._has_deadly:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step()


def build(run: StubRun, on_progress: Callable[[str], None]) -> StubEngine:
    return DeadlyEngine(run.config.engine.max_batch_size or 16, sleep=float(os.environ.get("STUB_SLEEP", "0")))


def stub_worker() -> Worker:
    """Make the stub worker, in the process of a worker or of the command."""
    return Worker(Runtime(resolve, build, lambda config: {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--shard", type=Shard.parse)
    parser.add_argument("--quarantine", action="store_true")
    args = parser.parse_args()
    try:
        with user_errors() as console:
            config = load_config(None, args.set)
            options = GenerateOptions(args.input, args.output, shard=args.shard, quarantine=args.quarantine)
            pool = (
                LocalPool(stub_worker())
                if config.cluster.workers is None
                else cluster.open_pool(config, stub_worker, lambda line: print_notes([line], console))
            )
            code = run_file_job(options, config, pool, console, began=time.perf_counter()).exit_code
    except typer.Exit as exc:
        code = exc.exit_code
    sys.exit(code)


def mixed_rows(count: int) -> list[Any]:
    """Make greedy and sampled rows, with n = 2, logprobs, stop strings and seeds; lines of OpenAI Batch; bad rows."""
    rows: list[Any] = []
    for i in range(count):
        options: dict[str, Any] = {"max_tokens": 4 + 5 * i % 13}
        if i % 2:
            options |= ({"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3, "seed": i})[
                i % 3
            ]
        if i % 7 == 0:
            options["n"] = 2
        if i % 4 == 1:
            options["logprobs"] = i % 3
        if i % 6 == 0:
            options["stop"] = ["\n", "4"]
        prompt = f"Repeat: {i} and {i % 9}, {i} and" if i % 3 else f"Name an animal, number {i}."
        if i % 11 == 3:
            rows.append(b'{"prompt": "One two", "id": %d' % i)
        elif i % 13 == 5:
            rows.append({"id": i, "text": prompt})
        elif i % 5 == 1:
            body = {"model": "any", "prompt": prompt, **options}
            rows.append({"custom_id": f"batch-{i}", "method": "POST", "url": "/v1/completions", "body": body})
        else:
            rows.append({"id": f"row-{i}", "prompt": prompt, **options})
    return rows


@dataclass(frozen=True)
class Jobs:
    """The commands of one engine, in a folder."""

    engine: str  # one of ENGINES
    folder: Path
    sleep: float = 0.0  # seconds of a step of the stub engine

    def start(
        self, data: str, output: str, workers: int | None = None, *more: str, address: str | None = None
    ) -> Session:
        sets = [*_FLOAT32, *more]
        if self.engine == "tiny":
            from tests.tiny_checkpoint import write_checkpoint  # it imports torch

            target = self.folder / "tiny-model"
            sets += ["--set", f"model.target={target if target.exists() else write_checkpoint(target)}"]
        if workers is not None:
            sets += ["--set", f"cluster.workers={workers}"]
            if address is not None:
                sets += ["--set", f"cluster.address={address}"]
        program = [str(Path(__file__))] if self.engine == "stub" else ["-m", "specbatch", "generate"]
        return Session([*program, data, "-o", output, *sets], self.folder, address, self.sleep)

    def run(self, data: str, output: str, workers: int | None = None, *more: str) -> Session:
        session = self.start(data, output, workers, *more)
        session.wait()
        return session


class Session:
    """A running command. `address`: the address of a Ray cluster whose nodes are children of this process."""

    def __init__(self, arguments: list[str], folder: Path, address: str | None = None, sleep: float = 0.0) -> None:
        self.folder = folder
        self.address = address
        self.temporary = folder / f"t{time.monotonic_ns() % 10**9}"  # a short path: sockets are in it
        self.temporary.mkdir()
        self._stderr = self.temporary.with_suffix(".log")
        self._began = time.perf_counter()
        with self._stderr.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment(sleep) | {"TMPDIR": str(self.temporary)},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
            )

    def wait(self) -> int:
        code = self.process.wait(_TIMEOUT)
        self.seconds = time.perf_counter() - self._began
        return code

    def interrupt(self) -> None:
        """Send SIGINT as a terminal does at Ctrl-C, to the command and its other processes."""
        os.killpg(self.process.pid, signal.SIGINT)

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def wait_until(self, condition: Callable[[], bool], seconds: float = _TIMEOUT) -> bool:
        """Wait until the condition holds. Return False if the command ends before, or after `seconds`."""
        end = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            if condition():
                return True
            time.sleep(0.01)
        return False

    def workers(self) -> list[psutil.Process]:
        """Return the processes of the workers that have started."""
        return [process for process in self._started() if title(process).startswith("ray::_Actor")]

    def processes(self) -> list[psutil.Process]:
        """Return the processes that must end with the command."""
        return self.workers() if self.address else self._started()

    def remains(self, processes: list[psutil.Process], seconds: float) -> tuple[list[str], float]:
        """Wait at most `seconds` until no process and no file of the command is left. Return what is left, and the
        seconds that passed."""
        began = time.perf_counter()
        while True:
            left = [f"{process.pid} {title(process)}" for process in processes if is_alive(process)]
            left += [str(path) for path in self.temporary.glob("specbatch-*")]
            passed = time.perf_counter() - began
            if not left or passed > seconds:
                shutil.rmtree(self.temporary, ignore_errors=True)
                return left, round(passed, 2)
            time.sleep(0.05)

    def _started(self) -> list[psutil.Process]:
        root = psutil.Process() if self.address else self.process
        try:
            return psutil.Process(root.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def environment(sleep: float = 0.0) -> dict[str, str]:
    """Return the environment for commands, and for nodes of Ray."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "STUB_SLEEP": str(sleep)}


def different(session: Session, output: Path, code: int, whole: bytes) -> str:
    """Say how a command's end differs from that of one process. The text is empty if it does not."""
    if session.process.returncode != code:
        return f"exit code {session.process.returncode}, not {code}:\n{session.stderr}"
    return "" if output.read_bytes() == whole else "the results DIFFER from those of one process"


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    import worker_jobs  # imported by name, so that workers import it, too, and not a copy of this program

    worker_jobs.main()
