"""Runs one generated program, in a process of its own. Started by `sandbox.py`; standard library only.

Two processes: the launcher cuts itself off (namespaces of its own for network, processes and mounts, where the kernel
lets it) and waits; the runner, its child, takes on the limits and runs the program. The program's end is reported with
a secret that only the runner's own frame holds: a program that exits, with whatever status, has not passed.

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
import shutil
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Sequence
from typing import Any, NoReturn

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _RDONLY, _MS_PRIVATE = 442, -100, 0x8000, 1, 1 << 18
_PR_SET_PDEATHSIG = 1
_CAPABILITIES_3 = 0x20080522  # version of the structures of capset(2)
_MIB = 2**20
_FILE_MIB = 16  # longest file that a program may write
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
    """Reads {program, secret, timeout_seconds, memory_mb} from standard input; writes JSON lines to standard output."""
    job = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    signal.alarm(int(job["timeout_seconds"]) + 5)  # the launcher's own end, should nobody be left to kill it
    isolation = _isolate()
    _say(report, isolation)
    pid = os.fork()
    if pid == 0:
        _run(job, report, isolation)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        _say(report, {"outcome": "failed", "detail": f"the program was ended by {name}"})


def _isolate() -> dict[str, str]:
    """Leave the network, the other processes and the writable files behind, as far as the kernel allows."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder, user, group = os.getcwd(), os.getuid(), os.getgid()
    done = {"network": "sockets of Python disabled", "processes": "shared", "files": "writable"}
    with contextlib.suppress(AttributeError, OSError):
        if libc.unshare(_NEWUSER | _NEWNET | _NEWPID | _NEWIPC | _NEWNS) == 0:
            done |= {"network": "namespace", "processes": "namespace"}
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
                with open(f"/proc/self/{name}", "w") as file:  # without a name, no files could be made
                    file.write(text)
            # struct mount_attr: set, clear, propagation, userns_fd
            attributes = (ctypes.c_uint64 * 4)(_RDONLY, 0, _MS_PRIVATE, 0)
            size = ctypes.c_size_t(ctypes.sizeof(attributes))
            root = ctypes.c_char_p(b"/")
            if libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, root, _AT_RECURSIVE, attributes, size) == 0:
                options = f"size={4 * _FILE_MIB}m".encode()
                libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options)
                done["files"] = "read-only"
            os.chdir(folder)  # into what is mounted there now
        elif libc.unshare(_NEWUSER | _NEWNET) == 0:
            done["network"] = "namespace"
    return done


def _run(job: dict[str, Any], report: int, isolation: dict[str, str]) -> NoReturn:
    libc = ctypes.CDLL(None)
    _give_up_capabilities(libc)
    with contextlib.suppress(AttributeError):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.alarm(0)
    _limit(job["timeout_seconds"], job["memory_mb"])
    program, secret = job.pop("program"), job.pop("secret")
    try:
        _disarm(_PROCESS_CALLS if isolation["files"] == "read-only" else _PROCESS_CALLS + _FILE_CALLS)
        # Not "__main__": what a program does when it is run as a script is not what is tested.
        exec(compile(program, "program", "exec"), {"__name__": "program", "__builtins__": builtins})
        result = {"outcome": "passed", "secret": secret}
    except BaseException as exc:  # SystemExit and KeyboardInterrupt too: whatever it raises, it has not passed
        detail = ""
        with contextlib.suppress(BaseException):
            detail = str(exc)
        result = {"outcome": "failed", "detail": f"{type(exc).__name__}: {detail}"[:_DETAIL_CHARS].removesuffix(": ")}
    _say(report, result)
    os._exit(0)


def _give_up_capabilities(libc: ctypes.CDLL) -> None:
    """Of root, or of the launcher's user namespace: with them what is mounted read-only could be mounted anew."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)  # version, this process
    none = (ctypes.c_uint32 * 6)()  # two of: effective, permitted, inheritable
    with contextlib.suppress(AttributeError):
        libc.capset(header, none)


def _limit(seconds: float, memory_mb: int) -> None:
    limits = {
        resource.RLIMIT_AS: memory_mb * _MIB,
        resource.RLIMIT_CPU: int(seconds) + 2,
        resource.RLIMIT_FSIZE: _FILE_MIB * _MIB,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
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
