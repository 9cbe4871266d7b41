"""Runs one generated program, in a process of its own. Started by `sandbox.py`; standard library only.

Two processes: the launcher cuts itself off (`sandbox_isolation.py`), waits, and reports; the runner, its child, takes
on the limits and runs the program. It has no file but one socket to the launcher.

A program that exits, with whatever status, has not passed. The proof that it has run to its end is a key, which the
runner draws itself: it writes the key to the socket before the program runs, and again after its end. Nobody but the
launcher can read it there, and no frame or object that the program can list holds the key.

This keeps model-written code from doing harm by accident, and from passing without its tests by what files and objects
it finds. It is no defence against code written to break out, such as one that searches the process's memory.
"""

from __future__ import annotations

import _posixsubprocess
import builtins
import collections
import contextlib
import ctypes
import functools
import gc
import json
import operator
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
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

sys.path.insert(0, os.path.dirname(__file__))
from sandbox_isolation import NOBODY, give_up_rights, is_public, isolate

sys.path.pop(0)  # what else lies there is not for programs

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_MIB = 2**20
_FILE_MIB = 16  # longest file that a program may write
_MAX_FDS = 64
_DETAIL_CHARS = 200
_KEY_BYTES = 16
_MAX_SAID = 1 << 16  # bytes that a runner may write to its socket; after that the socket is closed
_PROCESS_NAMES = "system popen fork forkpty kill killpg execv execve execvp posix_spawn posix_spawnp"
_PROCESS_CALLS = (
    (os, _PROCESS_NAMES),
    (posix, _PROCESS_NAMES),  # the same functions under the name of the module that has them
    (_posixsubprocess, "fork_exec"),
    (subprocess, "Popen"),
)
_GC_CALLS = ((gc, "get_objects get_referrers get_referents unfreeze"),)
_FILE_CALLS = (  # the calls that could change the user's files, if these can be reached
    (os, "remove unlink rmdir removedirs rename renames replace truncate chmod chown lchown fchmod fchown"),
    (shutil, "rmtree move chown"),
)


def main() -> None:
    """Reads {program, timeout_seconds, memory_mb} from standard input; writes two JSON lines to standard output: the
    isolation, and the outcome."""
    with open(0, closefd=False, encoding="utf-8") as given:
        job = json.load(given)
    report = os.dup(1)
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
    with contextlib.suppress(AttributeError):  # no process of this user opens these two processes' files, by /proc
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # No pipe, which a process can open again for reading by /proc.
    said, says = (end.detach() for end in socket.socketpair())
    pid = os.fork()
    if pid == 0:
        os.close(report)
        os.close(said)
        _run(job, says, own_root, become_nobody)
    os.close(says)
    text = _read(said)
    os.close(said)
    _, status = os.waitpid(pid, 0)
    _say(report, _outcome(text, status))


def _read(said: int) -> bytes:
    text = b""
    while len(text) < _MAX_SAID and (more := os.read(said, _MAX_SAID - len(text))):
        text += more
    return text


def _outcome(text: bytes, status: int) -> dict[str, Any]:
    """Return the outcome of a runner that has written `text` and ended. The program's own writes there are between the
    keys."""
    if len(text) >= 2 * _KEY_BYTES and text[:_KEY_BYTES] == text[-_KEY_BYTES:]:
        return {"outcome": "passed"}
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return {"outcome": "failed", "detail": f"the program was ended by {name}"}
    detail = None
    with contextlib.suppress(ValueError):
        detail = json.loads(text.rpartition(b"\n")[2])
    if not isinstance(detail, str):
        detail = "the program ended before its tests did"
    return {"outcome": "failed", "detail": detail[:_DETAIL_CHARS]}


def _run(job: dict[str, Any], says: int, own_root: bool, become_nobody: bool) -> NoReturn:
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(0)
    program = job.pop("program")
    give_up_rights(become_nobody)
    _limit(job["timeout_seconds"], job["memory_mb"])
    try:
        _disarm(_PROCESS_CALLS + _GC_CALLS if own_root else _PROCESS_CALLS + _GC_CALLS + _FILE_CALLS)
        # Not "__main__": what a program does when it is run as a script is not what is tested.
        run = functools.partial(
            exec, compile(program, "program", "exec"), {"__name__": "program", "__builtins__": builtins}
        )
        # One expression, whose steps C calls one after the other: no variable of a frame has them.
        collections.deque(map(operator.call, _steps(says, run)), maxlen=0)
    except BaseException as exc:  # SystemExit and KeyboardInterrupt too: whatever it raises, it has not passed
        detail = ""
        with contextlib.suppress(BaseException):
            detail = str(exc)
        detail = f"{type(exc).__name__}: {detail}"[:_DETAIL_CHARS].removesuffix(": ")
        with contextlib.suppress(BaseException):
            os.write(says, b"\n" + json.dumps(detail).encode())
    os._exit(0)


def _steps(says: int, run: Callable[[], object]) -> tuple[Callable[[], object], ...]:
    """Return the steps of the child: write a key, hide it from functions that list objects, run the program, and write
    the key again."""
    prove = functools.partial(os.write, says, secrets.token_bytes(_KEY_BYTES))
    return prove, gc.freeze, run, prove


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
    """Disable functions and sockets that a program which only computes an answer does not need."""

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
