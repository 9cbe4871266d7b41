"""Commands as processes that are forked from this one. Signals, kill -9 and exit codes work as in new processes, but
there are no seconds of imports. Tests of a process's start (imports, closed streams) need a new one."""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from typer.testing import CliRunner

from specbatch import cli
from tests import stub_engine

_CONTEXT = multiprocessing.get_context("fork")


class Command:
    """The command `specbatch` with these arguments, in a folder, as subprocess.Popen would run it. `main`: the program;
    by default it has the stub engine. `extra`: environment variables."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        main: Callable[[], None] = stub_engine.main,
        stdin: str = "",
        stderr: str | None = None,
        **extra: str,
    ) -> None:
        _import_all()
        files = [tempfile.TemporaryFile("w+") for _ in range(3)]  # noqa: SIM115
        files[0].write(stdin)
        files[0].seek(0)
        self._output = files[1:]
        streams = [*files[:2], files[2] if stderr is None else open(stderr, "w")]  # noqa: SIM115
        self._process = _CONTEXT.Process(target=_run, args=(folder, arguments, main, streams, extra))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code. None while the command runs."""
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        """Wait for the end, and return stdout and stderr."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            raise TimeoutError(f"it still ran after {timeout} s")
        for file in self._output:
            file.seek(0)
        out, err = (file.read() for file in self._output)
        return out, err

    def wait_for_rows(self, partial: Path, count: int) -> None:
        """Wait until more than `count` results are in the file."""
        deadline = time.monotonic() + 60
        while not (partial.exists() and partial.read_bytes().count(b'","row":{') > count):
            assert self.returncode is None, self.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.002)


def run(folder: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `options` as for Command."""
    command = Command(folder, *arguments, **options)
    out, err = command.communicate()
    assert command.returncode is not None
    return subprocess.CompletedProcess(arguments, command.returncode, out, err)


@functools.cache
def _import_all() -> None:
    """Import what commands import, also while they parse, so that not each forked process does it: 0.3 s."""
    importlib.import_module("specbatch.job.command")
    CliRunner().invoke(cli.app, ["generate", "--limit", "x"])


def _run(
    folder: Path, arguments: tuple[str, ...], main: Callable[[], None], streams: list[IO[str]], extra: dict[str, str]
) -> None:
    # Objects of the first process can own threads, which this one does not have. It would abort if it freed them.
    gc.freeze()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.update(extra)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = (open(n, mode, closefd=False) for n, mode in enumerate("rww"))  # noqa: SIM115
    sys.argv = ["specbatch", *arguments]
    torch.set_num_threads(1)  # the forked process does not have the threads of the first one
    main()
