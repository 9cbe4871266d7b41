"""Runs generated programs: a process each, with limits of time and memory, without network, in a temporary folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_CHILD = Path(__file__).parent / "sandbox_child.py"
_REPORT_BYTES = 1 << 16
_POLL_SECONDS = 0.01
# What a program needs to start; nothing of the user's, no tokens and no proxies. numpy's libraries start no threads.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
# What `Verdict.isolation` says where the kernel keeps programs from these, and not names in Python's modules alone.
ISOLATED = {"network": "namespace", "processes": "namespace", "files": "own root"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a program. `passed`: it ran to its end. `detail`: the error. `isolation`: the resources that it
    was kept from, and how."""

    passed: bool
    detail: str
    isolation: Mapping[str, str] = field(default_factory=dict)


def run_programs(
    programs: Sequence[str], timeout_seconds: float, memory_mb: int, shown: Callable[[int], None] = lambda done: None
) -> list[Verdict]:
    """A verdict for each program, a few at a time. `shown` gets the number that are done."""
    verdicts = []
    stopped = threading.Event()
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        try:
            run = functools.partial(run_program, timeout_seconds=timeout_seconds, memory_mb=memory_mb, stopped=stopped)
            for verdict in pool.map(run, programs):
                verdicts.append(verdict)
                shown(len(verdicts))
        except BaseException:  # Ctrl-C: nobody waits for what is running
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return verdicts


def run_program(
    program: str, timeout_seconds: float, memory_mb: int, stopped: threading.Event | None = None
) -> Verdict:
    """Run `program`, Python source. It passes if it ends by itself within `timeout_seconds` of wall time and
    `memory_mb` MiB of address space, and before `stopped` is set."""
    stopped = stopped or threading.Event()
    job = {"program": program, "timeout_seconds": timeout_seconds, "memory_mb": memory_mb}
    with (
        tempfile.TemporaryDirectory(prefix="specbatch-eval-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as given,
        # A file and no pipe: what a program may write to one has a limit, and nobody has to read it meanwhile.
        tempfile.TemporaryFile() as said,
    ):
        given.write(json.dumps(job).encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", str(_CHILD)],
            stdin=given,
            stdout=said,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=_ENVIRONMENT | {"HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        late = time.monotonic() + timeout_seconds
        try:
            while (running := process.poll() is None) and time.monotonic() < late and not stopped.is_set():
                stopped.wait(_POLL_SECONDS)
        finally:
            _end(process)
        detail = f"timed out after {timeout_seconds:g} s" if running else ""
        said.seek(0)
        return _verdict(said.read(_REPORT_BYTES), detail)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The launcher and its whole group; what is in its namespace of processes ends with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _verdict(output: bytes, detail: str) -> Verdict:
    """Read the verdict. `output`: two lines of the launcher, or fewer if it was ended before."""
    isolation, outcome = ([json.loads(line) for line in output.splitlines()] + [{}, {}])[:2]
    passed = outcome.get("outcome") == "passed" and not detail
    detail = detail or outcome.get("detail", "the program ended before its tests did")
    return Verdict(passed, "" if passed else detail, isolation)
