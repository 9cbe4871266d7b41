"""Runs one generated program, in a process of its own. Started by `sandbox.py`; standard library only.

Two processes: the launcher cuts itself off (`sandbox_isolation.py`) and waits; the runner, its child, takes on the
limits and runs the program.

A program that exits, with whatever status, has not passed. The runner reports its end with a secret, which it reads
from a pipe only then: no frame or object of Python holds it while the program runs.

This keeps model-written code from doing harm by accident. It is no defence against code written to break out.
"""

from __future__ import annotations

import _posixsubprocess
import builtins
import contextlib
import ctypes
import json
import os
import posix
import resource
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(__file__))
from sandbox_isolation import NOBODY, give_up_rights, is_public, isolate

sys.path.pop(0)  # what else lies there is not for programs

_PR_SET_PDEATHSIG = 1
_MIB = 2**20
_FILE_MIB = 16  # longest file that a program may write
_MAX_FDS = 64
_DETAIL_CHARS = 200
_PROCESS_NAMES = "system popen fork forkpty kill killpg execv execve execvp posix_spawn posix_spawnp"
_PROCESS_CALLS = (
    (os, _PROCESS_NAMES),
    (posix, _PROCESS_NAMES),  # the same functions under the name of the module that has them
    (_posixsubprocess, "fork_exec"),
    (subprocess, "Popen"),
)
_FILE_CALLS = (  # where the user's files are in reach
    (os, "remove unlink rmdir removedirs rename renames replace truncate chmod chown lchown fchmod fchown"),
    (shutil, "rmtree move chown"),
)


def main() -> None:
    """Reads {program, timeout_seconds, memory_mb} from standard input, and on a line of its own the secret; writes JSON
    lines to standard output."""
    job = json.loads(_line(0))
    given, report = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    signal.alarm(int(job["timeout_seconds"]) + 5)  # the launcher's own end, should nobody be left to kill it
    folder, is_root = os.getcwd(), os.getuid() == 0
    isolation = isolate(4 * _FILE_MIB)
    _say(report, isolation)
    own_root = isolation["files"] == "own root"
    # Where the user's files stay in sight, `nobody` must be able to read Python's.
    become_nobody = is_root and (own_root or is_public(os.__file__))
    if become_nobody and not own_root:
        os.chown(folder, NOBODY, NOBODY)
    proof, proves = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(given)
        os.close(proves)
        _run(job, _moved(report), _moved(proof), own_root, become_nobody)
    with contextlib.suppress(BrokenPipeError):
        os.write(proves, _line(given))
    os.close(proves)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        _say(report, {"outcome": "failed", "detail": f"the program was ended by {name}"})


def _line(fd: int) -> bytes:
    """Without a buffer: this process must not know yet what comes after the line."""
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
    return bytes(line)


def _moved(fd: int) -> int:
    """The same file under a number that nobody can guess."""
    free = [place for place in range(3, _MAX_FDS) if place != fd and not _is_open(place)]
    place = secrets.choice(free)
    os.dup2(fd, place)
    os.close(fd)
    return place


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _run(job: dict[str, Any], report: int, proof: int, own_root: bool, become_nobody: bool) -> NoReturn:
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(0)
    program = job.pop("program")
    give_up_rights(become_nobody)
    _limit(job["timeout_seconds"], job["memory_mb"])
    try:
        _disarm(_PROCESS_CALLS if own_root else _PROCESS_CALLS + _FILE_CALLS)
        # Not "__main__": what a program does when it is run as a script is not what is tested.
        exec(compile(program, "program", "exec"), {"__name__": "program", "__builtins__": builtins})
        result = {"outcome": "passed", "secret": os.read(proof, 64).decode()}
    except BaseException as exc:  # SystemExit and KeyboardInterrupt too: whatever it raises, it has not passed
        detail = ""
        with contextlib.suppress(BaseException):
            detail = str(exc)
        result = {"outcome": "failed", "detail": f"{type(exc).__name__}: {detail}"[:_DETAIL_CHARS].removesuffix(": ")}
    _say(report, result)
    os._exit(0)


def _limit(seconds: float, memory_mb: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_mb * _MIB,
        resource.RLIMIT_CPU: int(seconds) + 2,
        resource.RLIMIT_FSIZE: _FILE_MIB * _MIB,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MAX_FDS,
        resource.RLIMIT_NPROC: 0,  # no processes or threads of its own (the kernel does not hold root to it)
    }
    for limit, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a lower one is in force
            resource.setrlimit(limit, (value, value))


def _disarm(calls: Sequence[tuple[types.ModuleType, str]]) -> None:
    """What a function that is asked for a number has no business with."""

    def refused(*args: object, **options: object) -> NoReturn:
        raise PermissionError("generated programs may not do this")

    class NoSocket(socket.socket):
        def __init__(self, *args: object, **options: object) -> None:
            raise PermissionError("generated programs have no network")

    for module, names in calls:
        for name in names.split():
            if hasattr(module, name):
                setattr(module, name, refused)
    socket.socket = NoSocket  # type: ignore[misc]
    socket.create_connection = refused  # type: ignore[assignment]


def _say(report: int, line: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(report, json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    main()
