"""A process that ends what a Ray of this host left, and deletes its folder. It is run as a script.

Its standard input is a pipe from the process that started Ray. When that process ends, by kill -9 too, the pipe is
closed. Ray's own processes mostly end by themselves then, but two of them take more than half a minute.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_PAUSE_SECONDS = 0.2
_NUM_EMPTY_LOOKS = 3  # one after another, before the folder is deleted


def start_reaper(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that ends the processes with open files in `folder`. It begins when its standard input is
    closed."""
    # A session of its own: signals of the terminal do not reach it. -P: modules of this folder hide no others.
    command = [sys.executable, "-P", __file__, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def processes_of(folder: Path, but: int) -> Iterator[psutil.Process]:
    """Yield the processes that have a file of `folder` open, where each process of Ray writes its log. `but`: a process
    to leave out."""
    inside = f"{folder.resolve()}{os.sep}"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it belongs to somebody else, or has just ended
            if process.pid != but and any(file.path.startswith(inside) for file in process.open_files()):
                yield process


def reap(folder: Path, but: int) -> None:
    """Kill them until there are none."""
    num_empty = 0
    while num_empty < _NUM_EMPTY_LOOKS:
        found = list(processes_of(folder, but))
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        num_empty = 0 if found else num_empty + 1
        time.sleep(_PAUSE_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a scheduler sends it to all processes of a job
    parent = os.getppid()
    sys.stdin.buffer.read()
    reap(Path(sys.argv[1]), parent)
